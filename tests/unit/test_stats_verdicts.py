"""Intervals, verdicts and the order of winners; numbers are worked out or scipy's own."""

import math

import numpy as np
import pytest
from scipy import stats

from paceline.errors import DataError
from paceline.stats.intervals import SMALLEST_NOISE, Noise, Ruler, _lean, _tukey, measure_samples
from paceline.stats.standings import Group, Standings, Verdict, compare_groups


def compare(*values: tuple[float, ...], **more: object) -> Standings:
    groups = [Group("abcdefgh"[n], runs) for n, runs in enumerate(values)]
    return compare_groups(groups, **more)  # type: ignore[arg-type]


def around(center: float, spread: float) -> tuple[float, ...]:
    """Three runs: their logs have the sd `spread`."""
    return tuple(center * math.exp(step * spread) for step in (-1, 0, 1))


def test_interval_of_a_rate_is_students() -> None:
    """Logs -0.01, 0, 0.01 around log 100: sd 0.01, t with 2 degrees at 97.5 % is 4.3027, so the
    reach is 4.3027 * 0.01 / sqrt 3 = 0.024841: 100 / 1.02515 = 97.546 to 102.515."""
    rate = compare(around(100, 0.01)).rows[0].rate
    assert rate is not None
    assert rate == pytest.approx((100, 97.5465, 102.5152), abs=1e-3)


def test_interval_of_a_ratio_between_equal_noises() -> None:
    """Both have the variance 1e-4 with 2 degrees. F = 1 has the upper tail 1/2 (2 and 2 degrees),
    so each takes half of the other's 2 degrees and has 3; Satterthwaite makes 6 of them, and 4 is
    all there is. t(4) = 2.7764; reach = 2.7764 * sqrt(2e-4 / 3) = 0.022670."""
    row = compare(around(100, 0.01), around(103, 0.01), baseline="a").of("b")
    assert row.speedup is not None
    expected = (1.03, 1.03 * math.exp(-0.022670), 1.03 * math.exp(0.022670))
    assert row.speedup == pytest.approx(expected, abs=1e-5)
    assert str(row.verdict) == "faster"


def test_a_noisy_group_stands_alone_and_a_quiet_one_leans() -> None:
    quiet, loud = Noise(1e-4, 4), Noise(1e-2, 4)
    noisy = _lean(loud, [quiet] * 11)
    assert noisy is not None and noisy.freedom == pytest.approx(4, abs=0.01)
    assert noisy.variance == pytest.approx(1e-2, rel=0.01)
    usual = _lean(quiet, [quiet] * 11)
    assert usual is not None and usual.variance == pytest.approx(1e-4)
    assert 4 + 0.3 * 44 < usual.freedom < 4 + 0.6 * 44
    assert _lean(None, [quiet]) == quiet
    assert _lean(quiet, [None]) == quiet
    assert _lean(None, [None]) is None


@pytest.mark.parametrize("num_groups", [3, 12, 40])
@pytest.mark.parametrize("freedom", [1, 2, 5, 24, 120])
def test_the_studentized_range_is_scipys(num_groups: int, freedom: int) -> None:
    theirs = stats.studentized_range.ppf(0.95, num_groups, freedom) / math.sqrt(2)
    assert _tukey(0.95, num_groups, freedom) == pytest.approx(theirs, rel=1e-4)


def test_rulers_for_many() -> None:
    """12 cells of equal noise, 24 degrees: any pair of them needs more than 11 named pairs do, and
    those more than one pair alone."""
    one, other = measure_samples([around(1, 0.01), around(1, 0.01)])
    any_pair, named = Ruler(12, 24, 0.95), Ruler(12, 24, 0.95, num_comparisons=11)
    single = Ruler(12, 24, 0.95, num_comparisons=1)
    reaches = [ruler.reach(one, other) for ruler in (any_pair, named, single)]
    assert None not in reaches
    assert sorted(reaches, reverse=True) == reaches  # type: ignore[type-var]
    later = any_pair.reach(one, other, more=3)
    assert later is not None and later < reaches[0]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("gain", "spread", "margin", "expected"),
    [
        (1.05, 0.005, 0.02, "faster"),
        (0.95, 0.005, 0.02, "slower"),
        (1.001, 0.002, 0.02, "no difference seen"),
        # Surely more than 1, but not by more than the margin: no difference worth a word.
        (1.01, 0.002, 0.02, "no difference seen"),
        (1.01, 0.002, 0.0, "faster"),
        (1.02, 0.02, 0.02, "not enough data"),
    ],
)
def test_the_four_verdicts(gain: float, spread: float, margin: float, expected: str) -> None:
    table = compare(around(100, spread), around(100 * gain, spread), baseline="a", margin=margin)
    assert table.of("b").verdict.kind == expected
    assert str(table.of("a").verdict) == "no difference seen"
    # The other direction: milliseconds, where less is better.
    table = compare(
        around(100, spread), around(100 / gain, spread),
        baseline="a", margin=margin, lower_is_better=True,
    )  # fmt: skip
    row = table.of("b")
    assert row.verdict.kind == expected
    assert row.speedup is not None and row.speedup.value == pytest.approx(gain)


def test_texts() -> None:
    assert str(Verdict("not enough data", 4)) == "not enough data (needs about 4 more repeats)"
    assert str(Verdict("not enough data", 1)) == "not enough data (needs about 1 more repeat)"
    assert str(Verdict("not enough data", 101)) == (
        "not enough data (needs more than 100 more repeats)"
    )
    assert str(Verdict("slower")) == "slower"


