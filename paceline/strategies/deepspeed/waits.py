"""Where DeepSpeed waits for other ranks, counted by the clock of the step.

All its collectives go through one object of the process, `deepspeed.comm.comm.cdb`: those that it
waits for at once are counted there, and those that it starts where their handle is waited for. So
is all of it on CPU, and on a GPU what runs on the stream of the step.

With `overlap_comm`, which is stage 3's default, a GPU exchanges on streams beside that of the step,
where waiting holds nobody up. Counted are then the places at which the step waits for them:

    stages 1, 2   average_tensor       for the bucket before, whose buffer it needs
                  synchronize          for the last bucket, at the end of backward
    stage 3       fetch_sub_module     for weights that were gathered
                  __reduce_and_...     for old buckets, once many are on their way
                  synchronize          for the last bucket, at the end of backward

These are names inside DeepSpeed 0.19. Where one is missing nobody knows how long such a GPU waits,
and `count_waits` says so.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.strategies.waits import Waits

COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all",
    "all_to_all_single", "broadcast", "barrier",
)  # fmt: skip
REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


class CollectiveWaits(Waits):
    """Counts collectives alone: what else DeepSpeed does after the last gradient is its work."""

    def until_returned(self, objective: Tensor) -> None:
        pass


def count_waits(deepspeed: Any, engine: Any, waits: Waits, device: torch.device) -> bool:
    """Count in `waits` from now on where DeepSpeed waits; return whether that is all of it."""
    backend = deepspeed.comm.comm.cdb
    places = _beside_the_step(deepspeed, engine) if device.type == "cuda" else []
    if not all(hasattr(owner, name) for owner, name in places):
        return False
    for name in COLLECTIVES:
        _forget(backend, name)
        if hasattr(backend, name):
            waits.around_collective(backend, name)
    for owner, name in places:
        _forget(owner, name)
        waits.around(owner, name)
    return True


def _beside_the_step(deepspeed: Any, engine: Any) -> list[tuple[Any, str]]:
    """Return where the stream of the step waits for those on which DeepSpeed exchanges."""
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    if stage == 0 or not engine.zero_overlap_comm():
        return []
    if stage < 3:
        accelerator = deepspeed.accelerator.get_accelerator()
        return [(optimizer, "average_tensor"), (accelerator, "synchronize")]
    gathers = getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None)
    stream = getattr(optimizer, "reduce_and_partition_stream", None)
    return [(gathers, "fetch_sub_module"), (optimizer, REDUCE), (stream, "synchronize")]


def _forget(owner: Any, name: str) -> None:
    """Drop what an engine that was built earlier in this process has put around a method."""
    vars(owner).pop(name, None)
