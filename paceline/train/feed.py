"""What one optimizer step consumes: this rank's microbatches on the device, and the loss scale."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data.buckets import BucketPicks, open_picks
from paceline.data.cursor import Indices, Picks, StepSlice
from paceline.data.loader import (
    MAX_NAMED,
    LoaderPlan,
    Microbatch,
    Microbatches,
    MicrobatchSource,
    Rules,
    Source,
    to_device,
)
from paceline.data.stream_shards import find_shards, is_stream
from paceline.data.streams import Place, StreamPlan, StreamSource
from paceline.errors import ConfigError, DataError, Outcome, PacelineError
from paceline.job import Job
from paceline.metrics import PADDING
from paceline.records import Plan, StreamPlaces
from paceline.records.files import fingerprint
from paceline.records.words import count
from paceline.strategies.clock import Clock
from paceline.train.verdict import outcome_of
from paceline.workloads.base import Split, own_collate
from paceline.workloads.returns import (
    Pair,
    data_failed,
    no_loader,
    no_training_data,
    prepare_failed,
    read_prepared,
)

NAMED_STEPS = 32  # whose samples of a stream can still be named
OF_STREAMS = ("stream_readers", "stream_buffer", "stream_repeat")


class StepBatch(NamedTuple):
    """`scale` = dp degree / units in the global step: the loss normalisation of every strategy.
    `units` are nan where nobody knows them before the step (paceline.attach).
    `num_samples` are those of all ranks; `sums` is what is known of this rank's batches beside the
    loss, by name. Its own samples took `read_s` to read and `joined_s` to put together, wherever
    that was done."""

    batches: list[Any]
    units: float | Tensor
    scale: float | Tensor
    sample_ids: list[Indices]
    num_samples: int
    sums: Mapping[str, Pair] = {}
    read_s: float = 0.0
    joined_s: float = 0.0


class Feed:
    """Turns microbatches into step batches, one after the other."""

    def __init__(
        self, microbatches: Microbatches, source: Source, plan: Plan, device: torch.device
    ) -> None:
        self.microbatches, self.plan, self.device = microbatches, plan, device
        self.source = source
        self._ahead: list[Microbatch] = []
        self._num_steps = 0  # handed out so far
        self._why_over: str | None = None
        self.places = list(source.places) if isinstance(source, StreamSource) else []
        self._names: deque[tuple[int, str]] = deque(maxlen=NAMED_STEPS * plan.batch.global_size)

    def close(self) -> None:
        self.microbatches.close()

    def fault(self, error: Exception) -> Exception:
        """Return the error, explained if it is about a loader process."""
        return self.microbatches.fault(error)

    def peek(self) -> Microbatch:
        """Return the next microbatch, which `next` will return as well."""
        self._load(1)
        return self._ahead[0]

    def next(self, clock: Clock) -> StepBatch:
        self._load(self.plan.batch.grad_accum)
        loaded, self._ahead, self._why_over = self._ahead, [], None
        num_samples = self.source.samples_in_step(self._num_steps)
        self._num_steps += 1
        for item in loaded if self.places else ():
            self.places[item.reader] = item.place
            self._names.extend(zip(item.sample_ids.tolist(), item.names, strict=True))
        units = self._units_in_step(loaded, num_samples, clock)
        batches = [item.batch for item in loaded]
        if self.device.type != "cpu":
            batches = [to_device(batch, self.device) for batch in batches]
        return StepBatch(
            batches,
            units,
            self.plan.batch.dp / units,
            [item.sample_ids for item in loaded],
            num_samples,
            _padding_of(loaded),
            sum(item.read_s for item in loaded),
            sum(item.joined_s for item in loaded),
        )

    def gather_places(self) -> StreamPlaces | None:
        """Return the positions of the readers of all ranks after the last step; None if the data is
        not a stream. A collective, for a stream."""
        if not isinstance(self.source, StreamSource):
            return None
        dp, rank = self.plan.batch.dp, self.plan.dp_rank(dist.get_rank())
        own = {which: tuple(place) for which, place in enumerate(self.places) if which % dp == rank}
        heard: list[Any] = [own] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(heard, own)
        all_places = {which: place for part in heard for which, place in part.items()}
        return StreamPlaces(places=[all_places[which] for which in sorted(all_places)])

    def notes(self, bad: Sequence[int] = ()) -> list[str]:
        """Return notes about a stream: how it was read, how it resumes, and which samples were
        `bad`."""
        if not isinstance(self.source, StreamSource):
            return []
        how = StreamPlaces(places=[tuple(place) for place in self.places]).how
        read = self.source.plan
        shards = count(len(read.shards.names), "shard")
        by = "by samples" if read.by_sample and read.num_readers > 1 else "by shards"
        readers = count(read.num_readers, "reader")
        told = [f"the data is a stream: {shards}, shared {by} among {readers}; it resumes {how}"]
        if bad:
            named = zip(bad[:MAX_NAMED], self.name(bad[:MAX_NAMED]), strict=True)
            told.append("bad samples: " + ", ".join(f"{index} is {name}" for index, name in named))
        return told

    def name(self, sample_ids: Iterable[int]) -> list[str]:
        """Return names for these samples: the index, the data set's own name, or the shard of a
        stream. If lengths are known, the longest come first."""
        ids, known = np.fromiter(sample_ids, np.int64), dict(self._names)
        tell, data = getattr(self.source, "length_of", None), getattr(self.source, "data", None)
        if tell is not None:
            ids = ids[np.argsort(-tell(ids), kind="stable")]
        own = getattr(data, "name", None)
        names = {int(i): f"sample {i}, {own(int(i))}" for i in ids} if callable(own) else {}
        return [known.get(index) or names.get(index, f"sample {index}") for index in ids.tolist()]

    def why_over(self, clock: Clock) -> str:
        """Say why there is no further step: a stream that does not repeat has ended on some rank.
        Empty if there is one. A collective, for a stream that can end."""
        if not isinstance(self.source, StreamSource) or self.source.plan.repeats:
            return ""
        if self._num_steps == self.microbatches.total // self.plan.batch.grad_accum:
            return ""  # nobody asks for another
        if self._why_over is None:
            self._why_over = self._ask_all(self.source, clock)
        return self._why_over

    def _ask_all(self, source: StreamSource, clock: Clock) -> str:
        self._load(self.plan.batch.grad_accum)
        ended = [item.reader for item in self._ahead if not len(item.sample_ids)]
        own = torch.tensor(min(ended, default=source.plan.num_readers), device=self.device)
        with clock.blocked():
            dist.all_reduce(own, dist.ReduceOp.MIN)
            first = int(own)
        if first == source.plan.num_readers:
            return ""
        why = (
            f"the stream has ended: reader {first} of {source.plan.num_readers} has no more"
            " samples for a whole microbatch (data.stream_repeat=false)"
        )
        if source.first == self._num_steps == 0:
            raise DataError(f"{why}, before step 1\nhint: more data, or fewer data.stream_readers")
        return why

    def _load(self, wanted: int) -> None:
        """Load microbatches until `wanted` are ahead."""
        while len(self._ahead) < wanted:
            self._ahead.append(next(self.microbatches))

    def _units_in_step(
        self, loaded: list[Microbatch], num_samples: int, clock: Clock
    ) -> float | Tensor:
        """Return the units over all ranks; a collective only where samples differ in size."""
        if self.plan.units_per_sample is not None:
            return num_samples * self.plan.units_per_sample
        local = float(sum(item.units for item in loaded))
        on_gpu = self.device.type == "cuda"
        units = torch.tensor(local, dtype=torch.float64, pin_memory=on_gpu)
        units = units.to(self.device, non_blocking=True)
        # Over every rank: a rank that is not its group's first in the dp axis adds its copies too,
        # so divide them out again.
        with clock.blocked():
            dist.all_reduce(units)
        return units * self.plan.batch.dp / self.plan.world_size


def _padding_of(loaded: list[Microbatch]) -> Mapping[str, Pair]:
    if loaded[0].padding is None:
        return {}
    known = [item.padding for item in loaded if item.padding is not None]
    return {PADDING: (sum(filled for filled, _ in known), sum(whole for _, whole in known))}


@dataclass(frozen=True)
class TrainData:
    """The training data: by index, with the order in which it is taken, or a stream."""

    data: Any
    picks: Picks | None  # None: a stream

    @property
    def num_samples(self) -> int:
        return len(self.data) if self.picks is not None else 0

    @property
    def epoch_size(self) -> int:
        """Positions in an epoch; 0 where nobody knows."""
        return self.picks.epoch_size if self.picks is not None else 0

    @property
    def fingerprint(self) -> str:
        """The data's own; of a stream without one, that of its shards' names."""
        own = getattr(self.data, "fingerprint", None)
        if own is None and self.picks is None and hasattr(self.data, "shards"):
            own = f"shards-{fingerprint(*map(str, self.data.shards))}"
        own = "n/a" if own is None else str(own)
        return f"{own}, {self.picks.fingerprint}" if isinstance(self.picks, BucketPicks) else own


def build_split(job: Job, split: Split) -> Any:
    """Return what the job's `build_data` returns. An exception in it is a fault of the data, unless
    it shows that memory, a disk or another rank is to blame."""
    try:
        data = job.workload.build_data(job.config, split)
    except Exception as error:
        if isinstance(error, PacelineError) or outcome_of(error) is not Outcome.CRASHED:
            raise
        raise data_failed(job.workload, split, error) from error
    if isinstance(data, DataLoader):
        raise no_loader(job.workload, split)
    return data


def prepare_data(job: Job, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what the job's `prepare` has found for all ranks. It fails as `build_data` does."""
    try:
        found = job.workload.prepare(job.config, say)
    except Exception as error:
        if isinstance(error, PacelineError) or outcome_of(error) is not Outcome.CRASHED:
            raise
        raise prepare_failed(job.workload, error) from error
    return read_prepared(job.workload, found)


