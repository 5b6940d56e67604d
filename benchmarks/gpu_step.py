"""Where a step of one GPU goes: kernels by kind, of a hand-written loop and of our engine.

    python benchmarks/gpu_step.py [--recipe lm_1b] [--steps 20]

Both train the same model on the same tokens, each in a process of its own. A first window of steps
is timed by CUDA events (forward, backward, update), a second one is profiled: milliseconds of
kernels a step by kind, and for products and attention the rate against what they compute.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist
from gpu_throughput import CLIP, DEVICE, Bench, matmul_tflops, mean_loss, one_rank
from torch import nn

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.plan.policy import effective_config
from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from paceline.strategies.clock import DeviceClock
from paceline.train.torch_settings import apply_policy

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


def hand(bench: Bench, losses: list[torch.Tensor] | None = None) -> Step:
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


def profile_steps(step: Step, bench: Bench) -> dict[str, float]:
    """Milliseconds of kernels per step by kind."""
    clock, tokens = DeviceClock(), cycle(bench.batches())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(PROFILED):
            clock.begin(number)
            step(clock, next(tokens))
        torch.cuda.synchronize()
    sums: dict[str, float] = defaultdict(float)
    names: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        kind = next(
            (k for k, marks in KINDS.items() if any(mark in event.key for mark in marks)), "other"
        )
        sums[kind] += event.self_device_time_total / 1e3 / PROFILED
        names[f"  {kind}: {event.key[:90]}"] += event.self_device_time_total / 1e3 / PROFILED
    largest = sorted(names.items(), key=lambda item: -item[1])[:24]
    return dict(sums) | {"all kernels": sum(sums.values())} | dict(largest)


def run_one(name: str, recipe: list[str], steps: int) -> None:
    torch.set_float32_matmul_precision("high")
    bench = Bench(load_job(recipe[0], recipe[1:]), WARMUP)
    with one_rank():
        step = CONTENDERS[name](bench)
        found = {"timed": time_steps(step, bench, steps), "kernels": profile_steps(step, bench)}
        print(json.dumps(found))
        sys.stdout.flush()
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", nargs="+", default=["lm_1b"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return run_one(arguments.one, arguments.recipe, arguments.steps)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for number in range(arguments.rounds):
        print(f"round {number + 1}: matmul {matmul_tflops():.0f} TFLOP/s", flush=True)
        torch.cuda.empty_cache()
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--one", name, "--steps", str(arguments.steps)]
            done = subprocess.run(
                [*command, "--recipe", *arguments.recipe], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr[-4000:])
            found = json.loads(done.stdout.splitlines()[-1])
            for title, figures in found.items():
                print(f"{name}, {title}, ms a step:")
                for key, value in figures.items():
                    if number == 0 or not key.startswith("  "):
                        print(f"  {key:<24} {value:8.2f}", flush=True)


if __name__ == "__main__":
    main()
