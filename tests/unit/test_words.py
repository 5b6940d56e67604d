"""Numbers and names in words: a table of inputs for each."""

import math

import pytest

from paceline.records import words


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"), (0.123456, "0.1235"), (12.3456, "12.35"), (999.94, "999.9"), (9999.4, "9,999"),
        (9999.7, "10,000"), (1234.5, "1,234"), (1234567.0, "1,234,567"), (-0.5, "-0.5"),
        (1e-05, "1e-05"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_a_number_has_four_digits_or_all_before_the_point(value: float, said: str) -> None:
    assert words.number(value) == said


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1,023 B"), (1024, "1 KiB"), (2**20, "1 MiB"),
        (1020 * 2**20, "1,020 MiB"), (1.5 * 2**30, "1.5 GiB"), (80 * 2**30, "80 GiB"),
        (999.7 * 2**30, "1,000 GiB"), (2**40, "1 TiB"), (3 * 2**50, "3,072 TiB"),
    ],
)  # fmt: skip
def test_a_size_is_told_in_the_largest_unit_it_fills(num_bytes: float, said: str) -> None:
    assert words.size(num_bytes) == said


@pytest.mark.parametrize(
    ("seconds", "digits", "said"),
    [
        (0, 3, "0 s"), (7.84e-6, 3, "7.84 µs"), (1e-9, 3, "0.001 µs"), (0.00561, 3, "5.61 ms"),
        (0.0456789, 4, "45.68 ms"), (0.9999, 3, "1,000 ms"), (1, 3, "1 s"), (87.7, 4, "87.7 s"),
        (3725, 3, "3,725 s"),
    ],
)  # fmt: skip
def test_a_measured_time(seconds: float, digits: int, said: str) -> None:
    assert words.duration(seconds, digits) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "0 s"), (7.4, "7 s"), (119, "119 s"), (119.6, "2 min 0 s"), (200, "3 min 20 s"),
        (3599.9, "1 h 0 min"), (3725, "1 h 2 min"), (47 * 3600, "47 h 0 min"),
        (190_800, "2 d 5 h"),
    ],
)  # fmt: skip
def test_time_that_somebody_waited(seconds: float, said: str) -> None:
    assert words.elapsed(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0"), (999, "999"), (1500, "1.5k"), (2.5e6, "2.5M"), (-3e9, "-3G")]
)
def test_beside_an_axis_a_number_is_short(value: float, said: str) -> None:
    assert words.short(value) == said


def test_rates_counts_intervals_and_what_is_not_known() -> None:
    assert (words.flop_rate(412.3), words.flop_rate(0.0035)) == ("412 TFLOP/s", "3.5 GFLOP/s")
    assert (words.flop_rate(0.3), words.flop_rate(2.3e-6)) == ("0.3 TFLOP/s", "2.3 MFLOP/s")
    assert (words.count(1, "rank"), words.count(1024, "rank")) == ("1 rank", "1,024 ranks")
    assert words.count(2, "repetition of it", "repetitions of it") == "2 repetitions of it"
    assert words.interval(123.44, 120, 9999.9) == "123.4 (120 to 10,000)"
    assert words.ratio(1.0824, 1.0512, 1.114) == "1.082 (1.051 to 1.114)"
    assert (words.shown(None), words.shown(0.123456), words.shown(7)) == ("unknown", "0.1235", "7")


def test_the_nearest_name_is_offered_only_where_one_is_near() -> None:
    known = ["lm_tiny", "lm_1b", "mae_tiny"]
    assert words.nearest("lm_tinny", known) == "lm_tiny"
    assert words.did_you_mean("lm_tinny", known) == "did you mean lm_tiny? "
    assert words.nearest("zebra", known) is None and words.did_you_mean("zebra", known) == ""


def test_a_cell_of_a_table_stays_a_cell() -> None:
    made = words.table(("a", "b"), [("x|y", "<b>\nz")])
    assert made == "| a | b |\n| --- | --- |\n| x\\|y | &lt;b&gt; z |"
