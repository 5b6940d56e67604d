"""From positions to microbatches on the device, prefetched by loader processes.

A loader's state is one number, the next microbatch: a resumed run starts counting there.
"""

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.data.base import CountsUnits, Dataset
from paceline.data.buckets import length_of, padding
from paceline.data.collate import Collate, make_batch
from paceline.data.cursor import Indices, Picks
from paceline.data.rng import seed_rng
from paceline.errors import ConfigError, DataError, LoaderError
from paceline.machine.process import die_with_parent

MAX_NAMED = 8
KILLED = "the kernel kills loaders when memory runs out: fewer data.num_workers, less prefetch"
SILENT = "look at these samples; data.timeout_s sets the limit"
TIMED_OUT = "DataLoader timed out"  # as torch says it
LOOK_S = 5.0  # how often to check on a loader that is being waited for
# What reading from a process that is gone looks like: its tensors are fetched from it by a socket.
BROKEN = (ConnectionError, EOFError)


class Microbatch(NamedTuple):
    """The samples of one forward pass. `units` is the workload's count of them; `padding`, if
    lengths are known, is how much of the batch is padding and how large it then is. Of a stream:
    the `reader` it is from, that reader's `place` after it, and the samples' `names`. Reading the
    samples took `read_s`, putting them together `joined_s`."""

    batch: Any
    sample_ids: Indices
    units: float
    padding: tuple[float, float] | None = None
    reader: int = 0
    place: Any = None
    names: tuple[str, ...] = ()
    read_s: float = 0.0
    joined_s: float = 0.0


@dataclass(frozen=True)
class LoaderPlan:
    """How many loader processes there are, and how far each loads ahead."""

    num_workers: int
    prefetch: int
    timeout_s: float
    pin_memory: bool


@dataclass(frozen=True)
class Rules:
    """How the workload makes a batch of samples, and counts its units."""

    workload: CountsUnits
    units_per_sample: int | None
    collate: Collate | None = None

    def units(self, batch: Any, num_samples: int) -> float:
        if self.units_per_sample is not None:
            return num_samples * self.units_per_sample
        counted: Any = self.workload.units(batch)
        try:
            return float(counted)
        except (TypeError, ValueError) as error:
            name = type(self.workload).__name__
            raise ConfigError(
                f"{name}.units must return a number; it returned {counted!r:.40}"
            ) from error


class Source(Protocol):
    """Microbatch n of this rank, for any n or, of a stream, for one n after the other."""

    def __getitem__(self, index: int) -> Microbatch: ...

    def items(self, total: int, timeout_s: float) -> Iterator[Microbatch]:
        """Yield them in this process: of a stream, with a time limit for each read."""
        ...

    def samples_in_step(self, step: int) -> int:
        """Return the samples of all ranks in a step, counted from where this attempt begins."""
        ...

    def owed(self, index: int) -> str:
        """Say what the loader that owes this microbatch is reading."""
        ...

    def progress(self, index: int) -> int:
        """Return a number that changes while the loader that owes this microbatch reads."""
        ...


class MicrobatchSource(TorchDataset[Microbatch]):
    """Microbatch n of this rank, for any n, built from the samples that `picks` names."""

    def __init__(self, data: Dataset, picks: Picks, rules: Rules) -> None:
        self.data, self.picks, self.rules = data, picks, rules
        self.length_of = length_of(data)

    def __getitem__(self, index: int) -> Microbatch:
        sample_ids, place = self.picks.sample_ids(index), self.picks.place(index)
        if get_worker_info() is not None:
            # By its place alone: what a data set draws does not depend on which loader it is in,
            # nor on when the run was stopped and resumed. Without loaders it draws from the rank's
            # own generators, which checkpoints keep.
            seed_rng(self.picks.seed, place)
        made = make_batch(self.data, sample_ids, self.rules.collate, place)
        filled = None if self.length_of is None else padding(self.length_of(sample_ids))
        units = self.rules.units(made.batch, len(sample_ids))
        return Microbatch(
            made.batch, sample_ids, units, filled, read_s=made.read_s, joined_s=made.joined_s
        )

    def items(self, total: int, timeout_s: float) -> Iterator[Microbatch]:
        return map(self.__getitem__, range(total))

    def samples_in_step(self, step: int) -> int:
        return self.picks.samples_in_step(step)

    def owed(self, index: int) -> str:
        ids = self.picks.sample_ids(index).tolist()
        shown = ", ".join(map(str, ids[:MAX_NAMED])) + (", ..." if len(ids) > MAX_NAMED else "")
        return f"samples {shown} (indices {min(ids)} to {max(ids)})"

    def progress(self, index: int) -> int:
        return 0


