"""Batches by length: a function of seed and number, each sample once an epoch, little padding."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.buckets import (
    BatchRule,
    BucketPicks,
    Buckets,
    Lengths,
    all_lengths,
    cut_by_length,
    find_ends,
    padding,
)
from paceline.data.cursor import StepSlice
from paceline.errors import ConfigError, DataError

BUDGET = 64.0


def draw(size: int, seed: int = 0) -> Lengths:
    lengths = np.random.default_rng(seed).lognormal(2.5, 0.7, size)
    return np.ceil(lengths).clip(1, BUDGET)


def of(lengths: Lengths, num_buckets: int = 4, micro: int = 4, by_length: bool = True) -> Buckets:
    return Buckets(lengths, 3, BatchRule(num_buckets, micro, BUDGET if by_length else None))


def read(picks: BucketPicks, microbatches: range) -> list[list[int]]:
    return [picks.sample_ids(n).tolist() for n in microbatches]


@settings(max_examples=20)
@given(size=st.integers(1, 80), buckets=st.integers(1, 9), by_length=st.booleans())
def test_each_sample_once_an_epoch_and_no_batch_over_its_budget(
    size: int, buckets: int, by_length: bool
) -> None:
    lengths = draw(size, seed=size)
    made = of(lengths, buckets, by_length=by_length)
    picks = BucketPicks(made, StepSlice(1, 1, 1, 0))
    epochs = [read(picks, range(e * made.num_batches, (e + 1) * made.num_batches)) for e in (0, 1)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(size))
        for ids in epoch:
            assert len(ids) * lengths[ids].max() <= BUDGET if by_length else len(ids) <= 4
    if size > 50:
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize("by_length", [True, False])
def test_a_step_is_the_same_samples_on_any_ranks_and_after_any_stop(by_length: bool) -> None:
    made, per_step, micro = of(draw(300), by_length=by_length), 8, 1 if by_length else 4

    def take(dp: int, steps: range, start: int = 0) -> list[set[int]]:
        accum = per_step // dp
        slices = [StepSlice(micro, accum, dp, rank, start) for rank in range(dp)]
        picks = [BucketPicks(made, own) for own in slices]
        found = []
        for step in steps:
            rows = [read(own, range(step * accum, (step + 1) * accum)) for own in picks]
            ids = [i for own in rows for batch in own for i in batch]
            assert len(ids) == picks[-1].samples_in_step(step)
            found.append(set(ids))
        return found

    whole = take(1, range(12))
    assert take(2, range(12)) == take(8, range(12)) == whole
    assert take(4, range(8), start=4 * per_step * micro) == whole[4:]


def test_ranks_that_wait_for_each_other_have_batches_of_like_size() -> None:
    lengths = draw(4000)
    made = of(lengths, 8, by_length=False)
    slices = [StepSlice(4, 8, 2, rank) for rank in range(2)]
    sizes = np.array(
        [
            [padding(lengths[BucketPicks(made, own).sample_ids(n)])[1] for n in range(80)]
            for own in slices
        ]
    )
    apart = np.abs(sizes[0] - sizes[1]).mean() / sizes.mean()
    mixed = np.abs(sizes[0] - np.roll(sizes[1], 5)).mean() / sizes.mean()
    assert apart < 0.25 * mixed, (apart, mixed)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_the_cuts_are_the_best_there_are(values: list[int], num_buckets: int) -> None:
    lengths = np.array(values, dtype=float)
    known = np.unique(lengths)

    def cost(ends: Any) -> float:
        return float(np.asarray(ends)[np.searchsorted(ends, lengths)].sum())

    all_cuts = [
        [*inner, known[-1]]
        for size in range(min(num_buckets, len(known)))
        for inner in itertools.combinations(known[:-1], size)
    ]
    found = find_ends(lengths, num_buckets)
    assert len(found) <= num_buckets and cost(found) == min(map(cost, all_cuts))


def test_buckets_leave_little_padding_and_a_million_samples_are_quick() -> None:
    lengths = draw(1_000_000)
    started_at = time.process_time()
    made = of(lengths, 16)
    assert time.process_time() - started_at < 3
    picks = BucketPicks(made, StepSlice(1, 1, 1, 0))
    wastes = np.array([padding(lengths[picks.sample_ids(n)]) for n in range(200)])
    plain = np.array([padding(lengths[n * 8 : n * 8 + 8]) for n in range(200)])
    share, without = (found.sum(axis=0)[0] / found.sum(axis=0)[1] for found in (wastes, plain))
    assert share < 0.1 < 0.4 < without, (share, without)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60))
def test_validation_is_cut_by_length_too(values: list[int]) -> None:
    lengths = np.array(values, dtype=float)
    batches = cut_by_length(lengths, BUDGET)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(values)))
    assert all(len(b) == 1 or len(b) * lengths[b].max() <= BUDGET for b in batches)


class Data:
    def __init__(self, **more: Any) -> None:
        vars(self).update(more)

    def __len__(self) -> int:
        return 4


BAD: dict[str, tuple[Data, type[Exception], str]] = {
    "none": (Data(), ConfigError, r"data.buckets: Data does not say how long .*\nhint: .*lengths"),
    "too few": (Data(lengths=[1, 2]), DataError, "has 4 samples, and 2 lengths"),
    "zero": (Data(lengths=[1, 2, 0, 3]), DataError, r"sample 2 of Data is 0 long \(1 such"),
    "nan": (Data(length=lambda i: [1, np.nan][i % 2]), DataError, "sample 1 of Data is nan long"),
}


@pytest.mark.parametrize("case", BAD)
def test_lengths_that_cannot_be_are_refused(case: str) -> None:
    data, kind, says = BAD[case]
    with pytest.raises(kind, match=says):
        all_lengths(data, "data.buckets")


def test_a_sample_that_no_batch_holds_is_named() -> None:
    says = r"sample 2 is 80 long, and a microbatch holds data.batch_length=64 \(1 such"
    with pytest.raises(DataError, match=says):
        of(np.array([3.0, 5.0, 80.0]))
