"""Converts DeepSpeed's state to and from the names and shapes of the other strategies.

From stage 1 on a rank keeps the optimizer's numbers in one flat tensor per group, cut where its
share ends and not between rows; at stage 3 the weights too, each for itself. A checkpoint has rows.
So what is cut is gathered, tensor by tensor, and each rank keeps what it will write; on the way
back each rank reads the rows around its own numbers. DeepSpeed's own files are never involved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.pieces import (
    Piece,
    Section,
    Source,
    moment_name,
    named_tensors,
    own_pieces,
    require_same_shapes,
)
from paceline.strategies.stored import piece_of


class Span(NamedTuple):
    """`numel` numbers of a tensor of `shape`, from number `first` in reading order on. They lie in
    a flat tensor of this rank, from `offset` on."""

    shape: tuple[int, ...]
    first: int
    numel: int
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.detach()[self.offset : self.offset + self.numel]


class Cut(NamedTuple):
    """A tensor of which each rank holds a span, in `flat`."""

    section: Section
    name: str
    flat: Tensor
    span: Span


def is_cut(value: Tensor) -> bool:
    """Say whether this rank holds a part of the weight (stage 3); now and then it has the whole,
    too."""
    return hasattr(value, "ds_id")


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole weight: stage 3 leaves an empty one in its place."""
    return tuple(getattr(value, "ds_shape", value.shape))


def collect_pieces(
    module: nn.Module, optimizer: Any, inner: Optimizer, device: torch.device
) -> list[Piece]:
    """Return weights and moments of any stage, whole. A collective."""
    tensors = list(named_tensors(module))
    whole = [piece_of("model", name, value) for name, value in tensors if not is_cut(value)]
    cuts = [
        Cut("model", name, value.ds_tensor, _weight_span(value))  # type: ignore[attr-defined]
        for name, value in tensors
        if is_cut(value)
    ]
    for name, flat, span in _moments(module, optimizer):
        for slot, value in inner.state.get(flat, {}).items():
            full_name = moment_name(name, slot)
            if not torch.is_tensor(value):
                continue
            if value.shape == flat.shape:
                cuts.append(Cut("optimizer", full_name, value, span))
            else:  # a step count, the same for the whole group
                whole.append(piece_of("optimizer", full_name, value))
    return whole + _gather(cuts, device)


def load_weights(source: Source, module: nn.Module, optimizer: Any) -> None:
    """Load weights and buffers; at stage 3 this rank's part of them."""
    held = dict(named_tensors(module))
    require_same_shapes(source, {name: shape_of(value) for name, value in held.items()})
    for name, value in held.items():
        if is_cut(value):
            span = _weight_span(value)
            _read(source, "model", name, span, value.ds_tensor)  # type: ignore[attr-defined]
        else:
            value.detach().copy_(source.rows("model", name, 0, (*value.shape, 1)[0]))
    _gather_again([value for value in held.values() if is_cut(value)], optimizer)
    if flat_parts(optimizer):
        optimizer.refresh_fp32_params()  # its own copy, that the update works on


def load_moments(
    source: Source,
    module: nn.Module,
    optimizer: Any,
    inner: Optimizer,
    slots: Mapping[str, Sequence[str]],
) -> None:
    """Load what the optimizer keeps for this rank's numbers, from stage 1 on; `slots` by the
    parameter's name."""
    shapes = source.shapes("optimizer")
    found: dict[Tensor, dict[str, Tensor]] = {}
    for name, flat, span in _moments(module, optimizer):
        entry = found.setdefault(flat, {})
        for slot in slots.get(name, ()):
            full_name = moment_name(name, slot)
            if shapes[full_name] == span.shape:
                moments = entry.setdefault(slot, torch.zeros_like(flat))
                _read(source, "optimizer", full_name, span, moments)
            else:
                # One count for the whole group: that of the weight that was updated most often.
                count = source.rows("optimizer", full_name, 0, 1).clone()
                entry[slot] = torch.maximum(count, entry.get(slot, count))
    with filled_groups(optimizer):
        flats = [flat for group in inner.param_groups for flat in group["params"]]
        state = {number: found[flat] for number, flat in enumerate(flats) if found.get(flat)}
        inner.load_state_dict(inner.state_dict() | {"state": state})


