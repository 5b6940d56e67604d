"""Measures one device: matrix products by precision and memory copies. Work that may run
asynchronously is timed in batches between two synchronisations.

`measure_rates(device)` needs no process group. Ranks that share a CPU share its memory: called by
all of them at once, it says what each gets while the others work too.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from paceline.machine.measures import CopyRate, MatmulRate, Rate

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
CPU_SIDE, GPU_SIDES = 1024, (8192, 4096, 2048, 1024)
CPU_COPY_BYTES, GPU_COPY_BYTES = 2**28, 2**30  # beyond caches
BUDGET_S = 0.6  # for each figure
WARM_UPS = 2
NUM_BATCHES = 5
MAX_PER_BATCH = 500
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def measure_rates(device: torch.device) -> list[Rate]:
    """Measure the matmul rate in each precision the device has, then the copy rate: 2 s on CPU,
    4 s on a GPU."""
    side = _pick_side(device)
    matmuls = [_measure_matmul(precision, side, device) for precision in _precisions(device)]
    rates: list[Rate] = [*matmuls, _measure_copy(_pick_copy_bytes(device), device)]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what follows on this GPU gets its memory back
    return rates


def _precisions(device: torch.device) -> list[Precision]:
    if device.type == "cpu":
        # Where AMX is announced but traps, a bf16 product kills the process.
        return ["fp32"]
    ampere = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    found: list[tuple[Precision, bool]] = [
        ("fp32", True),
        ("tf32", ampere),
        ("bf16", bf16),
        ("fp16", True),
    ]
    return [precision for precision, there in found if there]


def _measure_matmul(precision: Precision, side: int, device: torch.device) -> MatmulRate:
    # Random, not zeros: a GPU draws less power on zeros, clocks higher and flatters itself.
    a, b = (torch.randn(side, side, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(a)
    with _fp32_products("tf32" if precision == "tf32" else "ieee", device):
        times_s = _time(lambda: torch.matmul(a, b, out=out), device)
    tflop = 2 * side**3 / 1e12
    return MatmulRate(
        precision=precision,
        side=side,
        tflop_per_s=tflop / statistics.median(times_s),
        best_tflop_per_s=tflop / min(times_s),
    )


def _measure_copy(num_bytes: int, device: torch.device) -> CopyRate:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times_s = _time(lambda: target.copy_(source), device)
    moved_gb = 2 * source.nbytes / 1e9
    return CopyRate(
        num_bytes=source.nbytes,
        gb_per_s=moved_gb / statistics.median(times_s),
        best_gb_per_s=moved_gb / min(times_s),
    )


def _time(run: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of one run, by batch, after a warm-up; about `BUDGET_S` in all."""
    for _ in range(WARM_UPS):
        run()
    trial_s = time_batch(run, 1, device)
    batches = plan_batches(trial_s, BUDGET_S - trial_s)
    return [time_batch(run, batches.size, device) for _ in range(batches.num)]


@contextmanager
def _fp32_products(mode: str, device: torch.device) -> Iterator[None]:
    """Let cuBLAS multiply fp32 exactly ("ieee") or by tensor cores ("tf32"); then as before."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = mode
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _pick_side(device: torch.device) -> int:
    """Return the side of the largest matrices whose three fp32 copies take at most a quarter of
    the free memory."""
    if device.type == "cpu":
        return CPU_SIDE
    fitting = [side for side in GPU_SIDES if 3 * 4 * side**2 <= _free_bytes(device) // 4]
    return fitting[0] if fitting else GPU_SIDES[-1]


def _pick_copy_bytes(device: torch.device) -> int:
    wanted = CPU_COPY_BYTES if device.type == "cpu" else GPU_COPY_BYTES
    return min(wanted, _free_bytes(device) // 16)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class Batches:
    """How often to time something: `num` batches of `size` runs."""

    num: int
    size: int


def plan_batches(trial_s: float, budget_s: float) -> Batches:
    """Return as many runs of `trial_s` as the budget holds, in five batches; at least one run."""
    affordable = int(budget_s / max(trial_s, 1e-9))
    if affordable < NUM_BATCHES:
        return Batches(num=max(affordable, 1), size=1)
    return Batches(num=NUM_BATCHES, size=min(affordable // NUM_BATCHES, MAX_PER_BATCH))


def time_batch(run: Callable[[], object], size: int, device: torch.device) -> float:
    """Return the seconds of one run, averaged over `size` runs back to back, until the device
    has ended them."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(size):
        run()
    synchronise(device)
    return (time.perf_counter() - started) / size


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
