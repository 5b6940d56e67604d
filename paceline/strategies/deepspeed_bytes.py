"""What a rank holds under DeepSpeed 0.19: predicted from shapes, and found in its live objects.

P parameters, W ranks, fp32 weights whatever is computed in, AdamW:

    stage 0   16 P, as DDP
    stage 1   4 P flat weights + 12 P / W (a second copy of this rank's part, and its moments)
              + gradients of every parameter that this part touches, whole (about 4 P / W)
    stage 2   the same at rest; stage 1 has whole gradients (4 P more) until they are exchanged
    stage 3   20 P / W + a bucket of gradients + small parameters whole

Flat weights are padded to a multiple of 2 W for each group of the optimizer, stage 3 pads each
parameter to a multiple of W. With that the prediction is exact to the byte. An offloaded optimizer
has the same state on the CPU, and staging buffers there that are not counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.schema import RunConfig
from paceline.records import Exchange, StateBytes
from paceline.strategies.base import Share
from paceline.strategies.ddp import optimizer_bytes
from paceline.strategies.deepspeed_config import num_elements, zero_section
from paceline.strategies.gather import storage_bytes
from paceline.strategies.shape import ModelShape, ParameterShape, sum_bytes

ALIGNMENT = 2  # elements: each rank's part of a flat group starts at a multiple of it
WIDE = 4  # bytes: weights, gradients and what is sent are fp32
MAX_LIVE = 1_000_000_000  # elements that stage 3 keeps gathered; DeepSpeed's own default


def estimate_bytes(model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
    stage = config.strategy.stage
    if stage == 0:
        trainable = sum_bytes(model.trainable)
        return StateBytes(
            parameters=trainable + sum_bytes(model.frozen),
            gradients=trainable,
            optimizer=optimizer_bytes(config, trainable, len(model.trainable)),
        )
    if share.index is None:
        every = (replace(share, index=index) for index in range(share.size))
        return max((estimate_bytes(model, config, s) for s in every), key=lambda held: held.total)
    section = zero_section(config, sum(p.numel for p in model.trainable))
    if stage == 3:
        return _estimate_stage3(model, config, share, section)
    return _estimate_flat(model, config, share, section)


def _estimate_flat(
    model: ModelShape, config: RunConfig, share: Share, section: dict[str, Any]
) -> StateBytes:
    """Stages 1 and 2: one flat tensor a group, cut into W equal parts."""
    groups = optimizer_groups(model.trainable)
    parts = [part_numel(group, share.size) for group in groups]
    own = sum(parts) * WIDE
    whole = sum(p.numel for p in model.trainable) * WIDE if config.strategy.stage == 1 else 0
    return StateBytes(
        parameters=own * share.size + sum_bytes(model.frozen),
        gradients=sum(_touched_numel(g, n, share) for g, n in zip(groups, parts, strict=True))
        * WIDE,
        optimizer=own + optimizer_bytes(config, own, len(groups)),
        deferred=whole + num_elements(section, "reduce_bucket_size") * WIDE,
    )


def _estimate_stage3(
    model: ModelShape, config: RunConfig, share: Share, section: dict[str, Any]
) -> StateBytes:
    groups = optimizer_groups(model.trainable)
    threshold = num_elements(section, "stage3_param_persistence_threshold")
    small = sum(p.numel for p in model.trainable if p.numel < threshold)
    small += sum(p.numel for p in model.frozen if p.numel < threshold)
    own = sum(-(-p.numel // share.size) for p in model.trainable) * WIDE
    frozen = sum(-(-p.numel // share.size) for p in model.frozen) * WIDE
    large = sum(p.numel for p in model.parameters) - small
    return StateBytes(
        parameters=own + frozen + small * WIDE,
        gradients=own + num_elements(section, "reduce_bucket_size") * WIDE,
        optimizer=own + optimizer_bytes(config, own, len(groups)),
        # Kept from forward to backward unless there are more: it sees that they are used again.
        gathered=min(large, num_elements(section, "stage3_max_live_parameters", MAX_LIVE)) * WIDE,
    )


def optimizer_groups(parameters: Iterable[ParameterShape]) -> list[list[ParameterShape]]:
    """The groups of train/optim.py, in its order; DeepSpeed flattens each by itself."""
    kept = list(parameters)
    matrices = [p for p in kept if len(p.shape) >= 2]
    vectors = [p for p in kept if len(p.shape) < 2]
    return [group for group in (matrices, vectors) if group]


def part_numel(group: Sequence[ParameterShape], size: int) -> int:
    """Elements of one rank's part of a flat group, padding included."""
    step = ALIGNMENT * size
    return -(-sum(p.numel for p in group) // step) * ALIGNMENT


def _touched_numel(group: Sequence[ParameterShape], part: int, share: Share) -> int:
    """Gradients of the parameters that this rank's part cuts into are kept whole; padding too."""
    assert share.index is not None, "one rank at a time"
    start, end = share.index * part, (share.index + 1) * part
    touched = offset = 0
    for parameter in group:
        if offset < end and offset + parameter.numel > start:
            touched += parameter.numel
        offset += parameter.numel
    return touched + max(0, end - max(start, offset))


def plan_bytes_sent(model: ModelShape, config: RunConfig, share: Share) -> Exchange:
    """Stages 0 and 1 exchange once a step; 2 and 3 keep no whole gradients, so each microbatch."""
    stage, numels = config.strategy.stage, [p.numel for p in model.trainable]
    if share.size == 1:
        return Exchange(plain=0, sent=0, because="one rank has nobody to reduce with")
    if stage == 3:
        numels = [-(-numel // share.size) * share.size for numel in numels]
    num_times = share.num_microbatches if stage >= 2 else 1
    total = sum(numels) * WIDE * num_times
    how = "scattered" if stage == 3 else "reduced"
    when = "once a step" if num_times == 1 else f"for each of {num_times} microbatches"
    return Exchange(plain=total, sent=total, because=f"{how} {when}, in fp32")


def found_bytes(module: nn.Module, optimizer: Any, inner: torch.optim.Optimizer) -> StateBytes:
    """Walk the tensors of a live engine; memory that two of them share counts once, where it is
    first found. `optimizer` is DeepSpeed's, `inner` the one that does the arithmetic."""
    seen: set[int] = set()
    parameters = _new_bytes(_weights(module), seen)
    state = _new_bytes(_optimizer_tensors(optimizer, inner), seen)
    gradients = _new_bytes(_gradients(module, optimizer), seen)
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=state)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # stage 3: this rank's part
            yield parameter.ds_tensor


def _optimizer_tensors(optimizer: Any, inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from flat_parts(optimizer)
    for entry in inner.state.values():
        yield from (value for value in entry.values() if torch.is_tensor(value))


def flat_parts(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 weights as the optimizer sees them: a flat tensor a group."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def _gradients(module: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Of the model, of the flat parts (offloaded), on their way, and kept for the update."""
    owners = [*module.parameters(), *flat_parts(optimizer)]
    yield from (owner.grad for owner in owners if owner.grad is not None)
    names = ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu")
    for name in (*names, "grad_partitions_flat_buffer"):
        yield from _tensors(getattr(optimizer, name, None))
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _tensors(bucket.buffer)


def _tensors(value: Any) -> Iterator[Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    new = [t for t in tensors if t.untyped_storage().data_ptr() not in seen]
    seen |= {t.untyped_storage().data_ptr() for t in new}
    return storage_bytes(new)