def open_data(job: Job, plan: Plan) -> TrainData:
    """Return the training data; refuse what cannot be read or fills no step."""
    data = build_split(job, "train")
    if data is None:
        raise no_training_data(job.workload)
    size, settings = plan.batch.global_size, job.config.data
    if is_stream(data):
        if settings.num_buckets is not None:
            raise ConfigError(
                f"data.batch_by={settings.batch_by}, data.buckets={settings.buckets}: the data is a"
                f" stream ({type(data).__name__}), whose lengths nobody knows before it is read\n"
                "hint: return samples by index: __len__ and __getitem__, with `lengths`"
            )
        return TrainData(data, None)
    if not hasattr(data, "__len__"):
        raise DataError(
            f"build_data returned a {type(data).__name__}, which has no length and is no stream\n"
            "hint: return samples by index, with __len__ and __getitem__, or what can be iterated"
        )
    picks = open_picks(job.config, plan.batch, data) if len(data) else None
    found = picks.epoch_size if picks is not None else 0
    if picks is None or found < size:
        raise DataError(
            f"the training data has {found} {plan.batch.counts}, and one step takes {size}\n"
            "hint: give it more data, or a smaller train.micro_batch_size or train.grad_accum"
        )
    return TrainData(data, picks)


def idle_stream_keys(job: Job, plan: Plan, data: TrainData) -> list[str]:
    """Return a note for each changed key that only streams read, if the data is not a stream. The
    plan cannot know that."""
    settings = job.config.data
    read_by_loaders = ("timeout_s",) if plan.loader_workers.value == 0 else ()
    keys = (*OF_STREAMS, *read_by_loaders)
    defaults = {key: type(settings).model_fields[key].default for key in keys}
    changed = [key for key, default in defaults.items() if getattr(settings, key) != default]
    if data.picks is None:
        return []
    return [f"data.{key} is set but has no effect: the data is no stream" for key in changed]


