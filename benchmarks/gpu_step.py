"""Where a step of one GPU goes: kernels by kind, of a hand-written loop and of our engine.

    python benchmarks/gpu_step.py [--recipe lm_1b] [--steps 20]

Both train the same model on the same tokens, each in a process of its own. A first window of steps
is timed by CUDA events (forward, backward, update), a second one is profiled: milliseconds of
kernels a step by kind, each beside its limit. That of products and attention is what they compute,
at the rate of an 8192^3 product that was measured just before; that of all else is the bytes which
it has to move, at the rate of a large copy. What the compiler's kernels have to move is its own
count.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from gpu_loops import CLIP, DEVICE, Bench, matmul_tflops, mean_loss, one_rank
from torch import nn

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.plan.policy import effective_config
from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from paceline.strategies.clock import DeviceClock
from paceline.train.torch_settings import apply_policy
from paceline.workloads.lm.model import flops_per_token

WARMUP = 8
PROFILED = 3
# The first kind whose mark is part of a kernel's name.
KINDS = {
    "attention": ("cudnn_generated", "flash", "fmha", "sdpa", "cudnn"),
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas"),
    "optimizer": ("_adamw", "multi_tensor", "FusedAdam", "lpnorm", "LpNorm"),
    "copies": ("Memcpy", "Memset"),
    "our kernels": ("_swiglu_", "_rope_", "_token_losses"),
    "compiled elementwise": ("triton",),
}
Step = Callable[[DeviceClock, torch.Tensor], None]


class Kernel(NamedTuple):
    kind: str
    name: str
    milliseconds: float  # a step
    calls: float  # a step


def hand(bench: Bench, losses: list[torch.Tensor] | None = None) -> Step:
    bench.choose_attention()
    bench.fill(bench.model)
    bench.model.compile(dynamic=False)
    model, optimizer = bench.model, bench.optimizer(bench.model)
    parameters = list(model.parameters())

    def step(clock: DeviceClock, tokens: torch.Tensor) -> None:
        tokens = tokens.to(DEVICE, non_blocking=True)
        clock.enter("forward")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = mean_loss(model, tokens)
        if losses is not None:
            losses.append(loss.detach())
        clock.enter("backward")
        loss.backward()
        clock.enter("optimizer")
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(bench: Bench, losses: list[torch.Tensor] | None = None) -> Step:
    plan = make_plan(bench.job, probe())
    apply_policy(plan)
    config = effective_config(bench.job.config, plan.attention.value, plan.kernels.value)
    parts = EngineParts(config, plan, bench.job.workload, DEVICE)
    engine = find_strategy(plan.strategy.value).build(parts)
    scale = 1 / (bench.micro * bench.seq_len)

    def step(clock: DeviceClock, tokens: torch.Tensor) -> None:
        batch = {"tokens": tokens.to(DEVICE, non_blocking=True)}
        totals = engine.forward_backward([batch], scale, clock)
        if losses is not None:
            losses.append(totals.loss_sum * scale)
        engine.step(config.optim.lr, clock)

    return step


CONTENDERS: dict[str, Callable[[Bench], Step]] = {"hand": hand, "paceline": ours}


def time_steps(step: Step, bench: Bench, steps: int) -> dict[str, float]:
    """Median milliseconds of each phase, and of the whole step by the device's clock."""
    clock, tokens = DeviceClock(), cycle(bench.batches())
    for number in range(WARMUP + steps):
        clock.begin(number)
        step(clock, next(tokens))
    clock.pause("end")
    rows = [row for row in clock.finished(wait=True) if row.step >= WARMUP]
    medians = {
        phase: 1e3 * sorted(row.phases_s[phase] for row in rows)[len(rows) // 2]
        for phase in ("forward", "backward", "optimizer")
    }
    return medians | {"step": 1e3 * sum(row.wall_s for row in rows) / len(rows)}


def profile_steps(step: Step, bench: Bench) -> list[Kernel]:
    """All kernels of a step, the longest first."""
    clock, tokens = DeviceClock(), cycle(bench.batches())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(PROFILED):
            clock.begin(number)
            step(clock, next(tokens))
        torch.cuda.synchronize()
    found = [
        Kernel(kind_of(e.key), e.key, e.self_device_time_total / 1e3 / PROFILED, e.count / PROFILED)
        for e in profile.key_averages()
    ]
    return sorted(found, key=lambda kernel: -kernel.milliseconds)


def kind_of(name: str) -> str:
    kinds = (kind for kind, marks in KINDS.items() if any(mark in name for mark in marks))
    return next(kinds, "other")


def sum_kinds(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds a step by kind, and of all kernels together."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.kind] += kernel.milliseconds
    return {**sums, "all kernels": sum(sums.values())}


def find_limits(
    bench: Bench, kernels: list[Kernel], flops_s: float, bytes_s: float
) -> dict[str, float]:
    """Milliseconds that each kind would take at these rates of products and of memory."""
    model: Any = bench.job.config.model
    tokens = bench.micro * bench.seq_len
    attention = 6 * model.num_layers * model.dim * bench.seq_len  # of a token, causal
    products = flops_per_token(model, bench.seq_len) - attention
    moved = {"optimizer": 32.0 * sum(p.numel() for p in bench.model.parameters())}
    for kind, found in (("our kernels", our_bytes(bench)), ("compiled elementwise", compiled())):
        moved[kind] = sum(k.calls * found[k.name] for k in kernels if k.name in found)
    limits = {"products": tokens * products / flops_s, "attention": tokens * attention / flops_s}
    limits |= {kind: count / bytes_s for kind, count in moved.items()}
    return {kind: 1e3 * seconds for kind, seconds in limits.items() if seconds}


def our_bytes(bench: Bench) -> dict[str, float]:
    """What one call of each of our kernels has to read and write, in bf16."""
    model: Any = bench.job.config.model
    tokens, kv = bench.micro * bench.seq_len, model.num_kv_heads * model.head_dim
    return {
        "_swiglu_forward": 2.0 * tokens * 3 * model.hidden_dim,
        "_swiglu_backward": 2.0 * tokens * 5 * model.hidden_dim,
        "_rope_forward": 2.0 * tokens * 2 * (model.dim + kv),
        "_rope_backward": 2.0 * tokens * 2 * (model.dim + 2 * kv),
    }


def compiled() -> dict[str, float]:
    """What one call of each kernel of the compiler has to read and write, as it counts."""
    from torch._inductor.codecache import PyCodeCache

    found = {}
    for module in PyCodeCache.modules:
        for name, value in vars(module).items():
            meta = getattr(value, "inductor_meta", None)
            if isinstance(meta, dict) and "kernel_num_gb" in meta:
                found[name] = 1e9 * meta["kernel_num_gb"]
    return found


def copy_rate(size: int = 2**32, repeats: int = 10) -> float:
    """Bytes a second that a copy reads and writes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * size * repeats / (start.elapsed_time(end) / 1e3)


def run_one(name: str, recipe: list[str], steps: int) -> None:
    torch.set_float32_matmul_precision("high")
    inductor_config.benchmark_kernel = True  # what each kernel moves is then kept beside it
    bench = Bench(load_job(recipe[0], recipe[1:]), WARMUP)
    rates = 1e12 * matmul_tflops(), copy_rate()
    torch.cuda.empty_cache()
    with one_rank():
        step = CONTENDERS[name](bench)
        timed, kernels = time_steps(step, bench, steps), profile_steps(step, bench)
        limits = find_limits(bench, kernels, *rates)
        print(json.dumps([rates, timed, kernels, limits]))
        sys.stdout.flush()
        dist.barrier()


def show(name: str, found: list[Any], num_single: int) -> None:
    (flops_s, bytes_s), timed, rows, limits = found
    kernels = [Kernel(*row) for row in rows]
    print(f"{name}: matmul {flops_s / 1e12:.0f} TFLOP/s, copy {bytes_s / 1e12:.2f} TB/s; ms a step")
    for phase, milliseconds in timed.items():
        print(f"  {phase:<24} {milliseconds:8.2f}")
    print(f"  {'kernels by kind':<24} {'took':>8} {'limit':>8}")
    for kind, milliseconds in sorted(sum_kinds(kernels).items(), key=lambda item: -item[1]):
        limit = f"{limits[kind]:8.2f} {limits[kind] / milliseconds:7.1%}" if kind in limits else ""
        print(f"  {kind:<24} {milliseconds:8.2f} {limit}")
    for kernel in kernels[:num_single]:
        shown = f"{kernel.milliseconds:8.2f} {kernel.calls:6.0f} x {kernel.name[:90]}"
        print(f"    {kernel.kind:<22} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", nargs="+", default=["lm_1b"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run_one(arguments.one, arguments.recipe, arguments.steps)
    told = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{time.strftime('%Y-%m-%d')}, {told}: {' '.join(arguments.recipe)}", flush=True)
    for number in range(arguments.rounds):
        print(f"round {number + 1}", flush=True)
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
            done = subprocess.run(
                [*command, "--recipe", *arguments.recipe], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr[-4000:])
            show(name, json.loads(done.stdout.splitlines()[-1]), 0 if number else 24)


if __name__ == "__main__":
    main()
