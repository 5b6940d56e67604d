"""Between an engine's tensors and the pieces of a checkpoint: names, rows, holders."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from paceline.checkpoint.pieces import (
    EMA,
    MAX_NAMED,
    Piece,
    Section,
    Source,
    moment_name,
    named_tensors,
    require_same_shapes,
)
from paceline.errors import ConfigError
from paceline.strategies.gather import cut_like, cut_rows_like, first_row, plain
from paceline.strategies.precision import LossScale

LOG = logging.getLogger("paceline")
NOTHING: Mapping[str, tuple[int, ...]] = MappingProxyType({})
SCALER = ":loss_scale"  # no parameter has this name
GROUP = ":group"  # nor this
# Python numbers in an optimizer's state, as tensors without axes whose slot is SLOT:KIND.
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
Slots = Mapping[str, Collection[str]]  # what an optimizer keeps, by the parameter's name


def module_pieces(module: nn.Module, trained_only: bool = False) -> list[Piece]:
    """Return weights and buffers; `trained_only`: without weights that are not trained."""
    left_out = untrained(module) if trained_only else frozenset()
    return _not_empty(
        piece_of("model", name, value)
        for name, value in named_tensors(module)
        if name not in left_out
    )


def untrained(module: nn.Module) -> frozenset[str]:
    """Return the names of what never changes: weights that are not trained, and their companions in
    a state dict, such as tables of packed numbers."""
    buffers = dict(module.named_buffers())
    return frozenset(
        name
        for name, value in named_tensors(module)
        if name not in buffers and not value.requires_grad
    )


def moment_pieces(
    module: nn.Module, optimizer: Optimizer, holders: tuple[int, ...] | None = None
) -> list[Piece]:
    """Return the optimizer's state on this rank; `holders` as for `piece_of`."""
    return _not_empty(
        piece_of("optimizer", moment_name(name, slot), value, holders)
        for name, parameter in module.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(value)
    )


def _not_empty(pieces: Iterable[Piece]) -> list[Piece]:
    """Leave out pieces of which this rank has no rows, unless no rank has any."""
    return [piece for piece in pieces if piece.value.numel() or 0 in piece.shape]


def load_module(
    source: Source, module: nn.Module, elsewhere: Mapping[str, tuple[int, ...]] = NOTHING
) -> None:
    """Load weights and buffers, as far as this rank holds them; `elsewhere` names the rest of the
    model's. What is not trained may be absent (`checkpoint.weights=trained`): the model has it."""
    absent = untrained(module) - source.shapes("model").keys()
    held = {name: value for name, value in named_tensors(module) if name not in absent}
    own = {name: tuple(value.shape) for name, value in held.items()}
    require_same_shapes(source, {**elsewhere, **own})
    for name, value in held.items():
        source.fill("model", name, first_row(value), local_part(value))


def load_optimizer(
    source: Source, module: nn.Module, optimizer: Optimizer, wanted: Slots | None
) -> None:
    """Load the state of the parameters that this rank updates; for others nothing is read.
    `wanted`: what the optimizer keeps; None: whatever there is."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    slots = fitting_slots(source, wanted)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: dict(
            _moment(source, names[parameter], slot, parameter)
            for slot in slots.get(names[parameter], ())
        )
        for number, parameter in enumerate(parameters)
    }
    kept = {number: entry for number, entry in state.items() if entry}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})


def fitting_slots(source: Source, wanted: Slots | None) -> dict[str, list[str]]:
    """Return the slots of each parameter, but only of those that have exactly what is `wanted`: the
    state of another optimizer means nothing to this one."""
    found = slots_of(source)
    if wanted is None:
        return found
    fitting = {
        name: slots for name, slots in found.items() if set(slots) == set(wanted.get(name, ()))
    }
    others = [name for name in wanted if found.get(name) and name not in fitting]
    if others:
        LOG.warning(
            "the checkpoint has the state of another optimizer for %d parameters: this one begins"
            " anew for them", len(others),
        )  # fmt: skip
    return fitting


def _moment(source: Source, name: str, slot: str, parameter: Tensor) -> tuple[str, Any]:
    plain, _, kind = slot.partition(":")
    if kind:
        return plain, NUMBERS[kind][0](source.rows("optimizer", moment_name(name, slot), 0, 1))
    return slot, moment_like(source, moment_name(name, slot), parameter)


def piece_of(
    section: Section, name: str, value: Tensor, holders: tuple[int, ...] | None = None
) -> Piece:
    """Return this rank's part of a tensor. `holders`: the ranks with it, if the tensor itself does
    not tell."""
    held = holders if holders is not None else _holders(value)
    return Piece(section, name, tuple(value.shape), first_row(value), local_part(value), held)


def local_part(value: Tensor) -> Tensor:
    return plain(value.to_local() if isinstance(value, DTensor) else value).detach()


def moment_like(source: Source, name: str, parameter: Tensor) -> Tensor:
    """Read a moment. One with its parameter's shape, or number of rows, is sharded like it; a step
    count is one number, and anything else is whole on every rank."""
    shape = source.shapes("optimizer")[name]
    if shape == tuple(parameter.shape):
        rows = torch.empty_like(local_part(parameter))
        source.fill("optimizer", name, first_row(parameter), rows)
        return cut_like(parameter, rows)
    if isinstance(parameter, DTensor) and shape[:1] == tuple(parameter.shape[:1]):
        count = len(local_part(parameter))
        rows = source.rows("optimizer", name, first_row(parameter), count)
        return cut_rows_like(parameter, rows.to(parameter.device))
    return source.rows("optimizer", name, 0, (*shape, 1)[0])


def fill_like(source: Source, name: str, value: Tensor) -> None:
    """Read this rank's part of a tensor into it."""
    source.fill("optimizer", name, first_row(value), local_part(value))


