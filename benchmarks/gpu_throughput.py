"""One GPU: `paceline train` against a hand-written loop, Accelerate, Lightning and HF Trainer.

    python benchmarks/gpu_throughput.py [--recipe lm_1b] [--steps 30] [--rounds 2] [--only NAME ...]

All train the same model on the same tokens: bf16 over fp32 master weights, fused AdamW, clipping,
compiled (the peers and the hand loop as one graph, the loss inside it), with the same attention:
FlashAttention 3 where our plan chooses it, else torch's choice; `--recipe lm_1b
attention.impl=sdpa` is that in any case. They run one after the other, in an order that turns every
round; the best round counts. The peers share this process, the weights and the optimizer, each with
a module and a compiled graph of its own, which it keeps from round to round; we are `paceline
train`, in a process of its own. `fsdp` is a bare fully_shard loop on one rank and `ddp` a bare
DistributedDataParallel one, in processes of their own, which `paceline zero3` and `paceline` are
held against. Prints tokens/s, MFU, the share of the rate of an 8192^3 bf16 product measured at the
start of each round, and the ratios.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu_loops import APART, LOOPS, ON_GPU, PEAK_FLOPS, WARMUP, Bench, Turn, matmul_tflops

from paceline.job import load_job
from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps

OURS = {
    "paceline": ["strategy.name=ddp"],
    "paceline zero3": ["strategy.name=zero3"],
}
# The peers' rate from the first step on, so that all train alike.
RATE = ["optim.schedule.name=constant", "optim.schedule.warmup_steps=0"]
PEERS = ("hand", "accelerate", "lightning", "hf trainer")
AGAINST = {
    "paceline": (*PEERS, "ddp"),
    "paceline zero3": ("fsdp",),
}


def run_ours(asked: list[str], arguments: argparse.Namespace, bench: Bench) -> float:
    """The rate of the same steps as a peer's: all after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "train", *arguments.recipe,
             f"train.steps={arguments.steps}", "launch.nproc=1", *asked, *RATE,
             "precision.mode=bf16", "--out", str(run.root)],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        for line in run.summary.read_text().splitlines():
            if line.startswith(("| attention |", "| torch.compile", "| rank 0")):
                print("   ", line)
        wall_s = read_steps(run.steps(0)).since(arguments.warmup + 1).column("wall_s")
    return float(len(wall_s) * bench.micro * bench.seq_len / wall_s.sum())


def run_peer(name: str, arguments: argparse.Namespace) -> float:
    """In a process of its own: none inherits another's compiled graphs or memory."""
    steps = ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    command = [sys.executable, __file__, "--one", name, *steps, "--recipe", *arguments.recipe]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def race(arguments: argparse.Namespace, first: Bench) -> tuple[dict[str, list[float]], list[float]]:
    names = arguments.only or [*LOOPS, *OURS]
    first.fill(first.model)
    turns = {name: Turn(first) for name in names if name in LOOPS and name not in APART}
    rates: dict[str, list[float]] = {name: [] for name in names}
    products = []
    for number in range(arguments.rounds):
        products.append(matmul_tflops() if ON_GPU else float("nan"))
        print(f"round {number + 1}: matmul {products[-1]:.0f} TFLOP/s", flush=True)
        torch.cuda.empty_cache() if ON_GPU else None
        turn = number * 3 % len(names)
        for name in names[turn:] + names[:turn]:
            if name in OURS:
                rate = run_ours(OURS[name], arguments, first)
            elif name in APART:
                rate = run_peer(name, arguments)
            else:
                rate = LOOPS[name](turns[name])
            torch.cuda.empty_cache() if ON_GPU else None
            rates[name].append(rate)
            print(f"  {name:<15} {rate:>10,.0f} tokens/s", flush=True)
    return rates, products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", nargs="+", default=["lm_1b"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps that do not count")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    job = load_job(arguments.recipe[0], arguments.recipe[1:])
    torch.set_float32_matmul_precision("high")
    bench = Bench(job, arguments.steps, arguments.warmup)
    bench.choose_attention()
    if arguments.one:
        print(LOOPS[arguments.one](bench))
        return
    told = f"{torch.cuda.get_device_name()}, " if ON_GPU else ""
    print(f"{time.strftime('%Y-%m-%d')}, {told}torch {torch.__version__}: {' '.join(sys.argv[1:])}")
    rates, products = race(arguments, bench)
    best = {name: max(values) for name, values in rates.items()}
    flops = job.workload.flops(job.config) / job.config.data.seq_len
    print(f"\n{'':<15} {'tokens/s':>10} {'MFU':>7} {'of matmul':>10}")
    for name, rate in best.items():
        achieved = rate * flops
        share = achieved / 1e12 / max(products)
        print(f"{name:<15} {rate:>10,.0f} {achieved / PEAK_FLOPS:>7.1%} {share:>10.1%}")
    for ours, others in AGAINST.items():
        for other in others:
            if ours in best and other in best:
                print(f"{ours} / {other} = {best[ours] / best[other]:.3f} in tokens/s")


if __name__ == "__main__":
    main()
