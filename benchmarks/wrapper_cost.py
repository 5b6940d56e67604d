"""What Paceline adds to DDP and to fully_shard: 2 CPU ranks over gloo, against bare loops.

    python benchmarks/wrapper_cost.py [--rounds 60]

Each contender is two processes, one a core, that train the same model on the same samples with
fused AdamW and clipping. They take turns: a referee lets one contender run SEGMENT steps at a time,
in an order that changes every round, and times the slower of its ranks. Paceline runs its whole
loop: ledger, heartbeat, telemetry, phases. A contender whose first losses differ from its bare
loop's does not count. Goal: at most 1.02x. On one H200: benchmarks/gpu_throughput.py.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import step_overhead
import torch
import torch.distributed as dist
from step_overhead import CLIP, LR, SEED, Tokens, Turns, build_model, build_optimizer, mean_loss
from torch import nn

from paceline.config.load import dump_config
from paceline.data.cursor import Order, StepSlice
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.machine.group import join_group
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.strategies.blocks import find_blocks
from paceline.train.worker import RankRun

SIZES = {
    "small": {"dim": 128, "layers": 2, "seq_len": 64, "batch": 8, "segment": 10},
    "medium": {"dim": 256, "layers": 4, "seq_len": 64, "batch": 8, "segment": 4},
}
RANKS, WARMUP_SEGMENTS, COMPARED, GOAL = 2, 3, 20, 1.02
PAIRS = {"paceline ddp": "bare ddp", "paceline zero3": "bare fsdp"}
Size = dict[str, int]


def plain_loop(size: Size, rank: int, model: nn.Module, called: nn.Module) -> list[float]:
    data, order = Tokens(size["seq_len"]), Order(4096, SEED)
    own = StepSlice(size["batch"], 1, RANKS, rank)
    optimizer, parameters = build_optimizer(model), list(model.parameters())
    losses = []
    for step in range(size["steps"]):
        loss = mean_loss(called, data.batch(order.at(own.positions(step)))["tokens"])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / RANKS).tolist()


def bare_ddp(size: Size, rank: int) -> list[float]:
    model = build_model(size)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_loop(size, rank, model, wrapped)


def bare_fsdp(size: Size, rank: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model(size)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return plain_loop(size, rank, model, model)


def ours(strategy: str) -> Callable[[Size, int], list[float]]:
    def run(size: Size, rank: int) -> list[float]:
        overrides = [
            f"train.steps={size['steps']}", f"train.micro_batch_size={size['batch']}",
            f"model.dim={size['dim']}", f"model.layers={size['layers']}",
            f"model.seq_len={size['seq_len']}", f"optim.lr={LR}", "optim.schedule.name=constant",
            "data.num_workers=0", f"launch.nproc={RANKS}", "launch.device=cpu",
            f"strategy.name={strategy}",
        ]  # fmt: skip
        job = load_job(f"{step_overhead.__file__}:Bench", overrides)
        sys.modules["paceline_job_step_overhead"].TURNS = step_overhead.TURNS
        with tempfile.TemporaryDirectory() as folder:
            run_dir = RunDir.create("bench", Path(folder))
            run_dir.config.write_text(dump_config(job.config))
            RankRun(job, make_plan(job, probe()), run_dir, RankId(rank, rank, RANKS)).execute()
            return [row.loss for row in read_training(run_dir.training)] if rank == 0 else []

    return run


CONTENDERS: dict[str, Callable[[Size, int], list[float]]] = {
    "bare ddp": bare_ddp,
    "paceline ddp": ours("ddp"),
    "bare fsdp": bare_fsdp,
    "paceline zero3": ours("zero3"),
}


def contend(name: str, size: Size, rank: int, store: str, referee: Connection) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    step_overhead.TURNS = Turns(referee, size["segment"])
    files = dist.FileStore(store, RANKS)
    join_group("gloo", RankId(rank, rank, RANKS), torch.device("cpu"), files, 600)
    referee.send(CONTENDERS[name](size, rank)[:COMPARED])
    os._exit(0)


def race(size: Size, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds a step of every segment, by contender and round; and the first losses."""
    context = multiprocessing.get_context("spawn")
    size = size | {"steps": size["segment"] * (WARMUP_SEGMENTS + rounds + 1)}
    lines: dict[str, list[Connection]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(CONTENDERS):
            for rank in range(RANKS):
                mine, theirs = context.Pipe()
                lines[name].append(mine)
                arguments = (name, size, rank, f"{folder}/{number}", theirs)
                context.Process(target=contend, args=arguments, daemon=True).start()
        seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        draw = random.Random(0)
        for number in range(WARMUP_SEGMENTS + rounds):
            for name in draw.sample(list(CONTENDERS), len(CONTENDERS)):
                elapsed_s = _turn(lines[name])
                if number >= WARMUP_SEGMENTS:
                    seconds[name].append(elapsed_s / size["segment"])
        losses = {name: _last(ends) for name, ends in lines.items()}
    return seconds, losses


def _turn(ranks: list[Connection]) -> float:
    for line in ranks:
        line.send("go")
    return max(line.recv() for line in ranks)


def _last(ranks: list[Connection]) -> list[float]:
    for line in ranks:
        line.send("go")
    return [line.recv() for line in ranks][0]


def judge(label: str, seconds: dict[str, list[float]], losses: dict[str, list[float]]) -> bool:
    met = True
    for name, bare in PAIRS.items():
        pairs = [a / b for a, b in zip(seconds[name], seconds[bare], strict=True)]
        low, high = step_overhead.median_interval(pairs)
        ratio = statistics.median(pairs)
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses[bare], strict=True))
        good = ratio <= GOAL and apart <= 1e-5
        met &= good
        print(
            f"{label:<7} {name:<15} {statistics.median(seconds[bare]) * 1e3:>7.2f} ms bare"
            f" {ratio:>6.3f}x [{low:.3f}, {high:.3f}] minima"
            f" {min(seconds[name]) / min(seconds[bare]):.3f}x  losses within {apart:.0e}"
            f"  {'met' if good else 'MISSED'}",
            flush=True,
        )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    results: list[Any] = [judge(k, *race(size, arguments.rounds)) for k, size in SIZES.items()]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
