"""Dense peak rates of GPUs, from the vendors' data sheets, for MFU. An unknown GPU has no peak.

TFLOP/s without sparsity, as (pattern in the device's name, bf16 tensor cores, fp32).
https://www.nvidia.com/en-us/data-center/h200/ and the sheets beside it.
"""

import re

from paceline.records import Choice

# First match wins: the narrower name stands before the wider one.
PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"\bB200\b", 2250.0, 75.0),
    (r"\bGH200\b", 989.4, 66.9),
    (r"\bH200 NVL\b", 835.5, 60.3),
    (r"\bH200\b", 989.4, 66.9),
    (r"\bH100 NVL\b", 835.5, 60.3),
    (r"\bH100 PCIe\b", 756.0, 51.2),
    (r"\bH100\b", 989.4, 66.9),
    (r"\bA100\b", 312.0, 19.5),
    (r"\bA10G\b", 70.0, 35.0),
    (r"\bA10\b", 125.0, 31.2),
    (r"\bL40S\b", 362.0, 91.6),
    (r"\bL4\b", 121.0, 30.3),
)


def peak_flops(gpu_name: str | None, precision: str) -> Choice:
    """FLOP/s of one device in `precision`; value None, and why, where it is not known."""
    if gpu_name is None:
        return Choice(requested="auto", value=None, because="a CPU has no stated peak")
    # A MIG slice carries the whole GPU's name and has a part of its rate.
    known = () if "MIG" in gpu_name else PEAKS
    for pattern, bf16, fp32 in known:
        if re.search(pattern, gpu_name):
            rate = bf16 if precision == "bf16" else fp32
            return Choice(
                requested="auto",
                value=rate * 1e12,
                because=f"{gpu_name}: {rate:g} TFLOP/s dense {precision} by its data sheet",
            )
    return Choice(
        requested="auto",
        value=None,
        because=f"no peak is known for '{gpu_name}'; another GPU's would make MFU meaningless",
    )
