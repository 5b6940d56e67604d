"""What one optimizer step consumes: this rank's microbatches on the device, and the loss scale."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.base import Dataset
from paceline.data.cursor import Indices, Order, StepSlice
from paceline.data.loader import (
    LoaderPlan,
    Microbatch,
    Microbatches,
    MicrobatchSource,
    to_device,
)
from paceline.errors import ConfigError, DataError
from paceline.job import Job
from paceline.records import Plan


class StepBatch(NamedTuple):
    """`scale` = dp degree / units in the global step: the loss normalisation of every strategy."""

    batches: list[Any]
    units: float | Tensor
    scale: float | Tensor
    sample_ids: list[Indices]


class Feed:
    """Turns microbatches into step batches, one after the other."""

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
        """Return the error; where it is about a loader process, in words for people."""
        return self.microbatches.fault(error)

    def peek(self) -> Microbatch:
        """Return the next microbatch, which `next` will hand out all the same."""
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
        """Return the units over all ranks; a collective only where samples differ in size."""
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


def require_data(data: Dataset | None, plan: Plan) -> Dataset:
    """Return the training data; refuse what cannot be read by index or fills no step."""
    if data is not None and not hasattr(data, "__len__"):
        raise DataError(
            f"build_data returned a {type(data).__name__}, which has no length\n"
            "hint: return samples by index: __len__ and __getitem__"
        )
    ignored = [name for name in ("collate_fn", "collate") if hasattr(data, name)]
    if ignored and not hasattr(data, "batch"):
        raise ConfigError(
            f"{type(data).__name__}.{ignored[0]} is a method that nothing calls\n"
            "hint: write batch(self, indices), which returns a whole batch: return"
            f" self.{ignored[0]}([self[int(i)] for i in indices])"
        )
    found = len(data) if data is not None else 0
    if data is None or found < plan.batch.global_size:
        raise DataError(
            f"the training data has {found} samples, and one step takes {plan.batch.global_size}\n"
            "hint: give it more data, or a smaller train.micro_batch_size or train.grad_accum"
        )
    return data


def open_source(
    job: Job, plan: Plan, data: Dataset, rank: int, start_position: int
) -> MicrobatchSource:
    """Return this rank's microbatches, by number from `start_position` on."""
    batch, seed = plan.batch, job.config.train.seed
    own = StepSlice(batch.micro, batch.grad_accum, batch.dp, plan.dp_rank(rank), start_position)
    return MicrobatchSource(data, Order(len(data), seed), own, job.workload, plan.units_per_sample)


def build_feed(
    job: Job, plan: Plan, source: MicrobatchSource, first_step: int, device: torch.device
) -> Feed:
    """Start the loader processes; they load what the steps from `first_step` on take."""
    settings, on_gpu = job.config.data, device.type == "cuda"
    loader = LoaderPlan(
        plan.loader_workers.value, settings.prefetch, settings.timeout_s, pin_memory=on_gpu
    )
    num_steps = max(0, plan.steps - first_step + 1)
    return Feed(Microbatches(source, num_steps * plan.batch.grad_accum, loader), plan, device)