@contextmanager
def filled_groups(optimizer: Any) -> Iterator[None]:
    """While inside, the optimizer has its parameters: stage 3 gives them only for an update."""
    is_stage3 = _is_stage3(optimizer)
    if is_stage3:
        optimizer._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        if is_stage3:
            optimizer._clear_fp32_optimizer_param_groups()


def _is_stage3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp16_groups")


def _moments(module: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor, Span]]:
    """Yield every weight that is updated, in the same order on every rank: its name, the flat
    tensor of its group, and what this rank has of it there."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    is_stage3 = _is_stage3(optimizer)
    groups = optimizer.fp16_groups if is_stage3 else getattr(optimizer, "bit16_groups", [])
    for group, flat in zip(groups, flat_parts(optimizer), strict=True):
        for parameter in group:
            if is_stage3:
                _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                span = _weight_span(parameter)._replace(offset=offset)
            else:
                span = _flat_span(parameter)
            yield names[parameter], flat, span


def _flat_span(parameter: Any) -> Span:
    """Return where a weight is in the flat tensor, by DeepSpeed's own map of stages 1 and 2; None:
    no part of it is here."""
    shape, found = tuple(parameter.shape), parameter._hp_mapping
    if found is None:
        return Span(shape, 0, 0, 0)
    inside, here = found.lp_fragment_address, found.hp_fragment_address
    return Span(shape, inside.start, inside.numel, here.start)


def _weight_span(parameter: Any) -> Span:
    """Return this rank's part at stage 3: parts are equal, the last ones padded."""
    each = parameter.ds_tensor.ds_numel
    first = min(dist.get_rank() * each, parameter.ds_numel)
    return Span(tuple(parameter.ds_shape), first, min(each, parameter.ds_numel - first), 0)


def _gather(cuts: Iterable[Cut], device: torch.device) -> list[Piece]:
    """Gather whole tensors, one at a time, so that no rank ever has more than its share and one of
    them. Who writes what depends on sizes only: all ranks know it before anything is gathered."""
    rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
    drafts = [(cut, _draft(cut, everyone)) for cut in cuts]
    own = {(p.section, p.name) for p in own_pieces([d for _, d in drafts], rank, False)}
    kept = []
    for cut, draft in drafts:
        value = torch.zeros(prod(cut.span.shape), dtype=cut.flat.dtype, device=device)
        value[cut.span.first : cut.span.first + cut.span.numel] = cut.span.of(cut.flat)
        # As integers: to add 0 leaves every bit as it is, also of -0 and NaN.
        dist.all_reduce(value.view(torch.int32))
        if (draft.section, draft.name) in own:
            whole = value.cpu().reshape(cut.span.shape)
            kept.append(draft._replace(value=whole, holders=(rank,)))
    return kept


def _draft(cut: Cut, holders: tuple[int, ...]) -> Piece:
    """Return a piece with a size and no memory."""
    shape = cut.span.shape
    assert cut.flat.element_size() == 4, "weights and moments are fp32"
    value = torch.empty(shape, dtype=cut.flat.dtype, device="meta")
    return Piece(cut.section, cut.name, shape, 0, value, holders)


def _read(source: Source, section: Section, name: str, span: Span, flat: Tensor) -> None:
    """Read this rank's numbers, out of the rows that they stand in."""
    if span.numel == 0:
        return
    width, end = prod(span.shape[1:]), span.first + span.numel
    row, last = span.first // width, (end - 1) // width
    rows = source.rows(section, name, row, last - row + 1).reshape(-1)
    span.of(flat).copy_(rows[span.first - row * width : end - row * width])


def _gather_again(parameters: list[Any], optimizer: Any) -> None:
    """Gather at stage 3 what is whole just now, for it has the old values. Small weights are whole
    all the time."""
    if not parameters:
        return
    live = [p for p in parameters if p.ds_status.name == "AVAILABLE"]
    if live:
        live[0].partition(live)
    optimizer.invalidate_secondary_tensor()
    small = optimizer.persistent_parameters
    if small:
        small[0].all_gather(small)


def flat_parts(optimizer: Any) -> list[Tensor]:
    """Return this rank's fp32 weights as the optimizer sees them: a flat tensor per group."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []
