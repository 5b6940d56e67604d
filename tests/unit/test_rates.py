"""Rates of this CPU, and how much is timed."""

import pytest
import torch

from paceline.check import rates
from paceline.check.rates import Batches, plan_batches
from paceline.machine.measures import CopyRate, MatmulRate


def test_a_cpu_is_measured_in_fp32_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "BUDGET_S", 0.02)
    monkeypatch.setattr(rates, "CPU_SIDE", 128)
    monkeypatch.setattr(rates, "CPU_COPY_BYTES", 2**20)
    matmul, copy = rates.measure_rates(torch.device("cpu"))
    assert isinstance(matmul, MatmulRate) and isinstance(copy, CopyRate)
    assert matmul.precision == "fp32" and matmul.side == 128
    assert 0 < matmul.tflop_per_s <= matmul.best_tflop_per_s
    assert 0 < copy.gb_per_s <= copy.best_gb_per_s


def test_a_rate_is_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_time", lambda run, device: [1e-3, 2e-3, 4e-3])
    monkeypatch.setattr(rates, "CPU_COPY_BYTES", 2**20)
    matmul, copy = rates.measure_rates(torch.device("cpu"))
    assert isinstance(matmul, MatmulRate) and isinstance(copy, CopyRate)
    # 2 x 1024**3 FLOP in 2 ms at the median; 1 MiB read and 1 MiB written.
    assert matmul.tflop_per_s == pytest.approx(2 * 1024**3 / 2e-3 / 1e12)
    assert matmul.best_tflop_per_s == pytest.approx(2 * matmul.tflop_per_s)
    assert copy.gb_per_s == pytest.approx(2 * 2**20 / 2e-3 / 1e9)


@pytest.mark.parametrize(
    ("trial_s", "budget_s", "expected"),
    [
        (0.01, 1.0, Batches(num=5, size=20)),
        (1e-6, 1.0, Batches(num=5, size=500)),
        (0.3, 1.0, Batches(num=3, size=1)),
        (5.0, 1.0, Batches(num=1, size=1)),
        (5.0, -9.0, Batches(num=1, size=1)),
        (0.0, 1.0, Batches(num=5, size=500)),
    ],
)
def test_a_budget_is_spent_in_batches(trial_s: float, budget_s: float, expected: Batches) -> None:
    assert plan_batches(trial_s, budget_s) == expected
