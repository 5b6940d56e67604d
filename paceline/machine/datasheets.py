"""What vendors' data sheets say about a GPU, by its driver's name for it: dense peaks, memory and
links. For plans, `paceline check` and MFU. A GPU that is not listed has no figures; nothing is
guessed.

A matrix product has one of four arithmetics: bf16, fp16, tf32 (fp32 matrices on tensor cores) and
fp32. Peaks are without sparsity and with fp32 sums, as torch multiplies: GeForce cards reach only
half of their advertised fp16 rate that way. Rates of links count one direction.
"""

import re
from dataclasses import dataclass

from paceline.records import Choice, Env

PCIE_3, PCIE_4, PCIE_5 = 16.0, 32.0, 64.0  # GB/s of 16 lanes
FIRST_TF32 = (8, 0)  # compute capability of Ampere
NVIDIA, IMAGES = "https://www.nvidia.com", "https://images.nvidia.com"
V100 = f"{IMAGES}/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
A100 = f"{NVIDIA}/en-us/data-center/a100/"
HOPPER = "https://resources.nvidia.com/en-us-tensor-core (H100 architecture paper)"
BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture (its data sheet)"
GA102 = f"{NVIDIA}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = f"{IMAGES}/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
RTX_50 = f"{IMAGES}/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
A10G = (
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
)
INSTINCT = "https://www.amd.com/en/products/accelerators/instinct"


@dataclass(frozen=True)
class DataSheet:
    """The figures of one GPU; None where its sheet has no such figure."""

    pattern: str
    source: str
    bf16: float | None = None  # TFLOP/s, as the next three
    fp16: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    memory_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None  # of one link; how many there are, the driver says
    pcie_gb_per_s: float | None = None

    def tflops(self, arithmetic: str) -> float | None:
        rates = {"bf16": self.bf16, "fp16": self.fp16, "tf32": self.tf32, "fp32": self.fp32}
        return rates[arithmetic]


# First match wins: a narrower name comes before a wider one. Columns as in the class.
SHEETS: tuple[DataSheet, ...] = (
    DataSheet(r"\bGB200\b", BLACKWELL, 2500, 2500, 1250, 80, 8000, 50, PCIE_5),
    DataSheet(r"\bB200\b", BLACKWELL, 2250, 2250, 1100, 75, 7700, 50, PCIE_5),
    DataSheet(r"\bG?B300\b", f"{NVIDIA}/en-us/data-center/nvlink/", nvlink_gb_per_s=50),
    DataSheet(
        r"\bGH200 144G\b", f"{NVIDIA}/en-us/data-center/grace-hopper-superchip/",
        989.4, 989.4, 494.7, 66.9, 4900, 25, PCIE_5,
    ),
    DataSheet(
        r"\bGH200\b", f"{NVIDIA}/en-us/data-center/grace-hopper-superchip/",
        989.4, 989.4, 494.7, 66.9, 4000, 25, PCIE_5,
    ),
    DataSheet(
        r"\bH200 NVL\b", f"{NVIDIA}/en-us/data-center/h200/",
        835.5, 835.5, 417.5, 60.3, 4800, 25, PCIE_5,
    ),
    DataSheet(
        r"\bH200\b", f"{NVIDIA}/en-us/data-center/h200/",
        989.4, 989.4, 494.7, 66.9, 4800, 25, PCIE_5,
    ),
    DataSheet(
        r"\bH100 NVL\b", f"{NVIDIA}/en-us/data-center/h100/",
        835.5, 835.5, 417.5, 60.3, 3900, 25, PCIE_5,
    ),
    DataSheet(r"\bH100 PCIe\b", HOPPER, 756, 756, 378, 51.2, 2000, 25, PCIE_5),
    DataSheet(r"\bH100 80GB HBM3\b", HOPPER, 989.4, 989.4, 494.7, 66.9, 3350, 25, PCIE_5),
    # Other sizes of H100 and A100 have other clocks and memories, and no sheet that we know.
    DataSheet(r"\bH(100|800|20)\b", f"{NVIDIA}/en-us/data-center/nvlink/", nvlink_gb_per_s=25),
    DataSheet(r"\bA100-SXM4-80GB\b", A100, 312, 312, 156, 19.5, 2039, 25, PCIE_4),
    DataSheet(r"\bA100 80GB PCIe\b", A100, 312, 312, 156, 19.5, 1935, 25, PCIE_4),
    DataSheet(r"\bA100-(SXM4|PCIE)-40GB\b", A100, 312, 312, 156, 19.5, 1555, 25, PCIE_4),
    DataSheet(r"\bA[18]00\b", f"{NVIDIA}/en-us/data-center/nvlink/", nvlink_gb_per_s=25),
    # Volta and Turing have tensor cores for fp16 only.
    DataSheet(r"\bV100S\b", V100, None, 130, None, 16.4, 1134, None, PCIE_3),
    DataSheet(r"\bV100-PCIE\b", V100, None, 112, None, 14, 900, None, PCIE_3),
    DataSheet(r"\bV100-SXM2\b", V100, None, 125, None, 15.7, 900, 25, PCIE_3),
    DataSheet(r"\bV100\b", V100, nvlink_gb_per_s=25),
    DataSheet(
        r"\bT4\b",
        f"{NVIDIA}/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
        None, 65, None, 8.1, 320, None, PCIE_3,
    ),
    DataSheet(
        r"\bA30\b", f"{NVIDIA}/en-us/data-center/products/a30-gpu/",
        165, 165, 82, 10.3, 933, 25, PCIE_4,
    ),
    DataSheet(
        r"\bA40\b", f"{IMAGES}/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
        149.7, 149.7, 74.8, 37.4, 696, 14.0625, PCIE_4,
    ),
    DataSheet(r"\bA10G\b", A10G, 70, 70, 35, 35, 600, None, PCIE_4),
    DataSheet(
        r"\bA10\b", f"{NVIDIA}/en-us/data-center/products/a10-gpu/",
        125, 125, 62.5, 31.2, 600, None, PCIE_4,
    ),
    DataSheet(
        r"\bL40S\b", f"{NVIDIA}/en-us/data-center/l40s/",
        362.05, 362.05, 183, 91.6, 864, None, PCIE_4,
    ),
    DataSheet(
        r"\bL40\b", f"{NVIDIA}/en-us/data-center/l40/",
        181.05, 181.05, 90.5, 90.5, 864, None, PCIE_4,
    ),
    DataSheet(
        r"\bL4\b", f"{NVIDIA}/en-us/data-center/l4/", 121, 121, 60, 30.3, 300, None, PCIE_4,
    ),
    DataSheet(r"\bRTX A6000\b", GA102, 154.8, 154.8, 77.4, 38.7, 768, 14.0625, PCIE_4),
    # GeForce with fp32 sums: 71 of the 142 TFLOP/s advertised with fp16 sums, 165.2 of 330.3,
    # 209.5 of 419.
    DataSheet(r"\bRTX 3090\b(?! Ti)", GA102, 71, 71, 35.6, 35.6, 936, 14.0625, PCIE_4),
    DataSheet(
        r"\bRTX 4090\b(?! (D\b|Laptop))", ADA, 165.2, 165.2, 82.6, 82.6, 1008, None, PCIE_4
    ),
    DataSheet(
        r"\bRTX 5090\b(?! (D\b|Laptop))", RTX_50, 209.5, 209.5, 104.8, 104.8, 1792, None, PCIE_5
    ),
    # torch's device is one of the two dies of an MI250X: half of what its sheet says. fp32 is that
    # of the matrix cores.
    DataSheet(
        r"\bMI250X\b", f"{INSTINCT}/mi200/mi250x.html",
        191.5, 191.5, None, 47.85, 1638.4, None, PCIE_4,
    ),
    DataSheet(
        r"\bMI300X\b", f"{INSTINCT}/mi300/mi300x.html",
        1307.4, 1307.4, 653.7, 163.4, 5300, None, PCIE_5,
    ),
)  # fmt: skip


