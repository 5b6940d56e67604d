"""Streams: samples that come one after another, read from shards.

    shards, in another order each epoch, are dealt out to R readers      (data.stream_readers)
    microbatch number b of the run, over all ranks, is the next of reader b mod R
    the ranks share the readers, and a rank's loader processes share those of the rank

So which samples a microbatch holds is a function of the seed, the shards and R alone: not of ranks
nor of loader processes, as long as the ranks divide R. Where a reader stands goes with each of its
microbatches, and into checkpoints.
"""

import json
import mmap
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from paceline.data.collate import join, rule_of
from paceline.data.cursor import Order, StepSlice
from paceline.data.loader import TIMED_OUT, Microbatch, Rules
from paceline.data.rng import seed_rng
from paceline.data.stream_shards import Shards
from paceline.errors import DataError

Sample = tuple[Any, str]  # and its name
Marks = NDArray[np.int64]  # of a reader: the shard that it reads, and how many reads it has begun
END = object()


class Place(NamedTuple):
    """Where a reader stands: before sample `taken` of the `part`-th shard of its own `epoch`.
    `state` is the source's own, if it has one; `used` counts the samples used from a block that was
    read ahead and begins there."""

    epoch: int = 0
    part: int = 0
    taken: int = 0
    used: int = 0
    state: Any = None


@dataclass(frozen=True)
class StreamPlan:
    """How a stream is read, whoever reads it."""

    shards: Shards
    num_readers: int
    seed: int
    buffer: int = 0
    repeats: bool = True

    @property
    def by_sample(self) -> bool:
        """True if there are fewer shards than readers: all readers then read all shards, and each
        takes its share of the samples."""
        return len(self.shards.names) < self.num_readers

    def shards_of(self, reader: int, epoch: int) -> list[int]:
        """Return the shards that a reader goes through in its epoch, in order."""
        size = len(self.shards.names)
        order = Order(size, self.seed).at(epoch * size + np.arange(size))
        own = order if self.by_sample else order[reader :: self.num_readers]
        return [int(shard) for shard in own]


class Reader:
    """One part of a stream, from a place on: endless, or until its end where it does not repeat."""

    def __init__(self, plan: StreamPlan, number: int, place: Place, marks: Marks) -> None:
        self.plan, self.number, self.marks = plan, number, marks
        self._place = place._replace(used=0)  # before what is read next
        self._opened: Any = None
        self._samples = self._read()
        # Read ahead, the next one last. A block begins when the one before is used up, so where it
        # began and a count are all of its state.
        self._block: list[Sample] = []
        self._began, self._used = self._place, 0
        self._is_plain = False  # its state was seen to be
        if place.used:
            self._fill()
            del self._block[-place.used :]
            self._used = place.used

    def take(self, size: int) -> list[Sample] | None:
        """Return the next samples; None if there are not that many left."""
        taken: list[Sample] = []
        while len(taken) < size:
            if not self._block:
                self._fill()
            if not self._block:
                return None
            taken.append(self._block.pop())
            self._used += 1
        return taken

    def tell(self) -> Place:
        """Return its place: all that another reader needs to continue."""
        return self._began._replace(used=self._used) if self._block else self._now()

    def _fill(self) -> None:
        size = self.plan.buffer
        if size > 1:
            self._began = self._now()
        self._used, self._block = 0, list(islice(self._samples, max(1, size)))
        if size > 1:
            place = [self.plan.seed, self.number, *self._began[:3]]
            np.random.default_rng(place).shuffle(self._block)

    def _now(self) -> Place:
        tell = getattr(self._opened, "state_dict", None)
        if tell is None:
            return self._place
        state = tell()
        if not self._is_plain:
            _require_plain(state, self._opened)
            self._is_plain = True
        return self._place._replace(state=state)

    def _read(self) -> Iterator[Sample]:
        """Yield samples, epoch after epoch."""
        while True:
            shards, is_whole = self._shards(), self._place[1:3] == (0, 0)
            is_empty = is_whole
            while self._place.part < len(shards):
                for sample in self._read_shard(shards[self._place.part]):
                    is_empty = False
                    yield sample
                self._opened = None
                self._place = Place(self._place.epoch, self._place.part + 1)
            if is_empty:
                names = [self.plan.shards.names[shard] for shard in shards[:8]]
                raise DataError(
                    f"reader {self.number} of {self.plan.num_readers} found no sample in"
                    f" {', '.join(names)}\nhint: is the split empty? set data.stream_readers to"
                    " fewer where there are not enough samples for all"
                )
            if not self.plan.repeats:
                return
            self._place = Place(self._place.epoch + 1)

    def _shards(self) -> list[int]:
        return self.plan.shards_of(self.number, self._place.epoch)

    def _read_shard(self, shard: int) -> Iterator[Sample]:
        """Yield what is left of a shard; errors name it."""
        epoch, part, taken, _, state = self._place
        name, position = self.plan.shards.names[shard], taken
        self.marks[0] = shard
        try:
            self.marks[1] += 1
            self._opened = self.plan.shards.open(shard, epoch)
            if state is not None:
                self._opened.load_state_dict(state)
            samples = iter(self._opened)
            position = taken if state is not None else 0
            while position < taken:
                self.marks[1] += 1
                next(samples)
                position += 1
            for position in count(taken):
                self.marks[1] += 1
                sample = next(samples, END)
                if sample is END:
                    return
                self._place = Place(epoch, part, position + 1)
                turn = (position + part) % self.plan.num_readers
                if not self.plan.by_sample or turn == self.number:
                    yield sample, f"sample {position} of {name}"
        except DataError:
            raise
        except StopIteration:
            raise DataError(
                f"{name} ends after {position} samples, and the checkpoint was made after {taken}\n"
                "hint: bring the data back as it was"
            ) from None
        except Exception as error:
            raise DataError(
                f"{name} failed at sample {position}: {type(error).__name__}: {error}"
            ) from error


