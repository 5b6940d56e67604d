"""The order of samples: a permutation each epoch, the same for any split into ranks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.cursor import Order, StepSlice
from paceline.data.loader import deal_batches


@given(size=st.integers(1, 300), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    ids = Order(size, seed).at(np.arange(epoch * size, (epoch + 1) * size))
    assert sorted(ids.tolist()) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    first = Order(1000, 0).at(np.arange(2000))
    assert not np.array_equal(first[:1000], first[1000:])
    assert not np.array_equal(first, Order(1000, 1).at(np.arange(2000)))
    assert not np.array_equal(first[:1000], np.arange(1000))


def test_the_order_looks_random() -> None:
    """Neighbours are as far apart as in a random permutation, n/3 on average."""
    ids = Order(30_000, 7).at(np.arange(30_000))
    assert np.abs(np.diff(ids)).mean() == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize(("micro", "accum", "dp"), [(8, 1, 2), (4, 2, 2), (2, 2, 4), (1, 16, 1)])
def test_a_step_is_the_same_samples_for_any_split(micro: int, accum: int, dp: int) -> None:
    slices = [StepSlice(micro, accum, dp, rank) for rank in range(dp)]
    step = 5
    seen = np.concatenate([s.positions(step * accum + a) for s in slices for a in range(accum)])
    assert sorted(seen.tolist()) == list(range(step * 16, (step + 1) * 16))


def test_a_far_position_costs_what_the_first_does() -> None:
    order = Order(10_000_000, 0)
    started_at = time.perf_counter()
    order.at(np.arange(9_999_000, 10_001_000))
    assert time.perf_counter() - started_at < 0.1


@given(samples=st.integers(1, 100), micro=st.integers(1, 9), dp=st.integers(1, 5))
def test_validation_sees_each_sample_once_in_equal_numbers_of_batches(
    samples: int, micro: int, dp: int
) -> None:
    cut = np.split(np.arange(samples), range(micro, samples, micro))
    by_rank = [deal_batches(cut, dp, rank) for rank in range(dp)]
    assert len({len(batches) for batches in by_rank}) == 1
    seen = [int(i) for batches in by_rank for ids in batches for i in ids]
    assert sorted(seen) == list(range(samples))


@given(
    num_samples=st.integers(5, 200),
    global_size=st.sampled_from([4, 8, 12]),
    cut=st.integers(0, 12),
    dp=st.sampled_from([1, 2, 4]),
    other=st.sampled_from([1, 2, 4]),
)
def test_a_run_goes_on_where_it_stopped_whoever_reads(
    num_samples: int, global_size: int, cut: int, dp: int, other: int
) -> None:
    """Any cut, any number of ranks before and after it: the same samples in the same order."""
    order, steps = Order(num_samples, 3), 12

    def take(first: int, last: int, ranks: int, start: int) -> list[int]:
        slices = [StepSlice(global_size // ranks, 1, ranks, rank, start) for rank in range(ranks)]
        return [
            int(index)
            for number in range(last - first)
            for own in slices
            for index in order.at(own.positions(number))
        ]

    whole = take(0, steps, 1, 0)
    assert take(0, cut, dp, 0) + take(cut, steps, other, cut * global_size) == whole
