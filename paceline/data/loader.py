"""From positions to microbatches on the device, prefetched by loader processes.

A loader's state is one number, the next microbatch: to resume is to start counting there.
"""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from paceline.data.base import CountsUnits, Dataset
from paceline.data.cursor import Indices, Order, StepSlice
from paceline.data.positions import at_positions
from paceline.data.rng import seed_rng
from paceline.errors import DataError, LoaderError
from paceline.machine.process import die_with_parent

MAX_NAMED = 8
KILLED = "the kernel kills loaders when memory runs out: fewer data.num_workers, less prefetch"
BLOCK = 128  # microbatches whose sample ids are computed together: the hash costs more than the sum


class Microbatch(NamedTuple):
    """One forward pass's worth of samples; `units` is what the workload counts in them."""

    batch: Any
    sample_ids: Indices
    units: int


@dataclass(frozen=True)
class LoaderPlan:
    """How many loader processes there are, and how far each loads ahead."""

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
        workload: CountsUnits,
        units_per_sample: int | None,
    ) -> None:
        self.data, self.order, self.step_slice = data, order, step_slice
        self.workload, self.units_per_sample = workload, units_per_sample
        self._block, self._block_ids = -1, np.empty((0, 0), dtype=np.int64)

    def __getitem__(self, index: int) -> Microbatch:
        sample_ids, place = self.sample_ids(index), int(self.step_slice.positions(index)[0])
        if get_worker_info() is not None:
            # By its place alone: what a data set draws does not depend on which loader it is in,
            # nor on when the run was stopped and resumed. Without loaders it draws from the rank's
            # own generators, which checkpoints keep.
            seed_rng(self.order.seed, place)
        batch = collate(at_positions(self.data, sample_ids, place), sample_ids)
        units = (
            len(sample_ids) * self.units_per_sample
            if self.units_per_sample is not None
            else int(self.workload.units(batch))
        )
        return Microbatch(batch, sample_ids, units)

    def sample_ids(self, index: int) -> Indices:
        block, row = divmod(index, BLOCK)
        if block != self._block:
            first = block * BLOCK
            positions = [self.step_slice.positions(n) for n in range(first, first + BLOCK)]
            self._block, self._block_ids = block, self.order.at(np.stack(positions))
        ids: Indices = self._block_ids[row]
        return ids


def collate(data: Dataset, sample_ids: Indices) -> Any:
    """Build a batch: by the data set's own `batch`, or by torch's default rules for stacking."""
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
    except DataError:
        raise
    except Exception as error:
        raise _data_error(f"sample {index}", error) from error


def _data_error(what: str, error: Exception) -> DataError:
    hint = ""
    if "stack expects each tensor to be equal size" in str(error):
        hint = (
            "\nhint: samples of different shapes need a rule: give the data set a method"
            " batch(self, indices), which pads them and returns a whole batch"
        )
    return DataError(f"the data set failed on {what}: {type(error).__name__}: {error}{hint}")


class Microbatches:
    """`total` microbatches in order; loader processes keep `prefetch` of them ready each."""

    def __init__(self, source: MicrobatchSource, total: int, plan: LoaderPlan) -> None:
        self.source, self.plan = source, plan
        self._next = 0  # the microbatch that is owed
        self._workers: list[Any] = []
        self._items: Iterator[Microbatch] = map(source.__getitem__, range(total))
        if plan.num_workers:
            self._items = _started(_loader(source, total, plan))
            self._workers = list(getattr(self._items, "_workers", []))
            # torch hears of deaths from now on; of one before, only when a batch is overdue.
            if not all(worker.is_alive() for worker in self._workers):
                raise self.fault(RuntimeError("DataLoader worker died at its start"))

    def __next__(self) -> Microbatch:
        try:
            item = next(self._items)
        except RuntimeError as error:
            raise self.fault(error) from error
        except DataError as error:
            raise _in_own_words(error) from error
        self._next += 1
        return item

    def fault(self, error: RuntimeError) -> Exception:
        """Say in our words how a loader died or fell silent, with the samples it owes; return any
        other error as it is. It may surface anywhere: torch raises it in a handler of SIGCHLD."""
        if "DataLoader" not in str(error) or not self._workers:
            return error
        dead = [w for w in self._workers if not w.is_alive()]
        number = self._workers.index(dead[0]) if dead else self._next % len(self._workers)
        worker = self._workers[number]
        owed = next(n for n in count(self._next) if n % len(self._workers) == number)
        ids = self.source.sample_ids(owed).tolist()
        shown = ", ".join(map(str, ids[:MAX_NAMED])) + (", ..." if len(ids) > MAX_NAMED else "")
        what = (
            f"died ({_exit_reason(worker.exitcode)})"
            if dead
            else f"gave nothing for {self.plan.timeout_s:g} s"
        )
        hint = KILLED if dead else "look at these samples; data.timeout_s sets the limit"
        return LoaderError(
            f"loader process {number} of {len(self._workers)} (process {worker.pid}) {what} over"
            f" samples {shown} (indices {min(ids)} to {max(ids)})\nhint: {hint}"
        )

    def close(self) -> None:
        """End the loader's processes now: left to the interpreter's exit, they would hang it."""
        shut_down = getattr(self._items, "_shutdown_workers", None)
        self._items = iter(())
        if shut_down is not None:
            shut_down()


def _in_own_words(error: DataError) -> DataError:
    """Return what was said in a loader process, without the traceback that torch puts around it."""
    name = f"{type(error).__module__}.{type(error).__name__}: "
    said = str(error).rpartition(name)[2].strip()
    return type(error)(said)


def _started(loader: DataLoader[Microbatch]) -> Iterator[Microbatch]:
    try:
        return iter(loader)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        # torch heard of it while it started others: nobody knows yet which samples it owes.
        raise LoaderError(f"a loader process died at its start: {error}\nhint: {KILLED}") from error


def _exit_reason(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _loader(source: MicrobatchSource, total: int, plan: LoaderPlan) -> DataLoader[Microbatch]:
    return DataLoader(
        source,
        batch_size=None,  # an item is a whole microbatch already
        sampler=range(total),
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch,
        timeout=plan.timeout_s,
        pin_memory=plan.pin_memory,
        # A rank is a child of a fork server and would start its loaders from another one: slow,
        # and unable to pickle what a user's own file defines.
        multiprocessing_context="fork",
        worker_init_fn=_quiet_worker,
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a nested batch to `device`, without waiting for the copy."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `change` to every tensor of a nested batch of dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        changed = [map_tensors(change, value) for value in batch]
        return type(batch)(*changed) if hasattr(batch, "_fields") else type(batch)(changed)
    return batch


def eval_ids(num_samples: int, micro: int, dp: int, dp_rank: int) -> list[Indices]:
    """Return the validation samples of one rank, in batches; over all ranks each sample comes once.

    Every rank gets the same number of batches, so that collectives inside a forward pass match; a
    rank that has run out gets an empty one.
    """
    num_batches = -(-num_samples // (micro * dp))
    firsts = [(n * dp + dp_rank) * micro for n in range(num_batches)]
    return [np.arange(first, min(first + micro, num_samples), dtype=np.int64) for first in firsts]


def _quiet_worker(_: int) -> None:
    """Ignore signals, which may go to the whole group: the rank decides when its loaders end. They
    end with it, even one that hangs in a user's code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
