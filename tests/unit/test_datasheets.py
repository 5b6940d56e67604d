"""Data sheets: the right figure for each name and arithmetic, and none where none is known."""

import re

import pytest

from paceline.machine.datasheets import (
    SHEETS,
    choose_arithmetic,
    expected_copy_gb_per_s,
    expected_link_gb_per_s,
    find_peak,
)
from tests.machines import machine as env

# Name as its driver gives it: TFLOP/s in bf16, fp16, tf32, fp32, memory in GB/s.
EXPECTED: dict[str, tuple[float | None, float | None, float | None, float | None, float]] = {
    "Tesla V100-SXM2-16GB": (None, 125, None, 15.7, 900),
    "Tesla V100-SXM2-32GB": (None, 125, None, 15.7, 900),
    "Tesla V100-PCIE-32GB": (None, 112, None, 14, 900),
    "Tesla V100S-PCIE-32GB": (None, 130, None, 16.4, 1134),
    "Tesla T4": (None, 65, None, 8.1, 320),
    "NVIDIA A10": (125, 125, 62.5, 31.2, 600),
    "NVIDIA A10G": (70, 70, 35, 35, 600),
    "NVIDIA L4": (121, 121, 60, 30.3, 300),
    "NVIDIA L40S": (362.05, 362.05, 183, 91.6, 864),
    "NVIDIA GeForce RTX 3090": (71, 71, 35.6, 35.6, 936),
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6, 1008),
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8, 1792),
    "NVIDIA A100-SXM4-40GB": (312, 312, 156, 19.5, 1555),
    "NVIDIA A100-PCIE-40GB": (312, 312, 156, 19.5, 1555),
    "NVIDIA A100-SXM4-80GB": (312, 312, 156, 19.5, 2039),
    "NVIDIA A100 80GB PCIe": (312, 312, 156, 19.5, 1935),
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9, 3350),
    "NVIDIA H100 PCIe": (756, 756, 378, 51.2, 2000),
    "NVIDIA H100 NVL": (835.5, 835.5, 417.5, 60.3, 3900),
    "NVIDIA H200": (989.4, 989.4, 494.7, 66.9, 4800),
    "NVIDIA H200 NVL": (835.5, 835.5, 417.5, 60.3, 4800),
    "NVIDIA GH200 480GB": (989.4, 989.4, 494.7, 66.9, 4000),
    "NVIDIA B200": (2250, 2250, 1100, 75, 7700),
    "NVIDIA GB200": (2500, 2500, 1250, 80, 8000),
    "AMD Instinct MI250X": (191.5, 191.5, None, 47.85, 1638.4),
    "AMD Instinct MI300X": (1307.4, 1307.4, 653.7, 163.4, 5300),
}
UNKNOWN = (
    "NVIDIA Weird 9000",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb",  # a slice has a part of it
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A100-SXM-64GB",  # another chip
)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_name_has_its_own_figures(name: str) -> None:
    *tflops, memory = EXPECTED[name]
    for arithmetic, expected in zip(("bf16", "fp16", "tf32", "fp32"), tflops, strict=True):
        peak = find_peak(name, arithmetic)
        assert peak.value == (None if expected is None else pytest.approx(expected * 1e12))
        assert name in peak.because and arithmetic in peak.because
    assert expected_copy_gb_per_s(name) == memory


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_gpu_has_no_figures(name: str) -> None:
    peak = find_peak(name, "bf16")
    assert peak.value is None and name in peak.because and "observe.peak_flops" in peak.because
    assert expected_copy_gb_per_s(name) is None


def test_the_table_is_sound() -> None:
    for sheet in SHEETS:
        assert sheet.source.startswith("https://") and re.compile(sheet.pattern)
        # Tensor cores: half the rate at most in tf32, and never slower than plain fp32.
        if sheet.fp16 is not None and sheet.fp32 is not None:
            assert (sheet.tf32 or 0) <= 0.51 * sheet.fp16 and sheet.fp32 <= sheet.fp16
        assert sheet.bf16 in (None, sheet.fp16)


@pytest.mark.parametrize(
    ("device", "capability", "precision", "matmul", "expected"),
    [
        ("cuda", "9.0", "bf16", "high", "bf16"),
        ("cuda", "9.0", "fp16", "highest", "fp16"),
        ("cuda", "9.0", "fp32", "high", "tf32"),
        ("cuda", "8.0", "fp32", "medium", "tf32"),
        ("cuda", "9.0", "fp32", "highest", "fp32"),
        ("cuda", "7.0", "fp32", "high", "fp32"),  # Volta has no TF32
        ("cpu", "9.0", "fp32", "high", "fp32"),
    ],
)
def test_how_matrices_are_multiplied(
    device: str, capability: str, precision: str, matmul: str, expected: str
) -> None:
    machine = env(num_gpus=1, capability=capability)
    assert choose_arithmetic(machine, device, precision, matmul) == expected


def test_rocm_multiplies_fp32_as_fp32() -> None:
    machine = env(num_gpus=1).model_copy(update={"hip": "6.4", "cuda": None})
    assert choose_arithmetic(machine, "cuda", "fp32", "high") == "fp32"


@pytest.mark.parametrize(
    ("kind", "nvlinks", "name", "expected"),
    [
        ("nvlink", 6, "Tesla V100-SXM2-16GB", 150),
        ("nvlink", 12, "NVIDIA A100-SXM4-40GB", 300),
        ("nvlink", 18, "NVIDIA H100 80GB HBM3", 450),
        ("nvlink", 8, "NVIDIA H800", 200),
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
