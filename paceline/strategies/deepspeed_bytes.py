"""What a rank holds under DeepSpeed 0.19, predicted from shapes.

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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.config.schema import RunConfig
from paceline.records import Exchange, StateBytes
from paceline.strategies.base import Share
from paceline.strategies.ddp import optimizer_bytes, replica_bytes
from paceline.strategies.deepspeed_config import DeepSpeedSettings, num_elements, zero_section
from paceline.strategies.shape import ModelShape, ParameterShape, decay_groups, sum_bytes

ALIGNMENT = 2  # elements: each rank's part of a flat group starts at a multiple of it
WIDE = 4  # bytes: weights, gradients and what is sent are fp32
MAX_LIVE = 1_000_000_000  # elements that stage 3 keeps gathered; DeepSpeed's own default


def estimate_bytes(model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
    stage = DeepSpeedSettings.of(config).stage
    if stage == 0:
        return replica_bytes(model, config)
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
    groups = decay_groups(model.trainable)
    parts = [part_numel(group, share.size) for group in groups]
    own = sum(parts) * WIDE
    whole = (
        sum(p.numel for p in model.trainable) * WIDE
        if DeepSpeedSettings.of(config).stage == 1
        else 0
    )
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
    groups = decay_groups(model.trainable)
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
    stage, numels = DeepSpeedSettings.of(config).stage, [p.numel for p in model.trainable]
    if share.size == 1:
        return Exchange(plain=0, sent=0, because="one rank has nobody to reduce with")
    if stage == 3:
        numels = [-(-numel // share.size) * share.size for numel in numels]
    num_times = share.num_microbatches if stage >= 2 else 1
    total = sum(numels) * WIDE * num_times
    how = "scattered" if stage == 3 else "reduced"
    when = "once a step" if num_times == 1 else f"for each of {num_times} microbatches"
    return Exchange(plain=total, sent=total, because=f"{how} {when}, in fp32")
