"""What the data sheets promise: memory and NVLink bandwidth by GPU name. Unknown: None, no guess.

A copy reaches about nine tenths of the memory bandwidth (an H200 copied 4.3 of 4.8 TB/s).
"""

import re

# GB/s of memory, by a pattern in the name that the driver gives. First match wins: the narrower
# name stands before the wider one. Data sheets under https://www.nvidia.com/en-us/data-center/
# (h200, h100, a100, v100, a10, a30, a40, l4, l40s, dgx-b200: 64 TB/s for 8), GeForce product pages.
MEMORY_GB_PER_S: tuple[tuple[str, float], ...] = (
    (r"\bB200\b", 8000.0),
    (r"\bGH200 144G\b", 4900.0),
    (r"\bGH200\b", 4000.0),
    (r"\bH200\b", 4800.0),
    (r"\bH100 NVL\b", 3900.0),
    (r"\bH100 PCIe\b", 2000.0),
    (r"\bH100 80GB HBM3\b", 3350.0),
    (r"\bA100-SXM4-80GB\b", 2039.0),
    (r"\bA100 80GB PCIe\b", 1935.0),
    (r"\bA100-(SXM4|PCIE)-40GB\b", 1555.0),
    (r"\bV100S\b", 1134.0),
    (r"\bV100\b", 900.0),
    (r"\bA30\b", 933.0),
    (r"\bA40\b", 696.0),
    (r"\bA10G?\b", 600.0),
    (r"\bL40S?\b", 864.0),
    (r"\bL4\b", 300.0),
    (r"\bT4\b", 320.0),
    (r"\bRTX 4090\b(?! Laptop)", 1008.0),
    (r"\bRTX 3090\b(?! Ti)", 936.0),
)
# GB/s of one NVLink in one direction: generations 2, 3 and 4 have 25, generation 5 has 50, GA102
# chips 14.0625. https://www.nvidia.com/en-us/data-center/nvlink/ and the architecture papers.
NVLINK_GB_PER_S: tuple[tuple[str, float], ...] = (
    (r"\bG?B[23]00\b", 50.0),
    (r"\b(G?H[12]00|H800|H20)\b", 25.0),
    (r"\b(A100|A800|A30)\b", 25.0),
    (r"\bV100S?\b", 25.0),
    (r"\b(A40|RTX A6000|RTX 3090)\b", 14.0625),
    (r"\bP100\b", 20.0),
)


def expected_copy_gb_per_s(gpu_name: str) -> float | None:
    """Memory bandwidth by the data sheet, the ceiling of bytes read and written in a copy."""
    return _find(gpu_name, MEMORY_GB_PER_S)


def expected_link_gb_per_s(kind: str, nvlinks: int, gpu_name: str) -> float | None:
    """One direction between two GPUs. Only NVLink says how wide it is: others give None."""
    per_link = _find(gpu_name, NVLINK_GB_PER_S)
    if kind not in ("nvlink", "nvswitch") or per_link is None:
        return None
    return nvlinks * per_link


def _find(gpu_name: str, table: tuple[tuple[str, float], ...]) -> float | None:
    if "MIG" in gpu_name:  # a slice carries the whole GPU's name
        return None
    return next((rate for pattern, rate in table if re.search(pattern, gpu_name)), None)
