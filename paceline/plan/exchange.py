"""Chooses who moves gradients and weights between ranks: collectives of NCCL or gloo, or the
ranks themselves through symmetric memory, which needs NVLink between all of them; whole, or in
the parts that matrix products need."""

import os

from paceline.config.schema import RunConfig
from paceline.records import Choice, Crew, Env, ExchangeBy
from paceline.strategies.base import Strategy

# torch's own switch, to try it with ranks that share a GPU.
SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NVLINKS = ("nvlink", "nvswitch")


def choose_exchange(
    config: RunConfig, env: Env, crew: Crew, strategy: Strategy
) -> Choice[ExchangeBy]:
    """Choose as asked, unless the ranks cannot reach each other's memory: then say why."""
    asked: ExchangeBy = getattr(config.strategy, "exchange", "collectives")
    if "exchange" not in strategy.Settings.model_fields:  # said of every key that is not read
        asked = "collectives"
    if asked == "collectives":
        return Choice.as_asked(asked, matters=False)
    if asked == "fused" and not strategy.fuses:
        because = "only zero2 and zero3 take weights in parts"
        return Choice(requested=asked, value="collectives", because=because)
    lacking = strategy.no_symmetric or _lacking(config, env, crew)
    if lacking and asked == "fused" and crew.world_size > 1:
        return Choice(
            requested=asked, value="pipelined", because=f"parts by collectives: {lacking}"
        )
    if lacking:
        return Choice(requested=asked, value="collectives", because=lacking)
    return Choice.as_asked(asked)


def _lacking(config: RunConfig, env: Env, crew: Crew) -> str:
    """Return why symmetric memory cannot be used; empty: it can."""
    if crew.world_size == 1:
        return "one rank has no other to reach"
    if not crew.on_gpu:
        return "symmetric memory is that of GPUs, and the ranks are on CPU"
    if crew.num_nodes > 1:
        return "the ranks are on several machines, and NVLink ends at one"
    used = crew.device_indices or list(range(crew.per_node))
    if len(set(used)) < len(used):
        is_allowed = {**os.environ, **config.launch.env}.get(SHARED) == "1"
        return "" if is_allowed else f"ranks share a GPU, and {SHARED}=1 does not allow it"
    pairs = {(min(link.a, link.b), max(link.a, link.b)): link.kind for link in env.links}
    for a in sorted(used):
        for b in sorted(used):
            kind = pairs.get((a, b))
            if a < b and kind not in NVLINKS:
                return f"there is no NVLink between GPUs {a} and {b}: {kind or 'not known'}"
    return ""
