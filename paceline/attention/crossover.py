"""From which length on native sparse attention is faster than dense attention on this GPU.

    python -m paceline.attention.crossover '{"num_heads": 64, "num_groups": 4, "head_dim": 128}'

It is measured once for a GPU and a shape, forward and backward together, against the best of
torch's own kernels, in a process of its own, so that the planning process holds no device. The
result is kept in the user's cache folder. Shorter sequences then use dense attention: nsa is used
only where it was measured to win.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.attention.sizes import Sizes
from paceline.errors import DataError
from paceline.records import Env, Part, Record
from paceline.records.files import cache_folder, fingerprint

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
TIMEOUT_S = 300.0
SOURCES = Path(__file__).parent  # of the code that is measured


@dataclass(frozen=True)
class Shape:
    """What the time of attention depends on, beside the length."""

    num_heads: int
    num_groups: int
    head_dim: int
    sizes: Sizes = field(default_factory=Sizes)


class Timed(Part):
    """Forward and backward of one sequence in bf16, median."""

    length: int
    dense_ms: float
    nsa_ms: float
    dense_kernel: str


class Crossover(Record):
    """What was measured, and the length from which on nsa was faster; None if it never was."""

    measured_at: float
    torch_version: str
    timed: list[Timed]
    length: int | None = Field(description="In tokens.")


def find_crossover(env: Env, shape: Shape) -> Crossover | str:
    """Return the kept result for this hardware and shape; measure it if there is none. A text says
    why it could not be measured."""
    path = kept_path(env, shape)
    try:
        return Crossover.load(path)
    except DataError:  # never measured
        pass
    found = _measure_apart(shape)
    if isinstance(found, Crossover):
        with suppress(OSError):  # it is measured again, where nothing can be kept
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
    return found


def kept_path(env: Env, shape: Shape) -> Path:
    """Return where the result for a kind of GPU, a version of torch, these kernels and a shape is
    kept."""
    sizes = json.dumps(asdict(shape), sort_keys=True)
    code = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.py"))]
    named = fingerprint(*sorted({gpu.name for gpu in env.gpus}), env.torch, sizes, *code)
    return cache_folder("nsa") / f"{named}.json"


def _measure_apart(shape: Shape) -> Crossover | str:
    command = [sys.executable, "-m", "paceline.attention.crossover", json.dumps(asdict(shape))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"measuring took more than {TIMEOUT_S:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Crossover.model_validate_json(done.stdout)


def judge(timed: list[Timed]) -> int | None:
    """Return the first length from which on nsa was faster at all lengths that were measured."""
    best = None
    for row in sorted(timed, key=lambda row: row.length, reverse=True):
        if row.nsa_ms > row.dense_ms:
            break
        best = row.length
    return best


def measure(shape: Shape, lengths: tuple[int, ...] = LENGTHS) -> Crossover:
    """Measure both at each length until nsa has won at two: beyond, it only wins by more."""
    import torch

    timed: list[Timed] = []
    for length in lengths:
        timed.append(time_both(shape, length))
        if len(timed) > 1 and all(row.nsa_ms <= row.dense_ms for row in timed[-2:]):
            break
    return Crossover(
        measured_at=time.time(),
        torch_version=torch.__version__,
        timed=timed,
        length=judge(timed),
    )


def time_both(shape: Shape, length: int) -> Timed:
    """Time dense and sparse attention at one length, each as it would be called in a layer."""
    by_kernel = {}
    for kernel in ("cudnn", "flash"):
        try:
            by_kernel[kernel] = median_ms(dense_step(shape, length, kernel))
        except RuntimeError:  # this GPU, or this torch, has no such kernel
            continue
    if not by_kernel:
        raise RuntimeError("neither cuDNN's nor the flash kernel of SDPA runs here")
    best = min(by_kernel, key=lambda kernel: by_kernel[kernel])
    nsa_ms = median_ms(sparse_step(shape, length))
    return Timed(length=length, dense_ms=by_kernel[best], nsa_ms=nsa_ms, dense_kernel=best)


def _random(shape: Shape, length: int, num_heads: int) -> Any:
    import torch

    size = (1, length, num_heads, shape.head_dim)
    return torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def dense_step(shape: Shape, length: int, kernel: str) -> Callable[[], None]:
    """Return a forward and backward pass of SDPA, causal, by one of its kernels."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[kernel]
    q = _random(shape, length, shape.num_heads)
    k, v = (_random(shape, length, shape.num_groups) for _ in range(2))
    grad = torch.randn_like(q)

    def step() -> None:
        with sdpa_kernel(backend):
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            out = F.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True
            )
        torch.autograd.grad(out, (q, k, v), grad.transpose(1, 2))

    return step


def sparse_step(shape: Shape, length: int) -> Callable[[], None]:
    """Return a forward and backward pass of all of nsa except its projections: compression, choice,
    three branches and their sum by gates."""
    import torch

    from paceline.attention.nsa import Keys, Settings, attend
    from paceline.attention.plain import mean_blocks

    settings = Settings(shape.sizes)
    q = _random(shape, length, shape.num_heads)
    kv = [_random(shape, length, shape.num_groups) for _ in range(6)]
    gates = torch.rand(
        1, length, shape.num_heads, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    grad = torch.randn_like(q)

    def step() -> None:
        compressed = [mean_blocks(x, shape.sizes) for x in kv[:2]]
        out = attend(q, Keys(*compressed, *kv[2:]), gates, None, settings).out
        torch.autograd.grad(out, (q, *kv, gates), grad)

    return step


def median_ms(step: Callable[[], None], num_warm: int = 2, num_timed: int = 7) -> float:
    """Return the median time of a step on the device, in milliseconds."""
    import torch

    for _ in range(num_warm):
        step()
    new_mark: Any = torch.cuda.Event
    marks = [new_mark(enable_timing=True) for _ in range(num_timed + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
    return float(times[num_timed // 2])


def main() -> None:
    asked = json.loads(sys.argv[1])
    shape = Shape(**{**asked, "sizes": Sizes(**asked.get("sizes", {}))})
    print(measure(shape).model_dump_json())


if __name__ == "__main__":
    main()
