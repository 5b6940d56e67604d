"""One GPU: settings of one recipe side by side, each through our engine: time, memory, losses.

    python benchmarks/gpu_variants.py lm_1b --variant train.kernels=torch
        --variant precision.mode=fp8 [--steps 12] [--profile] [--common KEY=VALUE ...]

Each variant is `KEY=VALUE,KEY=VALUE`, or begins with `hand`: the hand-written loop of
gpu_loops.py, which reads `attention.impl` alone (`hand,attention.impl=sdpa`; one at most, as a
second one would get the first one's graph). They run one after the other in this process, each on
an empty device: milliseconds a step (median, by CUDA events), tokens/s, MFU against the bf16 peak,
the peak of allocated memory, seconds until the first step has ended, and the losses of some steps,
which must agree within the noise of the number format. One that runs out of memory says so.

With --rounds all are built first and stay in memory (only one has activations at a time); then each
takes --steps steps in turn, so often: the same heat and the same clocks for all, and a ratio to the
first one for every round.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from itertools import cycle

import torch
from gpu_loops import DEVICE, PEAK_FLOPS, Bench, matmul_tflops, one_rank
from gpu_step import Step, hand, ours, profile_steps, sum_kinds

from paceline.job import load_job
from paceline.strategies.clock import DeviceClock

WARMUP = 4
GIB = 2**30


def read_variant(variant: str) -> tuple[bool, list[str]]:
    """Return whether it is the loop by hand, and its keys."""
    first, *rest = variant.split(",")
    return (True, rest) if first == "hand" else (False, [first, *rest])


def measure(recipe: str, overrides: list[str], is_hand: bool, steps: int, profiles: bool) -> str:
    job = load_job(recipe, overrides)
    bench = Bench(job, WARMUP + steps)
    started_at = time.perf_counter()
    losses: list[torch.Tensor] = []
    step: Step = hand(bench, losses) if is_hand else ours(bench, losses)
    tokens = cycle(bench.batches())
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(WARMUP + steps)]
    first_s = 0.0
    clock = DeviceClock()
    for number, end in enumerate(ends):
        clock.begin(number)
        step(clock, next(tokens))
        end.record()
        if number == 0:
            torch.cuda.synchronize()
            first_s = time.perf_counter() - started_at
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)]
    milliseconds = statistics.median(times)
    rate = bench.micro * bench.seq_len / milliseconds * 1e3
    flops = job.workload.flops(job.config) / job.config.data.seq_len
    shown = " ".join(f"{float(loss):.4f}" for loss in losses[:: max(1, len(losses) // 6)])
    peak = torch.cuda.max_memory_allocated() / GIB
    text = (
        f"{milliseconds:8.2f} ms  {rate:>9,.0f} tokens/s  MFU {rate * flops / PEAK_FLOPS:6.1%}"
        f"  {peak:6.1f} GiB  first step {first_s:5.1f} s  losses {shown}"
    )
    if profiles:
        kernels = profile_steps(step, bench)
        rows = [*sum_kinds(kernels).items()]
        rows += [(f"  {k.kind}: {k.name[:90]}", k.milliseconds) for k in kernels[:24]]
        text += "".join(f"\n      {kind:<70} {ms:8.2f}" for kind, ms in rows)
    return text


def race(recipe: str, common: list[str], variants: list[str], steps: int, rounds: int) -> None:
    """Take turns of `steps` steps each, and print the time of a step in every turn."""
    contenders: dict[str, tuple[Bench, Step, Iterator[torch.Tensor]]] = {}
    losses: dict[str, list[torch.Tensor]] = {variant: [] for variant in variants}
    for variant in variants:
        is_hand, keys = read_variant(variant)
        job = load_job(recipe, [*common, *keys])
        bench = Bench(job, WARMUP + steps)
        step = (hand if is_hand else ours)(bench, losses[variant])
        contenders[variant] = (bench, step, cycle(bench.batches()))
        seconds = -time.perf_counter()
        take_turn(*contenders[variant], WARMUP)
        print(f"  {variant}: {seconds + time.perf_counter():.0f} s to compile", flush=True)
    flops = job.workload.flops(job.config) / job.config.data.seq_len
    tokens = bench.micro * bench.seq_len
    for number in range(rounds):
        first = 0.0
        for variant, contender in contenders.items():
            milliseconds = take_turn(*contender, steps)
            first = first or milliseconds
            rate = tokens / milliseconds * 1e3
            ratio, mfu = first / milliseconds, rate * flops / PEAK_FLOPS
            told = f"{milliseconds:8.2f} ms  {rate:>9,.0f} tokens/s  MFU {mfu:6.1%}  {ratio:.3f}x"
            print(f"  round {number + 1}  {variant:<32} {told}", flush=True)
    for variant, found in losses.items():
        shown = " ".join(f"{float(loss):.4f}" for loss in found[:: max(1, len(found) // 8)])
        print(f"  losses {variant:<32} {shown}", flush=True)


def take_turn(bench: Bench, step: Step, tokens: Iterator[torch.Tensor], steps: int) -> float:
    """Return the milliseconds of a step, the mean of all but the first."""
    bench.choose_attention()  # it is the process's, and the one before may have another
    clock = DeviceClock()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]
    for number, end in enumerate(ends):
        clock.begin(number)
        step(clock, next(tokens))
        end.record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[-1]) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--variant", action="append", required=True)
    parser.add_argument("--common", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    arguments = parser.parse_args()
    if sum(read_variant(variant)[0] for variant in arguments.variant) > 1:
        parser.error("one hand-written loop at most: a second one would get the first one's graph")
    torch.set_float32_matmul_precision("high")
    shown = " ".join([arguments.recipe, *arguments.common])
    print(
        f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, torch {torch.__version__},"
        f" matmul {matmul_tflops():.0f} TFLOP/s: {shown}",
        flush=True,
    )
    with one_rank():
        if arguments.rounds:
            turns = (arguments.steps, arguments.rounds)
            return race(arguments.recipe, arguments.common, arguments.variant, *turns)
        for variant in arguments.variant:
            is_hand, keys = read_variant(variant)
            overrides = [*arguments.common, *keys]
            try:
                text = measure(
                    arguments.recipe, overrides, is_hand, arguments.steps, arguments.profile
                )
            except torch.OutOfMemoryError as error:
                text = f"out of memory: {str(error).splitlines()[0][:120]}"
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"  {variant:<60} {text}", flush=True)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(DEVICE)


if __name__ == "__main__":
    main()
