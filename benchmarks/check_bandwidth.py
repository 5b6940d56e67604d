"""Bandwidths of `paceline check` against a hand-written loop: 2 gloo ranks, interleaved in one run.

    OMP_NUM_THREADS=1 python benchmarks/check_bandwidth.py [ROUNDS]

Each round times both, in turn first, on the same operation and size. Prints the median over rounds
of the paired ratios (goal: within 5 % of 1 from 1 MiB on) and their quartiles.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.check.answers import ALL_GATHER
from paceline.check.bandwidth import measure_collectives
from paceline.machine.measures import Speed

CPU = torch.device("cpu")
WORLD_SIZE, LOOPS, GOAL = 2, 5, 0.05
OPS = ("all_reduce", "all_gather", "broadcast", "send_recv")
SIZES = (2**20, 2**22, 2**24)
BUDGET_S = 0.1  # of either side, for one figure of one round
TIMEOUT_S = 900


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 31
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(folder, rank, rounds))
            for rank in range(WORLD_SIZE)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(TIMEOUT_S)
            rank.kill()
        result = Path(folder, "result.json")
        if not result.is_file():
            raise SystemExit(f"the ranks did not finish in {TIMEOUT_S} s, or failed: see above")
        report(json.loads(result.read_text()), rounds)


def report(results: list[dict], rounds: int) -> None:
    print(f"{WORLD_SIZE} gloo ranks, {rounds} rounds, paired ratio of bandwidths (ours / raw loop)")
    missed = 0
    for row in results:
        ratios = [ours / raw for ours, raw in row["pairs"]]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        raw = statistics.median(raw for _, raw in row["pairs"])
        is_missed = abs(ratio - 1) > GOAL
        missed += is_missed
        print(
            f"{row['op']:<11} {row['size'] >> 20:>3} MiB  raw {raw:6.2f} GB/s  "
            f"ratio {ratio:.3f} ({low:.3f} to {high:.3f})  {'MISS' if is_missed else 'PASS'}"
        )
    if missed:
        raise SystemExit(f"MISSED: {missed} of {len(results)} not within {GOAL:.0%}")
    print(f"PASS: all {len(results)} within {GOAL:.0%}")


def run_rank(folder: str, rank: int, rounds: int) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", WORLD_SIZE),
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=60),
        )
        results = compare(rounds)
        if rank == 0:
            Path(folder, "result.json").write_text(json.dumps(results))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # gloo sometimes aborts in interpreter exit, after the result


def compare(rounds: int) -> list[dict]:
    """Per op and size the pairs (ours, raw) in GB/s."""
    results = [{"op": op, "size": size, "pairs": []} for op in OPS for size in SIZES]
    for number in range(rounds):
        for row in results:
            op, size = row["op"], row["size"]
            if number == 0:  # as many runs in the raw loop as ours decided on
                row["runs"] = max(ours(op, size).iterations // LOOPS, 1)
            if number % 2:
                raw, mine = raw_loop(op, size, row["runs"]), ours(op, size).algbw_gb_per_s
            else:
                mine, raw = ours(op, size).algbw_gb_per_s, raw_loop(op, size, row["runs"])
            row["pairs"].append((mine, raw))
    return results


def ours(op: str, size: int) -> Speed:
    return measure_collectives(CPU, sizes=[size], ops=[op], budget_s=BUDGET_S)[0]


def raw_loop(op: str, size: int, runs: int) -> float:
    """What one would type to find the bandwidth of `op`, in GB/s of the slowest rank."""
    run = raw_op(op, size)
    run()
    run()
    times = []
    for _ in range(LOOPS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(runs):
            run()
        times.append((time.perf_counter() - started) / runs)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return size / slowest.median().item() / 1e9


def raw_op(op: str, size: int) -> Callable[[], object]:
    other = 1 - dist.get_rank()
    a, b = torch.full((size // 4,), 0.0), torch.full((size // 4,), 0.0)

    def send_recv() -> None:
        sending, receiving = dist.isend(a, other), dist.irecv(b, other)
        sending.wait()
        receiving.wait()

    half = a[: len(a) // 2].clone()
    gather = getattr(dist, ALL_GATHER)
    return {
        "all_reduce": lambda: dist.all_reduce(a),
        "all_gather": lambda: gather(b, half),
        "broadcast": lambda: dist.broadcast(a, 0),
        "send_recv": send_recv,
    }[op]


if __name__ == "__main__":
    main()