def test_needed_repeats_would_do() -> None:
    """Noise 2 %, no gain, margin 2 %: with n runs of each of two, t * 0.02 * sqrt(2 / n) must be
    below log 1.02 = 0.0198. n = 9 has t(16) = 2.120 and 0.01999; n = 10 has t(18) = 2.101 and
    0.01879. So 7 more than 3."""
    verdict = compare(around(100, 0.02), around(100, 0.02)).of("a").verdict
    assert verdict == Verdict("not enough data", 7)


def test_noise_beyond_reason_needs_more_than_can_be_asked() -> None:
    verdict = compare(around(100, 0.3), around(100, 0.3)).of("b").verdict
    assert str(verdict).endswith("(needs more than 100 more repeats)")


def test_single_runs_never_claim() -> None:
    table = compare((100.0,), (300.0,), (5.0,))
    assert {str(row.verdict) for row in table.rows} == {
        "not enough data (needs about 2 more repeats)"
    }
    assert len(table.winners) == 3
    assert (table.noise, table.rows[0].rate, table.rows[0].variation) == (None, None, None)


def test_a_single_run_borrows_the_noise_of_others() -> None:
    table = compare(around(100, 0.005), around(100, 0.005), (120.0,))
    row = table.of("c")
    assert (row.verdict.kind, row.is_winner) == ("faster", True)
    assert row.rate is not None and row.rate.low < 120 < row.rate.high


def test_equal_values_are_not_certainty() -> None:
    """Noise is taken for 0.1 % where runs came out equal: 3 % is still found, 0.3 % is not."""
    table = compare((100.0, 100.0), (103.0, 103.0), baseline="a")
    assert table.of("b").verdict.kind == "faster"
    assert table.noise == pytest.approx(SMALLEST_NOISE)
    rate = table.of("a").rate
    assert rate is not None and rate.low < 100 < rate.high
    table = compare((100.0, 100.0), (100.3, 100.3), baseline="a", margin=0.0)
    assert table.of("b").verdict.kind == "not enough data"


def test_unequal_repeats() -> None:
    table = compare(around(100, 0.01), (110.0, 111.0), (90.0,), (111.0, 110.0, 112.0, 110.5, 111.0))
    assert {row.group.name for row in table.winners} == {"b", "d"}
    assert table.of("c").verdict.kind == "slower"


def test_a_failed_group_is_last_and_says_no_number() -> None:
    table = compare((), around(100, 0.01), around(50, 0.01))
    row = table.rows[-1]
    assert (row.group.name, row.rate, row.speedup, row.is_winner) == ("a", None, None, False)
    assert str(row.verdict) == "not enough data"
    assert [r.verdict.kind for r in table.rows[:2]] == ["faster", "slower"]


def test_a_failed_baseline_compares_nothing() -> None:
    table = compare((), around(100, 0.01), around(50, 0.01), baseline="a")
    assert {str(row.verdict) for row in table.rows} == {"not enough data"}
    assert all(row.speedup is None for row in table.rows)
    assert [row.group.name for row in table.winners] == ["b"]


def test_winners_by_memory_then_by_variation() -> None:
    groups = [
        Group("large", around(101, 0.010), 9e9),
        Group("unknown", around(100, 0.001)),
        Group("small_wild", around(100, 0.015), 5e9),
        Group("small_calm", around(99.5, 0.010), 5e9),
        Group("slow", around(50, 0.010), 1e9),
        Group("slower", around(40, 0.010), 1e9),
    ]
    table = compare_groups(groups)
    order = ["small_calm", "small_wild", "large", "unknown", "slow", "slower"]
    assert [row.group.name for row in table.rows] == order
    assert [row.is_winner for row in table.rows] == [True] * 4 + [False] * 2
    assert (table.reference, table.is_baseline, table.best.group.name) == ("large", False, "large")
    # A baseline changes what verdicts are against, not who wins.
    table = compare_groups(groups, baseline="slow")
    assert [row.group.name for row in table.rows] == order
    assert (table.reference, table.is_baseline) == ("slow", True)


def test_a_winner_that_looks_slower_than_the_margin_stands_behind() -> None:
    """It has the least memory, and may be a winner only because it is wild."""
    wild = Group("wild", around(80, 0.3), 1e9)
    groups = [wild, Group("best", around(100, 0.01), 9e9), Group("near", around(99, 0.01), 5e9)]
    table = compare_groups(groups)
    assert [row.group.name for row in table.winners] == ["near", "best", "wild"]


def test_the_best_is_faster_only_if_it_beats_all() -> None:
    table = compare(around(120, 0.002), around(100, 0.002), around(80, 0.002))
    assert str(table.best.verdict) == "faster"
    table = compare(around(120, 0.002), around(119.9, 0.002), around(80, 0.002))
    assert str(table.best.verdict) == "no difference seen"
    table = compare(around(120, 0.01), around(118, 0.01), around(80, 0.01))
    assert table.best.verdict.kind == "not enough data"


def test_one_group_alone() -> None:
    table = compare(around(100, 0.01))
    assert (str(table.best.verdict), table.best.is_winner) == ("not enough data", True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -3.0])
def test_values_that_cannot_be_compared_are_refused(bad: float) -> None:
    with pytest.raises(DataError, match=f"a: {bad} cannot be compared"):
        compare((1.0, bad), (1.0, 2.0))


def test_questions_without_sense_are_refused_together() -> None:
    groups = [Group("a", ()), Group("a", ())]
    with pytest.raises(DataError) as caught:
        compare_groups(groups, baseline="x", margin=-1, confidence=2)
    message = str(caught.value)
    for part in ("named twice", "'x' is none of", "no group", "margin", "confidence"):
        assert part in message


def test_numbers_of_numpy_are_numbers() -> None:
    assert compare(tuple(np.array([1.0, 1.01])), (2.0, 2.01)).best.group.name == "b"
