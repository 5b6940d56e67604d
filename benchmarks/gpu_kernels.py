"""Kernels of ours alone on one GPU: bytes that each must move over its time, beside torch's own.

    python benchmarks/gpu_kernels.py

The shapes are those of a step of lm_1b: 32768 tokens, width 2048, 16 heads, SwiGLU 5504; the loss
is that of 8192 tokens over a vocabulary of 128256 at width 4096. That they are right is
tests/unit/test_kernels.py, which runs on a GPU too.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from paceline.kernels.adamw import Rates, update_weight
from paceline.kernels.cross_entropy import chunked_loss
from paceline.kernels.products import sum_outer
from paceline.kernels.rope import turn, turn_back
from paceline.kernels.swiglu import activate, activate_back

B, T, H, E, D, FFN = 16, 2048, 16, 128, 2048, 5504
VOCABULARY, TOKENS, WIDE = 128256, 8192, 4096
CHUNKS = (2048, 4096, 8192)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def show(name: str, run: Callable[[], object], num_bytes: int) -> None:
    taken = milliseconds(run)
    print(f"{name:<34} {taken:8.3f} ms  {num_bytes / taken / 1e9:6.2f} TB/s", flush=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def time_layers() -> None:
    qkv, table = random(B, T, 3 * H * E), random(T, E, dtype=torch.float32)
    q, k = turn(qkv, table, table, H, H)
    show("RoPE forward", lambda: turn(qkv, table, table, H, H), 4 * q.nbytes)
    show("RoPE backward", lambda: turn_back(q, k, q, table, table), 6 * q.nbytes)
    gate_up = random(B * T, 2 * FFN)
    hidden = activate(gate_up)
    show("SwiGLU forward", lambda: activate(gate_up), 3 * hidden.nbytes)
    show("SwiGLU backward", lambda: activate_back(gate_up, hidden), 5 * hidden.nbytes)


def time_gradients() -> None:
    for rows, columns in ((3 * D, D), (D, D), (2 * FFN, D), (D, FFN), (32000, D)):
        g, x = random(B * T, rows), random(B * T, columns)
        cast = milliseconds(lambda g=g, x=x: (g.t() @ x).float())
        once = milliseconds(lambda g=g, x=x: sum_outer(g, x))
        print(f"gradient {rows} x {columns}: {cast:.3f} ms by bf16 and a cast, {once:.3f} at once")


def time_update() -> None:
    weight = torch.nn.Parameter(random(2 * FFN * D, dtype=torch.float32))
    state = (weight.data, torch.randn_like(weight), *(torch.zeros_like(weight) for _ in range(2)))
    one, no = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    rates = Rates(1e-3, 0.9, 0.95, 1e-8, 0.1)
    show("AdamW", lambda: update_weight(state, (one, one, no), rates), 7 * weight.nbytes)
    torchs = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.randn_like(weight)
    torchs.found_inf, torchs.grad_scale = no, one  # type: ignore[attr-defined]
    show("torch's fused, which divides", torchs.step, 8 * weight.nbytes)


def time_loss() -> None:
    x = random(TOKENS, WIDE).requires_grad_()
    head = (random(VOCABULARY, WIDE, dtype=torch.float32) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")

    @torch.compile
    def plain() -> torch.Tensor:
        logits = F.linear(x, head.to(x.dtype)).float()
        return F.cross_entropy(logits, targets, reduction="sum")

    ways = {"compiled, whole": plain}
    ways |= {f"chunks of {c}": lambda c=c: chunked_loss(x, head, targets, c) for c in CHUNKS}
    for name, loss in ways.items():

        def step(loss: Callable[[], torch.Tensor] = loss) -> None:
            x.grad = head.grad = None
            loss().backward()

        step()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken = milliseconds(step, 5)
        more = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"head and loss, {name:<20} {taken:8.2f} ms, {more:5.2f} GiB more", flush=True)


def main() -> None:
    name = torch.cuda.get_device_name()
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}", flush=True)
    for part in (time_layers, time_gradients, time_update, time_loss):
        part()


if __name__ == "__main__":
    main()
