"""Splits of a model, and schedules held against each other for it."""

import math
from itertools import combinations

import pytest

from paceline.errors import ConfigError
from paceline.schedules.choose import (
    Block,
    Setup,
    compare_schedules,
    find_microbatches,
    simulate_setup,
)
from paceline.schedules.orders import NAMES
from paceline.schedules.requirements import split_blocks

EVEN = tuple(Block(1.0, 1.0, 1.0, activation_bytes=2**20, state_bytes=2**30) for _ in range(16))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("costs", [[1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1, 4], [1, 2, 3, 4, 5, 6]])
def test_no_split_has_a_cheaper_dearest_stage(costs: list[float], num_stages: int) -> None:
    def dearest(bounds: list[int]) -> float:
        return max(sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))

    stages = split_blocks(costs, num_stages)
    assert [block for stage in stages for block in stage] == list(range(len(costs)))
    assert all(stages)
    tried = combinations(range(1, len(costs)), num_stages - 1)
    best = min(dearest([0, *cuts, len(costs)]) for cuts in tried)
    assert dearest([0, *(stage.stop for stage in stages)]) == best


def test_equal_blocks_are_dealt_evenly() -> None:
    assert [len(stage) for stage in split_blocks([1.0] * 10, 4)] in (
        [3, 3, 2, 2], [2, 3, 3, 2], [2, 2, 3, 3], [3, 2, 2, 3], [2, 3, 2, 3], [3, 2, 3, 2],
    )  # fmt: skip


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match="5 stages of a model of 3 blocks(.|\n)*stages to 3"):
        split_blocks([1.0] * 3, 5)


def test_the_fastest_that_fits_comes_first() -> None:
    """16 blocks of 3 s on 4 ranks, 16 microbatches: stages of 4 s a third, so 1f1b takes 57 slots
    of 4 s, and DualPipe 49."""
    found = compare_schedules(Setup(EVEN, num_ranks=4, num_microbatches=16))
    assert [c.step_s for c in found] == sorted(c.step_s for c in found)
    by_name = {c.name: c for c in found}
    assert set(by_name) == set(NAMES)
    assert by_name["1f1b"].step_s == 57 * 4
    assert by_name["dualpipe"].step_s == 49 * 4
    assert found[0].name == "dualpipe"
    assert found[0].because == "no schedule that fits is faster; idles 2.0%"
    assert by_name["1f1b"].because == "+16.3% a step; idles 15.8%"
    assert by_name["1f1b"].formula is not None and by_name["1f1b"].formula.is_exact


def test_memory_counts_state_and_activations() -> None:
    """A stage of 4 blocks: 4 GiB of state; 1f1b holds 4 microbatches of 4 MiB on rank 0. DualPipe
    holds two stages: 8 GiB, and no longer fits."""
    setup = Setup(EVEN, num_ranks=4, num_microbatches=16, memory_bytes=6 * 2**30)
    found = {c.name: c for c in compare_schedules(setup)}
    assert found["1f1b"].peak_bytes[0] == 4 * 2**30 + 4 * 4 * 2**20
    assert found["1f1b"].status == "fits"
    assert found["dualpipe"].status == "too large"
    assert found["dualpipe"].because == "rank 0 needs 8.02 GiB and has 6 GiB"
    names = [c.name for c in compare_schedules(setup)]
    assert names[-1] == "dualpipe" and names[0] != "dualpipe"


def test_what_cannot_be_drawn_says_why_and_comes_last() -> None:
    found = compare_schedules(Setup(EVEN[:5], num_ranks=3, num_microbatches=3))
    last = {c.name: c for c in found if c.status == "refused"}
    assert set(last) == {
        "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev", "dualpipe",
    }  # fmt: skip
    assert "6 stages of a model of 5 blocks" in last["zbv"].because
    assert "even number of ranks" in last["dualpipe"].because
    assert [c.status for c in found] == ["fits"] * 2 + ["refused"] * 6
    assert all(c.step_s == math.inf for c in last.values())


def test_slow_links_and_dear_actions_change_the_order() -> None:
    """Twice the stages, twice the transfers and actions: what zero-bubble formulas leave out."""

    def step_s(name: str, **slow: float) -> float:
        return simulate_setup(Setup(EVEN, num_ranks=4, num_microbatches=16, **slow), name).total_s

    assert step_s("dualpipev") < step_s("1f1b")
    assert step_s("dualpipev", transfer_s=8.0) > step_s("1f1b", transfer_s=8.0)
    assert step_s("zbv") < step_s("1f1b")
    assert step_s("zbv", overhead_s=1.0) > step_s("1f1b", overhead_s=1.0)


def test_microbatches_for_a_bubble_are_simulated() -> None:
    setup = Setup(EVEN, num_ranks=4, num_microbatches=4)
    assert find_microbatches(setup, "1f1b", 3 / 11 + 1e-9).num_microbatches == 8
    slow = Setup(EVEN, num_ranks=4, num_microbatches=4, transfer_s=1.0)
    needed = find_microbatches(slow, "1f1b", 0.27)
    assert needed.num_microbatches is not None and needed.num_microbatches > 9
    assert needed.bubble <= 0.27


def test_no_number_of_microbatches_evens_out_stages() -> None:
    """Stages of 3 and 9 s: with many microbatches one idles two thirds of the time, both a third.
    And where each microbatch waits for a slow link, no number of them hides it."""
    blocks = (Block(1.0, 1.0, 1.0), Block(3.0, 3.0, 3.0))
    needed = find_microbatches(Setup(blocks, 2, 4), "1f1b", 0.1)
    assert needed.num_microbatches is None
    assert needed.bubble == pytest.approx(1 / 3)
    assert needed.because == "with more and more microbatches it still idles 33.33%"
    waiting = Setup(EVEN, num_ranks=4, num_microbatches=4, transfer_s=8.0)
    assert find_microbatches(waiting, "1f1b", 0.1).num_microbatches is None