def slots_of(source: Source) -> dict[str, list[str]]:
    """Return what is kept for each parameter: {"blocks.0.weight": ["exp_avg", ...]}."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in source.shapes("optimizer"):
        slot, _, parameter = name.partition("/")
        if slot != EMA:  # kept beside it, and no part of the optimizer
            found[parameter].append(slot)
    return found


def scale_pieces(scale: LossScale) -> list[Piece]:
    """Return the pieces of fp16's loss scale, which every rank has."""
    return [
        piece_of("optimizer", moment_name(SCALER, slot), value)
        for slot, value in scale.state().items()
    ]


def load_scale(scale: LossScale, source: Source) -> None:
    """Load the loss scale; leave it as it is if the checkpoint was not made in fp16."""
    names = {slot: moment_name(SCALER, slot) for slot in scale.state()}
    if set(names.values()) <= source.shapes("optimizer").keys():
        scale.load_state({s: source.rows("optimizer", name, 0, 1) for s, name in names.items()})


class OwnState:
    """State of a workload's own optimizer that is not tensors: numbers of a parameter, and those of
    a group that have changed since it was built."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.first = [dict(_numbers(group)) for group in optimizer.param_groups]
        self.is_checked = False

    def require_storable(self) -> None:
        """Refuse, after the first update and not hours later, what no checkpoint could hold."""
        state = self.optimizer.state
        if self.is_checked or not state:
            return
        self.is_checked = True
        problems = [
            f"{slot} of {name}: {why}"
            for name, parameter in self.module.named_parameters()
            for slot, value in state.get(parameter, {}).items()
            if (why := _not_storable(value, parameter))
        ]
        if problems:
            raise ConfigError(
                f"{type(self.optimizer).__name__} keeps what cannot go into a checkpoint:"
                f" {'; '.join(problems[:MAX_NAMED])}\nhint: keep tensors of the parameter's shape,"
                " or numbers; strategy.name=ddp takes tensors of any shape"
            )

    def pieces(self) -> list[Piece]:
        entries = [(n, self.optimizer.state.get(p, {})) for n, p in self.module.named_parameters()]
        for number, group in enumerate(self.optimizer.param_groups):
            changed = {k: v for k, v in _numbers(group) if self.first[number].get(k) != v}
            entries.append((f"{GROUP}{number}", changed))
        return [
            piece_of(
                "optimizer",
                moment_name(name, f"{slot}:{type(value).__name__}"),
                torch.tensor(value, dtype=NUMBERS[type(value).__name__][1]),
            )
            for name, entry in entries
            for slot, value in _numbers(entry)
        ]

    def load(self, source: Source) -> None:
        """Load the groups' numbers; those of parameters come with their moments."""
        slots = slots_of(source)
        for number, group in enumerate(self.optimizer.param_groups):
            name = f"{GROUP}{number}"
            group |= dict(
                _moment(source, name, slot, torch.empty(0)) for slot in slots.get(name, ())
            )


def _numbers(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the Python numbers in a state or a group. The rate is the schedule's."""
    for key, value in entry.items():
        if type(value).__name__ in NUMBERS and key not in ("lr", "lr_scale"):
            yield key, value


def _not_storable(value: Any, parameter: Tensor) -> str:
    if torch.is_tensor(value):
        is_cut = isinstance(parameter, DTensor) and value.dim() > 0
        if not is_cut or (isinstance(value, DTensor) and value.shape == parameter.shape):
            return ""
        return (
            f"a tensor of shape {list(value.shape)} on one rank's piece of {list(parameter.shape)}"
        )
    return "" if value is None or type(value).__name__ in NUMBERS else f"a {type(value).__name__}"


def _holders(value: Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same part: all of them for a plain tensor, for a sharded one
    those at the same place of other copies."""
    if not isinstance(value, DTensor):
        return tuple(range(dist.get_world_size()))
    mesh, here = value.device_mesh, value.device_mesh.get_coordinate()
    assert here is not None, "this rank is in the mesh"
    ranks = mesh.mesh
    for axis in reversed(range(mesh.ndim)):
        if isinstance(value.placements[axis], Shard):
            ranks = ranks.select(axis, here[axis])
    return tuple(torch.as_tensor(ranks).flatten().tolist())