class Microbatches:
    """`total` microbatches in order; each loader process keeps `prefetch` of them ready."""

    def __init__(self, source: Source, total: int, plan: LoaderPlan) -> None:
        self.source, self.total, self.plan = source, total, plan
        self._next = 0  # the microbatch that is owed
        self._workers: list[Any] = []
        self._items: Iterator[Microbatch | DataError]
        if not plan.num_workers:
            self._items = source.items(total, plan.timeout_s)
        else:
            self._items = _started(_loader(source, total, plan))
            self._workers = list(getattr(self._items, "_workers", []))
            # torch hears of deaths from now on; of one before, only when it looks.
            if not all(worker.is_alive() for worker in self._workers):
                told = self.fault(RuntimeError("DataLoader worker died at its start"))
                self.close()
                raise told

    def __next__(self) -> Microbatch:
        item, read, since = None, self.source.progress(self._next), time.monotonic()
        while item is None:
            try:
                item = next(self._items)
            except (RuntimeError, *BROKEN) as error:
                # torch has looked at its loaders, and all live: it tells a death first. By its
                # handler alone it would be lost where somebody's code swallows what it raises.
                if TIMED_OUT not in str(error):
                    raise self.fault(error) from error
                # One that is slow, but reads, is waited for: the limit is for each read.
                if (now := self.source.progress(self._next)) != read:
                    read, since = now, time.monotonic()
                elif not self._workers or time.monotonic() - since >= self.plan.timeout_s:
                    raise self.fault(error) from error
        if isinstance(item, DataError):
            raise item
        self._next += 1
        return item

    def fault(self, error: Exception) -> Exception:
        """Explain how a loader died or fell silent, with the samples it owes; return any other
        error as it is. It may surface anywhere: torch raises it in a handler of SIGCHLD."""
        is_late = TIMED_OUT in str(error)
        is_broken = isinstance(error, BROKEN) and self._has_lost_one()
        if not (is_broken or "DataLoader" in str(error)) or not (self._workers or is_late):
            return error
        silent = f"gave nothing for {self.plan.timeout_s:g} s"
        if not self._workers:
            return LoaderError(f"reading {self.source.owed(self._next)} {silent}\nhint: {SILENT}")
        dead = [w for w in self._workers if not w.is_alive()]
        number = self._workers.index(dead[0]) if dead else self._next % len(self._workers)
        worker = self._workers[number]
        owed = next(n for n in count(self._next) if n % len(self._workers) == number)
        what = f"died ({_exit_reason(worker.exitcode)})" if dead else silent
        return LoaderError(
            f"loader process {number} of {len(self._workers)} (process {worker.pid}) {what} over"
            f" {self.source.owed(owed)}\nhint: {KILLED if dead else SILENT}"
        )

    def _has_lost_one(self) -> bool:
        """Say whether a loader is gone, or is about to be: its sockets close a moment before."""
        deadline = time.monotonic() + 1
        while all(worker.is_alive() for worker in self._workers):
            if time.monotonic() > deadline or not self._workers:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """End the loader's processes now: left to the interpreter's exit, they would hang it."""
        items, self._items = self._items, iter(())
        shut_down = getattr(items, "_shutdown_workers", None)
        if shut_down is None:
            return
        if all(worker.is_alive() for worker in self._workers):
            try:
                shut_down()
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
        _abandon(items)


def _abandon(items: Any) -> None:
    """End loaders of which one died. torch would ask them to end through an event, whose lock the
    dead one may hold for ever, and would hear of the same death again meanwhile."""
    items._shutdown = True
    with suppress(ValueError):  # of one that is half built it may not know yet
        _remove_worker_pids(id(items))
    items._worker_pids_set = False
    if hasattr(items, "_pin_memory_thread"):
        items._pin_memory_thread_done_event.set()
    for worker in items._workers:
        worker.kill()
    for worker in items._workers:
        worker.join()
    for queue in items._index_queues:
        queue.cancel_join_thread()


class _Told(TorchDataset[Microbatch | DataError]):
    """Passes an error about samples on as an item: if raised, torch would wrap it in its own."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, index: int) -> Microbatch | DataError:
        try:
            return self.source[index]
        except DataError as error:
            error.add_note(traceback.format_exc())
            return error


def _started(loader: DataLoader[Microbatch | DataError]) -> Iterator[Microbatch | DataError]:
    try:
        return iter(loader)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        # torch heard of it while it started others: nobody knows yet which samples it owes.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if isinstance(half_built := frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
                _abandon(half_built)
        raise LoaderError(f"a loader process died at its start: {error}\nhint: {KILLED}") from error


def _exit_reason(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _loader(source: Source, total: int, plan: LoaderPlan) -> DataLoader[Microbatch | DataError]:
    return DataLoader(
        _Told(source),
        batch_size=None,  # an item is a whole microbatch already
        sampler=range(total),
        num_workers=plan.num_workers,
        prefetch_factor=plan.prefetch,
        timeout=min(LOOK_S, plan.timeout_s),
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


def deal_batches(batches: Sequence[Indices], dp: int, dp_rank: int) -> list[Indices]:
    """Return one rank's batches of validation samples; over all ranks each comes once.

    Every rank gets the same number of batches, so that collectives inside a forward pass match; a
    rank that has run out gets an empty one.
    """
    own = list(batches[dp_rank::dp])
    missing = -(-len(batches) // dp) - len(own)
    return own + [np.empty(0, dtype=np.int64)] * missing


def _quiet_worker(_: int) -> None:
    """Ignore signals, which may be sent to the whole group: the rank decides when its loaders end.
    They end with it, even one that hangs in a user's code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
