"""From positions to microbatches on the device, prefetched by loader processes.

A loader's state is one number, the next microbatch: to resume is to start counting there.
"""

import ctypes
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import Dataset as TorchDataset

from paceline.data.cursor import Indices, Order, StepSlice
from paceline.errors import DataError
from paceline.workloads.base import Dataset, Workload

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BLOCK = 128  # microbatches whose sample ids are computed together: the hash costs more than the sum


class Microbatch(NamedTuple):
    """One forward pass's worth of samples; `units` is what the workload counts in them."""

    batch: Any
    sample_ids: Indices
    units: int


@dataclass(frozen=True)
class LoaderPlan:
    num_workers: int
    prefetch: int
    timeout_s: float
    pin_memory: bool


class MicrobatchSource(TorchDataset[Microbatch]):
    """Microbatch n of this rank, for any n, built from the samples its positions name."""

    def __init__(
        self,
        data: Dataset,
        order: Order,
        step_slice: StepSlice,
        workload: Workload,
        units_per_sample: int | None,
    ) -> None:
        self.data, self.order, self.step_slice = data, order, step_slice
        self.workload, self.units_per_sample = workload, units_per_sample
        self._block, self._block_ids = -1, np.empty((0, 0), dtype=np.int64)

    def __getitem__(self, index: int) -> Microbatch:
        sample_ids = self._sample_ids(index)
        batch = collate(self.data, sample_ids)
        units = (
            len(sample_ids) * self.units_per_sample
            if self.units_per_sample is not None
            else int(self.workload.units(batch))
        )
        return Microbatch(batch, sample_ids, units)

    def _sample_ids(self, index: int) -> Indices:
        block, row = divmod(index, BLOCK)
        if block != self._block:
            first = block * BLOCK
            positions = [self.step_slice.positions(n) for n in range(first, first + BLOCK)]
            self._block, self._block_ids = block, self.order.at(np.stack(positions))
        ids: Indices = self._block_ids[row]
        return ids


def collate(data: Dataset, sample_ids: Indices) -> Any:
    """The data set's own `batch`, or its samples stacked by torch's default rules."""
    whole = getattr(data, "batch", None)
    try:
        if whole is not None:
            return whole(sample_ids)
        return default_collate([_sample(data, index) for index in sample_ids.tolist()])
    except DataError:
        raise
    except Exception as error:
        raise _data_error(f"samples {sample_ids.tolist()}", error) from error


def _sample(data: Dataset, index: int) -> Any:
    try:
        return data[index]
    except Exception as error:
        raise _data_error(f"sample {index}", error) from error


def _data_error(what: str, error: Exception) -> DataError:
    return DataError(f"the data set failed on {what}: {type(error).__name__}: {error}")


def iter_microbatches(
    source: MicrobatchSource, indices: range, plan: LoaderPlan
) -> Generator[Microbatch]:
    """Microbatches in order; loader processes keep `prefetch` of them ready each."""
    if plan.num_workers == 0:
        yield from map(source.__getitem__, indices)
        return
    loader = DataLoader(
        source,
        batch_size=None,  # an item is a whole microbatch already
        sampler=indices,
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch,
        timeout=plan.timeout_s,
        pin_memory=plan.pin_memory,
        persistent_workers=True,
        # A rank is a child of a fork server and would start its loaders from another one: slow,
        # and unable to pickle what a user's own file defines.
        multiprocessing_context="fork",
        worker_init_fn=_quiet_worker,
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader" not in str(error):
            raise
        raise DataError(f"a loader process failed: {error}") from error


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors of a nested batch on `device`, without waiting for the copy."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """`change` every tensor of a nested batch of dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        changed = [map_tensors(change, value) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    return batch


def eval_ids(num_samples: int, micro: int, dp: int, dp_rank: int) -> list[Indices]:
    """Validation samples of one rank, each sample once over all ranks.

    Every rank gets the same number of batches, so that collectives inside a forward pass match;
    a rank that has run out gets an empty one.
    """
    num_batches = -(-num_samples // (micro * dp))
    firsts = [(n * dp + dp_rank) * micro for n in range(num_batches)]
    return [np.arange(first, min(first + micro, num_samples), dtype=np.int64) for first in firsts]


def _quiet_worker(_: int) -> None:
    """Ctrl-C and TERM go to the whole group; the rank decides when its loaders end, not they.
    And they end with it, even one that hangs in a user's code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