def find_sheet(gpu_name: str) -> DataSheet | None:
    """Return the sheet of a GPU by its name. A MIG slice carries the whole GPU's name and has a
    part of its rates: it has no sheet."""
    if "MIG" in gpu_name:
        return None
    return next((sheet for sheet in SHEETS if re.search(sheet.pattern, gpu_name)), None)


def choose_arithmetic(env: Env, device: str, precision: str, matmul: str) -> str:
    """Return how matrices are really multiplied where `precision` and `matmul` were chosen."""
    if precision == "fp8":  # MFU counts a mix of both against the lower peak
        return "bf16"
    if precision != "fp32" or matmul == "highest" or device != "cuda" or not env.gpus:
        return precision
    # ROCm takes no notice of it, unless HIPBLASLT_ALLOW_TF32 is set on an MI300.
    major, _, minor = env.gpus[0].compute_capability.partition(".")
    has_tf32 = env.hip is None and (int(major), int(minor or 0)) >= FIRST_TF32
    return "tf32" if has_tf32 else "fp32"


def choose_peak(asked: float | str, env: Env, device: str, arithmetic: str) -> Choice:
    """Choose the peak that MFU divides by: as asked, else by the data sheet of the first GPU."""
    if asked != "auto":
        return Choice(requested=asked, value=asked, because="as asked: observe.peak_flops")
    return find_peak(env.gpus[0].name if device == "cuda" and env.gpus else None, arithmetic)


def find_peak(gpu_name: str | None, arithmetic: str) -> Choice:
    """Return the FLOP/s of one device; value None, and why, where it is not known."""
    hint = "observe.peak_flops states it"
    if gpu_name is None:
        return _peak(None, "a CPU has no stated peak")
    sheet = find_sheet(gpu_name)
    if sheet is None or sheet.fp32 is None:
        because = f"no peak is known for '{gpu_name}', and another GPU's would make MFU"
        return _peak(None, f"{because} meaningless; {hint}")
    rate = sheet.tflops(arithmetic)
    if rate is None:
        return _peak(None, f"the data sheet of '{gpu_name}' has no rate in {arithmetic}; {hint}")
    return _peak(rate * 1e12, f"{gpu_name}: {rate:g} TFLOP/s dense {arithmetic} by its data sheet")


def _peak(value: float | None, because: str) -> Choice:
    return Choice(requested="auto", value=value, because=because)


def expected_copy_gb_per_s(gpu_name: str) -> float | None:
    """Return the memory bandwidth, the ceiling of bytes read and written in a copy: about nine
    tenths of it are reached (an H200 copied 4.3 of 4.8 TB/s)."""
    sheet = find_sheet(gpu_name)
    return sheet.memory_gb_per_s if sheet else None


def expected_link_gb_per_s(kind: str, nvlinks: int, gpu_name: str) -> float | None:
    """Return the rate of one direction between two GPUs. Only NVLink says how wide it is: others
    give None."""
    sheet = find_sheet(gpu_name)
    if kind not in ("nvlink", "nvswitch") or sheet is None or sheet.nvlink_gb_per_s is None:
        return None
    return nvlinks * sheet.nvlink_gb_per_s
