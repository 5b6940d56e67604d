"""Batches of similar length, as a pure function of the batch's number: no state to save.

    lengths --> buckets of similar length --> batches inside a bucket --> all batches, shuffled

Which bucket a sample is in, and so how many batches there are, never changes; each epoch permutes
the samples of every bucket and then all batches, both by `cursor.Order`. So batch ten million costs
what batch zero does, and neither ranks nor loader processes play a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.schema import DataConfig, RunConfig
from paceline.data.cursor import EvenPicks, Indices, Order, Picks, StepSlice
from paceline.errors import ConfigError, DataError
from paceline.records import BatchSplit
from paceline.records.files import fingerprint

Lengths = NDArray[np.float64]
CANDIDATES = 256  # lengths at which a bucket may end
PLACES = 20  # bits of a place: samples of a batch count on from it
SEED_APART = 2**32  # each bucket has an order of its own; seeds of runs are below 2**31


def length_of(data: Any) -> Callable[[Indices], Lengths] | None:
    """Return the source of the samples' lengths: the data set's `lengths`, one number for each, or
    its `length(index)`; None if it has neither."""
    known = getattr(data, "lengths", None)
    if known is not None and not callable(known):
        lengths = np.asarray(known, dtype=np.float64)
        return lambda ids: lengths[ids]
    one = getattr(data, "length", None)
    if not callable(one):
        return None
    return lambda ids: np.array([one(int(index)) for index in ids], dtype=np.float64)


def all_lengths(data: Any, asked: str) -> Lengths:
    """Return the lengths of all samples, each above 0; `asked` is the key that needs them."""
    tell = length_of(data)
    if tell is None:
        raise ConfigError(
            f"{asked}: {type(data).__name__} does not say how long its samples are\n"
            "hint: give the data set `lengths`, one number for each sample, or length(self, index)"
        )
    known = getattr(data, "lengths", None)
    if known is not None and not callable(known) and len(known) != len(data):
        raise DataError(
            f"{type(data).__name__} has {len(data)} samples, and {len(known)} lengths\n"
            "hint: lengths needs one number for each sample"
        )
    lengths = tell(np.arange(len(data), dtype=np.int64))
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise DataError(
            f"sample {bad[0]} of {type(data).__name__} is {lengths[bad[0]]:g} long"
            f" ({len(bad)} such samples)\nhint: leave out what is empty; lengths are above 0"
        )
    return lengths


@dataclass(frozen=True)
class BatchRule:
    """How many samples of a bucket make a batch: `micro`, or as many as a `budget` of length
    holds when all are as long as the bucket's longest."""

    num_buckets: int
    micro: int
    budget: float | None

    @classmethod
    def of(cls, data: DataConfig, micro: int) -> "BatchRule":
        assert data.num_buckets is not None, "batches are made without regard to length"
        budget = data.batch_length if data.batch_by == "length" else None
        assert budget is None or isinstance(budget, float), "required, or found before training"
        return cls(data.num_buckets, micro, budget)

    def sizes(self, longest: Lengths) -> Indices:
        """Return the samples per batch of buckets whose longest samples are these."""
        if self.budget is None:
            return np.full(len(longest), self.micro, dtype=np.int64)
        return (self.budget // longest).astype(np.int64)


class Buckets:
    """The endless sequence of batches of one run."""

    def __init__(self, lengths: Lengths, seed: int, rule: BatchRule) -> None:
        if rule.budget is not None and lengths.max() > rule.budget:
            which = int(lengths.argmax())
            raise DataError(
                f"sample {which} is {lengths[which]:g} long, and a microbatch holds"
                f" data.batch_length={rule.budget:g} ({(lengths > rule.budget).sum()} such samples)"
                "\nhint: set it to at least that, or leave out long samples"
            )
        self.lengths, self.seed = lengths, seed
        ends = find_ends(lengths, rule.num_buckets)
        bucket = np.searchsorted(ends, lengths)  # the first that ends at this length or above
        self.members = np.argsort(bucket, kind="stable")
        self.counts = np.bincount(bucket, minlength=len(ends))
        self.starts = np.cumsum(self.counts) - self.counts
        self.ends, self.sizes = ends, rule.sizes(ends)
        num_batches = -(-self.counts // self.sizes)  # the last one of a bucket may be smaller
        self.firsts = np.cumsum(num_batches) - num_batches
        self.num_batches = int(num_batches.sum())
        self.order = Order(self.num_batches, seed)

    def find(self, numbers: Indices) -> "Dealt":
        """Return where the batches with these numbers are: one call for many, as the hash costs
        more than its array."""
        batches = self.order.at(numbers)
        buckets = np.searchsorted(self.firsts, batches, side="right") - 1
        indices = batches - self.firsts[buckets]
        left = self.counts[buckets] - indices * self.sizes[buckets]
        return Dealt(numbers, buckets, indices, np.minimum(self.sizes[buckets], left))

    def samples(self, number: int, bucket: int, index: int) -> Indices:
        """Return the samples of a batch that `find` has found."""
        count, size = int(self.counts[bucket]), int(self.sizes[bucket])
        own = Order(count, self.seed + (bucket + 1) * SEED_APART)
        epoch = number // self.num_batches * count
        positions = epoch + np.arange(index * size, min((index + 1) * size, count))
        ids: Indices = self.members[self.starts[bucket] + own.at(positions)]
        return ids


class Dealt(NamedTuple):
    """Batches: their numbers in the run, the bucket of each, which batch of its bucket it is, and
    how many samples it has."""

    numbers: Indices
    buckets: Indices
    indices: Indices
    num_samples: Indices


class BucketPicks:
    """Each step takes the next batches, however many ranks share them. They are dealt out by cost:
    ranks that wait for each other after every microbatch get batches of similar size."""

    def __init__(self, buckets: Buckets, step_slice: StepSlice) -> None:
        self.buckets, self.slice = buckets, step_slice
        self.seed, self.per_step = buckets.seed, step_slice.grad_accum * step_slice.dp
        self.epoch_size = buckets.num_batches * step_slice.micro
        self._step: int | None = None
        self._dealt: Dealt

    @property
    def fingerprint(self) -> str:
        """Changes with any length, because all batches then change."""
        return f"lengths-{fingerprint(self.buckets.lengths.tobytes())}"

    def sample_ids(self, microbatch: int) -> Indices:
        dealt, at = self._find(microbatch)
        return self.buckets.samples(*(int(part[at]) for part in dealt[:3]))

    def place(self, microbatch: int) -> int:
        dealt, at = self._find(microbatch)
        return int(dealt.numbers[at]) << PLACES

    def samples_in_step(self, step: int) -> int:
        return int(self._deal(step).num_samples.sum())

    def of(self, step_slice: StepSlice) -> "BucketPicks":
        return BucketPicks(self.buckets, step_slice)

    def _find(self, microbatch: int) -> tuple[Dealt, int]:
        """Return the batches of the step, and which of them is this microbatch of this rank."""
        step, row = divmod(microbatch, self.slice.grad_accum)
        # Back and forth, so that no rank always gets the larger one of a row.
        dp, rank = self.slice.dp, self.slice.dp_rank
        return self._deal(step), row * dp + (rank if row % 2 == 0 else dp - 1 - rank)

    def _deal(self, step: int) -> Dealt:
        if step != self._step:
            first = -(-self.slice.start // self.slice.micro) + step * self.per_step
            found = self.buckets.find(np.arange(first, first + self.per_step, dtype=np.int64))
            # The largest first: a step that does not fit into memory fails at its beginning.
            costs = found.num_samples * self.buckets.ends[found.buckets]
            largest = np.argsort(-costs, kind="stable")
            self._step, self._dealt = step, Dealt(*(part[largest] for part in found))
        return self._dealt


def open_picks(config: RunConfig, batch: BatchSplit, data: Any) -> Picks:
    """Return which samples the first rank takes, from the beginning on."""
    own = StepSlice(batch.micro, batch.grad_accum, batch.dp, 0)
    seed, settings = config.train.seed, config.data
    if settings.num_buckets is None:
        return EvenPicks(Order(len(data), seed), own)
    asked = "data.batch_by=length" if settings.batch_by == "length" else "data.buckets"
    rule = BatchRule.of(settings, batch.micro)
    return BucketPicks(Buckets(all_lengths(data, asked), seed, rule), own)


def find_ends(lengths: Lengths, num_buckets: int) -> Lengths:
    """Return the longest length of each bucket: of all ways to cut the lengths into so many
    buckets, the one with the least padding if every sample is padded to its bucket's longest."""
    quantiles = np.linspace(0, 1, CANDIDATES)
    ends = np.unique(np.quantile(lengths, quantiles, method="higher"))
    below = np.concatenate([[0], np.searchsorted(np.sort(lengths), ends, side="right")])
    # cost[i, j]: a bucket that takes all between end i (not included; 0: from the start) and end j.
    counts = below[None, 1:] - below[:-1, None]
    cost = np.where(counts > 0, counts * ends[None, :], np.inf)
    # best[j]: the least cost of k buckets that end at j; each iteration adds one bucket.
    best, cuts = cost[0], []
    for _ in range(min(num_buckets, len(ends)) - 1):
        # The last bucket begins after end i - 1, where the others have ended.
        total = np.concatenate([[np.inf], best[:-1]])[:, None] + cost
        cut = total.argmin(axis=0)
        cuts.append(np.where(total.min(axis=0) < best, cut, 0))
        best = np.minimum(best, total.min(axis=0))
    chosen, last = [len(ends) - 1], len(ends) - 1
    for cut in reversed(cuts):
        if cut[last]:
            last = int(cut[last]) - 1
            chosen.append(last)
    return ends[chosen[::-1]]


def padding(lengths: Lengths) -> tuple[float, float]:
    """Return how much of a batch is padding if its samples are padded to the longest, and the
    length of all of it."""
    whole = float(lengths.max()) * len(lengths)
    return whole - float(lengths.sum()), whole


def cut_by_length(lengths: Lengths, budget: float) -> list[Indices]:
    """Cut samples, the longest first, into batches within a budget of length; one that is longer
    than the budget is a batch of its own."""
    order, batches = np.argsort(-lengths, kind="stable"), []
    while len(order):
        size = max(1, int(budget // lengths[order[0]]))
        batches.append(order[:size])
        order = order[size:]
    return batches
