"""Clocks, windows and figures: known inputs, worked-out outputs."""

import pytest
import torch

from paceline.records.tables import TrainingRow
from paceline.stats.windows import measure_throughput, quantile
from paceline.strategies import clock as timing
from paceline.train.readback import Readback


def row(step: int, step_s: float, warmup: bool = False) -> TrainingRow:
    # 8 samples of 16 tokens a step.
    return TrainingRow(step, 1.0, 0.1, 1.0, step_s, 8 / step_s, 128 / step_s, False, warmup, None)


def test_throughput_is_work_over_time_after_warm_up() -> None:
    rows = [row(1, 9.0, warmup=True), row(2, 1.0), row(3, 3.0)]
    rates = measure_throughput(rows, "training.csv")
    assert rates is not None
    # 16 samples in 4 s; the mean of the two rates would be 5.3.
    assert rates.samples_per_s == pytest.approx(4.0)
    assert rates.tokens_per_s == pytest.approx(64.0)
    assert rates.steps_per_s == pytest.approx(0.5)
    assert (rates.window.first_step, rates.window.last_step) == (2, 3)
    assert measure_throughput(rows[:1], "training.csv") is None


def test_quantiles_interpolate() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([5.0], 0.9) == 5.0


def test_a_host_clock_accounts_for_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    clock = timing.HostClock()
    for phase, seconds in [("data", 1), ("forward", 2), ("backward", 3), ("forward", 2)]:
        if phase == "data":
            clock.begin(1)
        else:
            clock.enter(phase)
        now[0] += seconds
    clock.begin(2)
    (times,) = clock.finished()
    assert times.phases_s == {"data": 1, "forward": 4, "backward": 3}
    assert times.wall_s == 8 and times.unaccounted_s == 0
    assert clock.finished() == []


def test_readback_hands_out_in_order_and_not_early() -> None:
    readback = Readback(torch.device("cpu"))
    for tag in (1, 2, 3):
        readback.push(tag, (torch.tensor(float(tag)), torch.tensor([0.0, 1.0])))
    assert readback.pop(2, wait=True) == [(1, [1.0, [0.0, 1.0]]), (2, [2.0, [0.0, 1.0]])]
    assert readback.pop(2, wait=True) == []
    assert readback.pop(9, wait=False) == [(3, [3.0, [0.0, 1.0]])]