def open_source(
    job: Job,
    plan: Plan,
    data: TrainData,
    rank: int,
    start: int = 0,
    places: StreamPlaces | None = None,
) -> Source:
    """Return this rank's microbatches, by number from position `start` on; `places` are those of a
    stream that is resumed."""
    rules = Rules(job.workload, plan.units_per_sample, own_collate(job.workload))
    batch, settings = plan.batch, job.config.data
    own = StepSlice(batch.micro, batch.grad_accum, batch.dp, plan.dp_rank(rank), start)
    if data.picks is not None:
        return MicrobatchSource(data.data, data.picks.of(own), rules)
    stream = StreamPlan(
        find_shards(data.data),
        _count_readers(job, plan, places),
        job.config.train.seed,
        settings.stream_buffer,
        settings.stream_repeat,
    )
    known = places.places if places is not None else [Place()] * stream.num_readers
    return StreamSource(data.data, stream, own, rules, [Place(*place) for place in known])


def _count_readers(job: Job, plan: Plan, places: StreamPlaces | None) -> int:
    """Return how many readers share the stream: as asked, or as the checkpoint says; else one for
    each loader process of each rank."""
    asked, dp = job.config.data.stream_readers, plan.batch.dp
    number = dp * max(1, plan.loader_workers.value) if asked == "auto" else asked
    if places is not None:
        number = len(places.places)
        if asked not in ("auto", number):
            raise ConfigError(
                f"data.stream_readers={asked}, and the checkpoint was made with {number}: no sample"
                " would be where it was\nhint: leave it as it was, or start a new run"
            )
    if number % dp:
        raise ConfigError(
            f"{count(number, 'reader')} of the stream cannot be shared equally by {dp} ranks\n"
            f"hint: take a number of ranks that divides {number}; a new run may set"
            " data.stream_readers to a number that all the ranks you may have divide"
        )
    return number


def load_first(job: Job, source: Source) -> Any:
    """Return the first batch, loaded in this process: of a stream, with its time limit."""
    loader = LoaderPlan(0, 1, job.config.data.timeout_s, pin_memory=False)
    microbatches = Microbatches(source, 1, loader)
    try:
        return next(microbatches).batch
    finally:
        microbatches.close()


def build_feed(job: Job, plan: Plan, source: Source, first_step: int, device: torch.device) -> Feed:
    """Start the loader processes; they load what the steps from `first_step` on take."""
    settings, on_gpu = job.config.data, device.type == "cuda"
    workers = plan.loader_workers.value
    if isinstance(source, StreamSource):
        # Each has readers to itself, equally many: the largest number of them that divides evenly.
        own = source.plan.num_readers // plan.batch.dp
        workers = next(n for n in range(min(workers, own), -1, -1) if n == 0 or own % n == 0)
    loader = LoaderPlan(workers, settings.prefetch, settings.timeout_s, pin_memory=on_gpu)
    num_steps = max(0, plan.steps - first_step + 1)
    microbatches = Microbatches(source, num_steps * plan.batch.grad_accum, loader)
    return Feed(microbatches, source, plan, device)
