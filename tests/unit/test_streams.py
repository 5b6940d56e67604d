"""Streams: an order that follows from seed, shards and readers alone, resumed where it stopped."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.cursor import StepSlice
from paceline.data.loader import LoaderPlan, Microbatch, Microbatches, Rules
from paceline.data.stream_shards import find_shards, is_stream
from paceline.data.streams import Place, StreamPlan, StreamSource
from paceline.errors import DataError, LoaderError

MICRO, STEPS, READERS = 3, 20, 4


class Sharded:
    """Shard k has 5 + k samples, which say where they are from."""

    def __init__(self, count: int = 6) -> None:
        self.shards = [f"part-{k}" for k in range(count)]

    def open(self, shard: str) -> Iterator[int]:
        number = int(shard.removeprefix("part-"))
        yield from (100 * number + n for n in range(5 + number))


class Numbers:
    """Counts what it has given, and continues there."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size, self.given, self.skipped = first, size, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.given < self.size:
            self.given += 1
            yield self.first + self.given - 1

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Stateful(Sharded):
    def open(self, shard: str) -> Any:
        number = int(shard.removeprefix("part-"))
        return Numbers(100 * number, 5 + number)


class Plain(IterableDataset[int]):
    """Would share itself out by loader processes, as the docs of torch advise."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, 40, 1 if info is None else 10)


def of_datasets(buffer: int = 0) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(60))}).to_iterable_dataset(num_shards=6)
    data = data.shuffle(seed=1, buffer_size=buffer) if buffer else data
    return data.map(lambda row: {"x": row["x"]})


KINDS = {
    "shards": Sharded,
    "stateful": Stateful,
    "plain": Plain,
    "plain, stateful": lambda: Numbers(0, 40),
    "datasets": of_datasets,
    "datasets, shuffled": lambda: of_datasets(8),
    "few shards": lambda: Sharded(2),
}


class Units:
    def units(self, batch: Any) -> int:
        return len(batch)


def keep(samples: list[Any]) -> list[Any]:
    return [sample["x"] if isinstance(sample, dict) else sample for sample in samples]


class How(NamedTuple):
    """How it is read, and from where on."""

    workers: int = 0
    places: tuple[Place, ...] = (Place(),) * READERS
    first: int = 0
    timeout_s: float = 30
    buffer: int = 0
    repeats: bool = True


PLAIN = How()


def start(data: Any, dp: int = 1, rank: int = 0, how: How = PLAIN) -> Microbatches:
    plan = StreamPlan(find_shards(data), READERS, 5, how.buffer, how.repeats)
    own = StepSlice(MICRO, 4 // dp, dp, rank, how.first * 4 * MICRO)
    source = StreamSource(data, plan, own, Rules(Units(), 1, keep), how.places)
    loader = LoaderPlan(how.workers, 2, how.timeout_s, pin_memory=False)
    return Microbatches(source, STEPS * 4 // dp, loader)


def take(microbatches: Microbatches, count: int) -> list[Microbatch]:
    found = [next(microbatches) for _ in range(count)]
    microbatches.close()
    return found


def read(data: Any, dp: int = 1, steps: int = STEPS, how: How = PLAIN) -> list[list[int]]:
    """Each microbatch of the run, by its number over all ranks."""
    by_rank = [take(start(data, dp, rank, how), steps * 4 // dp) for rank in range(dp)]
    return [item.batch for row in zip(*by_rank, strict=True) for item in row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [0, 7])
def test_the_order_is_that_of_the_readers_whoever_reads(kind: str, buffer: int) -> None:
    make, how = KINDS[kind], How(buffer=buffer)
    whole = read(make(), how=how)
    assert len(whole) == STEPS * 4 and all(len(batch) == MICRO for batch in whole)
    assert read(make(), 2, how=how) == read(make(), 4, how=how) == whole
    assert read(make(), 1, 5, how._replace(workers=2)) == whole[:20], "loader processes"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [0, 7])
def test_a_run_goes_on_where_it_stopped_on_other_ranks(kind: str, buffer: int) -> None:
    make, stop, how = KINDS[kind], 9, How(buffer=buffer)
    whole = read(make(), how=how)
    places = [Place()] * READERS
    for rank in range(2):
        for item in take(start(make(), 2, rank, how), 2 * stop):
            places[item.reader] = item.place
    has_state = any(place.state is not None for place in places)
    assert has_state == (kind in ("stateful", "plain, stateful", "datasets"))
    rest = read(make(), 4, STEPS - stop, how._replace(places=tuple(places), first=stop))
    assert rest == whole[4 * stop :]


@pytest.mark.parametrize("kind", KINDS)
def test_without_repeating_each_sample_comes_once_and_a_reader_ends(kind: str) -> None:
    how = How(repeats=False)
    found = take(start(KINDS[kind](), how=how), STEPS * 4)
    seen = [n for item in found for n in item.batch or ()]
    assert len(seen) == len(set(seen)) > 0
    ended = [item for item in found if item.batch is None]
    assert all(len(item.sample_ids) == (0 if item.batch is None else MICRO) for item in found)
    assert {item.reader for item in ended} == set(range(READERS))
    left = tuple(next(i.place for i in ended if i.reader == n) for n in range(READERS))
    again = take(start(KINDS[kind](), how=how._replace(places=left)), 4)
    assert [item.batch for item in again] == [None] * 4, "an end stays one"


class Hanging(Sharded):
    """Reads slowly, and not at all beyond the fourth sample of a shard."""

    def open(self, shard: str) -> Iterator[int]:
        for sample in super().open(shard):
            time.sleep(60 if sample % 100 == 4 else 0.1)
            yield sample


@pytest.mark.parametrize("workers", [0, 1])
def test_the_shard_that_hangs_is_named(workers: int) -> None:
    """The limit is for each read: three of 0.1 s are within a limit of 0.25 s."""
    microbatches = start(Hanging(), how=How(workers, timeout_s=0.25))
    plan = microbatches.source.plan  # type: ignore[attr-defined]
    shard = plan.shards.names[plan.shards_of(0, 0)[0]]
    says = rf"{shard} \(reader 0 of 4\).*gave nothing for 0.25 s|0.25 s over {shard} \(reader 0"
    with pytest.raises(LoaderError, match=says):
        take(microbatches, 5)
    for worker in microbatches._workers:
        worker.kill()  # torch would wait for it
    microbatches.close()


class Broken(Sharded):
    def open(self, shard: str) -> Iterator[int]:
        if shard == "part-4":
            raise OSError("no such bucket")
        for sample in super().open(shard):
            if sample == 203:
                raise ValueError("not a number")
            yield sample


def test_what_fails_is_named_by_its_shard_and_sample() -> None:
    with pytest.raises(
        DataError, match=r"part-4 failed at sample 0: OSError|part-2 failed at samp"
    ):
        read(Broken())
    with pytest.raises(DataError, match=r"reader \d of 4 found no sample in part-"):
        empty = Sharded()
        empty.open = lambda shard: iter(())  # type: ignore[method-assign]
        read(empty)

    def choosy(samples: list[int]) -> list[int]:
        assert 304 not in samples
        return samples

    source = start(Sharded()).source
    source.rule = choosy  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"choosy failed on sample 4 of part-3: AssertionError"):
        for n in range(STEPS * 4):
            source[n]


def test_a_shard_that_has_become_shorter_is_noticed() -> None:
    says = r"part-\d ends after \d+ samples, and the checkpoint was made after 50"
    with pytest.raises(DataError, match=says):
        read(Sharded(), how=How(places=(Place(0, 0, 50),) * READERS))


class Odd(Stateful):
    def open(self, shard: str) -> Any:
        opened = super().open(shard)
        opened.state_dict = lambda: {"at": torch.ones(1)}
        return opened


def test_a_state_that_json_does_not_keep_is_refused() -> None:
    with pytest.raises(DataError, match=r"Numbers.state_dict\(\) does not survive JSON"):
        read(Odd())


def test_what_is_a_stream() -> None:
    assert all(is_stream(kind()) for kind in KINDS.values())
    assert not is_stream([1, 2, 3]) and not is_stream(torch.utils.data.TensorDataset(torch.ones(3)))
    datasets = pytest.importorskip("datasets")
    assert not is_stream(datasets.Dataset.from_dict({"x": [1]}))


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"a generator, which can be read only once\nhint: .*shards"
    ):
        find_shards(n for n in range(3))
