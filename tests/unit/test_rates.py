"""Rates of this CPU, what data sheets promise of GPUs, and how much is timed."""

import pytest
import torch

from paceline.check import rates
from paceline.check.timer import Batches, plan_batches
from paceline.machine.expectations import expected_copy_gb_per_s, expected_link_gb_per_s
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA B200", 8000),
        ("NVIDIA H200", 4800),
        ("NVIDIA H200 NVL", 4800),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA H100 NVL", 3900),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("Tesla V100-SXM2-32GB", 900),
        ("Tesla V100S-PCIE-32GB", 1134),
        ("NVIDIA L40S", 864),
        ("NVIDIA L4", 300),
        ("NVIDIA A10G", 600),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Some GPU of 2031", None),
    ],
)
def test_memory_bandwidth_by_name(name: str, expected: float | None) -> None:
    assert expected_copy_gb_per_s(name) == expected


@pytest.mark.parametrize(
    ("kind", "nvlinks", "name", "expected"),
    [
        ("nvlink", 6, "Tesla V100-SXM2-16GB", 150),
        ("nvlink", 12, "NVIDIA A100-SXM4-40GB", 300),
        ("nvlink", 18, "NVIDIA H100 80GB HBM3", 450),
        ("nvlink", 18, "NVIDIA B200", 900),
        ("nvlink", 4, "NVIDIA GeForce RTX 3090", 56.25),
        ("nvlink", 4, "Some GPU of 2031", None),
        ("pcie_switch", 0, "NVIDIA H100 PCIe", None),
    ],
)
def test_nvlink_bandwidth_by_name(
    kind: str, nvlinks: int, name: str, expected: float | None
) -> None:
    assert expected_link_gb_per_s(kind, nvlinks, name) == expected