def _require_plain(state: Any, owner: Any) -> None:
    """Refuse a state that a checkpoint, which is JSON, would not give back."""
    try:
        is_plain = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        is_plain = False
    if not is_plain:
        raise DataError(
            f"{type(owner).__name__}.state_dict() does not survive JSON: {str(state)[:200]}\n"
            "hint: return dicts with text as keys, lists, numbers and text"
        )


class StreamSource(TorchDataset[Microbatch]):
    """The microbatches of one rank, one after the other. A loader process is asked for every W-th
    of them, and so has some of the rank's readers to itself."""

    def __init__(
        self,
        data: Any,
        plan: StreamPlan,
        step_slice: StepSlice,
        rules: Rules,
        places: Sequence[Place],
    ) -> None:
        self.plan, self.slice, self.rules, self.places = plan, step_slice, rules, places
        self.rule = rules.collate or rule_of(data)
        self.first = step_slice.start // step_slice.micro
        self._readers: dict[int, Reader] = {}
        # Shared with loader processes, so that this one can say what they read.
        size = plan.num_readers
        self.marks: Marks = np.frombuffer(mmap.mmap(-1, 16 * size), np.int64).reshape(size, 2)
        self._in_worker = False

    def number(self, index: int) -> int:
        """Return the number of this rank's n-th microbatch among those of all ranks."""
        return self.first + index * self.slice.dp + self.slice.dp_rank

    def __getitem__(self, index: int) -> Microbatch:
        number, micro = self.number(index), self.slice.micro
        self._hide_worker()
        if self._in_worker:  # by its place alone, as for samples by index
            seed_rng(self.plan.seed, number * micro)
        which = number % self.plan.num_readers
        if which not in self._readers:
            own = self.marks[which]
            self._readers[which] = Reader(self.plan, which, self.places[which], own)
        reader, begun = self._readers[which], time.perf_counter()
        taken = reader.take(micro)
        read = time.perf_counter()
        ids = np.arange(number * micro, (number + 1) * micro, dtype=np.int64)
        if taken is None:
            return Microbatch(None, ids[:0], 0, None, which, reader.tell())
        batch = join([sample for sample, _ in taken], self.rule, lambda n: taken[n][1])
        joined_s = time.perf_counter() - read
        units, names = self.rules.units(batch, micro), tuple(name for _, name in taken)
        where = (which, reader.tell(), names)
        return Microbatch(batch, ids, units, None, *where, read - begun, joined_s)

    def _hide_worker(self) -> None:
        """Keep data sets from sharing samples out among loader processes themselves: readers do."""
        if get_worker_info() is not None:
            self._in_worker, torch_worker._worker_info = True, None

    def items(self, total: int, timeout_s: float) -> Iterator[Microbatch]:
        """Yield them, read in a thread: one that hangs is left behind."""
        wanted: queue.Queue[int] = queue.Queue()
        found: queue.Queue[Microbatch | BaseException] = queue.Queue()

        def read() -> None:
            while (index := wanted.get()) >= 0:
                try:
                    found.put(self[index])
                except BaseException as error:
                    found.put(error)

        threading.Thread(target=read, name="stream", daemon=True).start()
        return _Asked(wanted, found, total, timeout_s)

    def samples_in_step(self, step: int) -> int:
        return self.slice.global_size

    def owed(self, index: int) -> str:
        which = self.number(index) % self.plan.num_readers
        shard = int(self.marks[which, 0])
        return f"{self.plan.shards.names[shard]} (reader {which} of {self.plan.num_readers})"

    def progress(self, index: int) -> int:
        return int(self.marks[self.number(index) % self.plan.num_readers, 1])


class _Asked:
    """Asks a thread for one microbatch after the other. After a time-out it still waits for the
    same one."""

    def __init__(
        self,
        wanted: "queue.Queue[int]",
        found: "queue.Queue[Microbatch | BaseException]",
        total: int,
        timeout_s: float,
    ) -> None:
        self.wanted, self.found, self.timeout_s = wanted, found, timeout_s
        self._left, self._is_asked = iter(range(total)), False

    def __iter__(self) -> "_Asked":
        return self

    def __next__(self) -> Microbatch:
        if not self._is_asked:
            self.wanted.put(next(self._left))
            self._is_asked = True
        try:
            item = self.found.get(timeout=self.timeout_s)
        except queue.Empty:
            raise RuntimeError(f"{TIMED_OUT} after {self.timeout_s} seconds") from None
        self._is_asked = False
        if isinstance(item, BaseException):
            raise item
        return item

    def _shutdown_workers(self) -> None:
        self.wanted.put(-1)
