"""What one optimizer step consumes: this rank's microbatches on the device, and the loss scale."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.cursor import Indices
from paceline.data.loader import Microbatch, Microbatches, to_device
from paceline.records import Plan


class StepBatch(NamedTuple):
    """`scale` = dp degree / units in the global step: the loss normalisation of every strategy."""

    batches: list[Any]
    units: float | Tensor
    scale: float | Tensor
    sample_ids: list[Indices]


class Feed:
    """Step batches, one after the other, from microbatches."""

    def __init__(self, microbatches: Microbatches, plan: Plan, device: torch.device) -> None:
        self.microbatches, self.plan, self.device = microbatches, plan, device
        self._ahead: list[Microbatch] = []
        self.fixed_units = (
            plan.batch.global_size * plan.units_per_sample
            if plan.units_per_sample is not None
            else None
        )

    def close(self) -> None:
        self.microbatches.close()

    def fault(self, error: RuntimeError) -> Exception:
        """The error, or what it says of a loader process, for people."""
        return self.microbatches.fault(error)

    def peek(self) -> Microbatch:
        """The next microbatch, which `next` will hand out all the same."""
        self._ahead = self._ahead or [next(self.microbatches)]
        return self._ahead[0]

    def next(self) -> StepBatch:
        missing = self.plan.batch.grad_accum - len(self._ahead)
        loaded = self._ahead + [next(self.microbatches) for _ in range(missing)]
        self._ahead = []
        units = self._units_in_step(loaded)
        batches = [item.batch for item in loaded]
        if self.device.type != "cpu":
            batches = [to_device(batch, self.device) for batch in batches]
        return StepBatch(
            batches,
            units,
            self.plan.batch.dp / units,
            [item.sample_ids for item in loaded],
        )

    def _units_in_step(self, loaded: list[Microbatch]) -> float | Tensor:
        """Units over all ranks; a collective only where samples differ in size."""
        if self.fixed_units is not None:
            return self.fixed_units
        local = float(sum(item.units for item in loaded))
        on_gpu = self.device.type == "cuda"
        units = torch.tensor(local, dtype=torch.float64, pin_memory=on_gpu)
        units = units.to(self.device, non_blocking=True)
        # Over every rank: a rank that is not its group's first in the dp axis adds its copies too,
        # so divide them out again.
        dist.all_reduce(units)
        return units * self.plan.batch.dp / self.plan.world_size
