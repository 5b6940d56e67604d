"""Warm-up, compile steps, blocks and drift, on series whose truth is known."""

import numpy as np
import pytest

from paceline.stats.steady import count_warmup, find_compile_steps, measure_spread

RNG = np.random.default_rng(6)


def noise(num_steps: int, sd: float = 0.02) -> np.ndarray:
    return 1 + sd * RNG.normal(size=num_steps)


@pytest.mark.parametrize("ramp", [10, 40, 80])
def test_a_ramp_is_cut_where_it_ends(ramp: int) -> None:
    step_s = noise(300)
    step_s[:ramp] += np.linspace(1, 0, ramp, endpoint=False)
    assert 0.75 * ramp <= count_warmup(step_s) <= ramp + 40


def test_a_fast_start_is_warmup_too() -> None:
    """A GPU's queue fills: the host is done with the first steps before the device is."""
    step_s = noise(200)
    step_s[:20] *= 0.3
    assert 20 <= count_warmup(step_s) <= 60


def test_a_steady_run_loses_little() -> None:
    assert np.mean([count_warmup(noise(300)) for _ in range(50)]) < 30


def test_a_series_that_never_changes_loses_its_first_step() -> None:
    assert count_warmup(np.full(100, 0.1)) == 1
    assert count_warmup(np.array([3.0, *[0.1] * 99])) == 1


def test_never_more_than_half() -> None:
    assert count_warmup(np.linspace(2, 1, 100)) <= 50
    for num_steps in range(2, 12):
        assert 1 <= count_warmup(noise(num_steps)) <= max(1, num_steps // 2)
    assert count_warmup(np.array([1.0])) == 1  # one step: nothing is left to measure
    assert count_warmup(np.array([])) == 0


@pytest.mark.parametrize("sd", [0.001, 0.02])
def test_an_early_spike_is_no_warmup(sd: float) -> None:
    """It is part of what the user gets; cutting behind it would make the run look fast. MSER cuts
    behind step 30 of a steady series in some 9 % of cases anyway."""
    found = []
    for _ in range(200):
        step_s = noise(200, sd)
        step_s[30] = 2.0
        found.append(count_warmup(step_s) > 30)
    assert np.mean(found) < 0.2


def test_compile_steps_are_far_above_the_median() -> None:
    step_s = np.full(40, 0.1)
    step_s[[0, 1, 25]] = 9.0, 4.0, 2.0
    step_s[30] = 0.25  # a spike: 2.5 medians
    assert np.flatnonzero(find_compile_steps(step_s)).tolist() == [0, 1, 25]


def test_a_hiccup_of_a_short_step_is_no_compilation() -> None:
    """Ten medians, but only 9 ms: nothing compiles in that."""
    step_s = np.full(40, 0.001)
    step_s[20] = 0.010
    assert not find_compile_steps(step_s).any()


def test_blocks_of_steps_without_memory() -> None:
    """1600 steps of sd 2 %: the standard error of the mean is 0.02 / sqrt(1600) = 0.0005."""
    spreads = [measure_spread(noise(1600)) for _ in range(40)]
    assert np.mean([s.standard_error for s in spreads]) == pytest.approx(0.0005, rel=0.15)
    assert len(spreads[0].blocks_s) in (8, 16)


def test_steps_that_remember_widen_the_error() -> None:
    """AR(1) with rho 0.9: the mean of 1600 has sd 0.02 * sqrt(1.9 / 0.1 / 1600) = 0.0022; taking
    steps for independent would say 0.0005."""
    found = []
    for _ in range(40):
        value, series = 0.0, []
        for shock in RNG.normal(size=1600):
            value = 0.9 * value + shock * 0.02 * (1 - 0.81) ** 0.5
            series.append(1 + value)
        found.append(measure_spread(np.array(series)).standard_error)
    assert np.mean(found) == pytest.approx(0.0022, rel=0.2)


def test_blocks_whose_neighbours_are_alike_are_joined() -> None:
    """One slow wave: of sixteen blocks each is like the next one, so eight are asked."""
    wave = 1 + 0.02 * np.sin(np.linspace(0, 2 * np.pi, 1600))
    assert len(measure_spread(wave).blocks_s) == 8
    restless = 1 + 0.02 * np.tile(np.repeat([1.0, -1.0], 100), 8)
    assert len(measure_spread(restless).blocks_s) == 16


def test_drift_is_the_change_from_begin_to_end() -> None:
    """1.00 to 1.10 in a line, over a mean of 1.05: 0.0952. A spike hardly moves it."""
    step_s = np.linspace(1.0, 1.1, 1600)
    assert measure_spread(step_s).drift == pytest.approx(0.0952, abs=0.001)
    step_s[800] = 30.0
    assert measure_spread(step_s).drift == pytest.approx(0.0952, abs=0.003)


def test_a_window_of_one_step() -> None:
    spread = measure_spread(np.array([0.5]))
    assert (spread.standard_error, spread.drift, spread.blocks_s) == (0.0, 0.0, (0.5,))
