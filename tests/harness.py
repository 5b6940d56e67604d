"""Ranks for tests: real processes over gloo, each leaving its verdict in a file before teardown.

`run_ranks` trains a job without the launcher and returns what every rank held at the end.
"""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import Piece, Section, moment_name
from paceline.config.load import dump_config
from paceline.data.collate import collate
from paceline.job import Job, load_job
from paceline.machine.facts import probe
from paceline.machine.group import claim_device, join_group
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records import BestMetric, DataPosition, Env, Kept, Plan, RankVerdict
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.run.flow import require_feasible
from paceline.strategies import find_strategy
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.stored import SCALER
from paceline.train.worker import RankRun

TIMEOUT_S, EACH_S = 90, 20
PRELOADED = ["tests.preloaded", "tests.harness"]


@dataclass
class RankState:
    """What one rank held at the end: whole weights, and its own pieces of all state."""

    weights: dict[str, Tensor]
    pieces: list[Piece]

    @classmethod
    def of(cls, engine: Engine) -> "RankState":
        pieces = [piece._replace(value=piece.value.clone()) for piece in engine.pieces()]
        return cls({name: w.detach().clone() for name, w in engine.weights().items()}, pieces)

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """This rank's part of the optimizer's state, by the names it has in a checkpoint."""
        return {piece.name: piece.value for piece in self.pieces if piece.section == "optimizer"}

    def slot(self, slot: str) -> dict[str, Tensor]:
        """`exp_avg` and the like, by parameter."""
        names = {name: name.split("/", 1) for name in self.optimizer}
        return {at: self.optimizer[name] for name, (kind, at) in names.items() if kind == slot}

    @property
    def loss_scale(self) -> float:
        return float(self.optimizer[moment_name(SCALER, "value")])


class HeldSource:
    """Pieces in memory, of however many ranks, as a checkpoint would give them."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.parts: dict[tuple[str, str], dict[int, Piece]] = {}
        for piece in pieces:
            self.parts.setdefault((piece.section, piece.name), {})[piece.row] = piece

    @classmethod
    def of_all_ranks(cls, pieces: list[Piece]) -> "HeldSource":
        heard: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(heard, pieces)
        return cls(piece for rank in heard for piece in rank)

    def shapes(self, section: Section) -> dict[str, tuple[int, ...]]:
        firsts = [next(iter(rows.values())) for rows in self.parts.values()]
        return {piece.name: piece.shape for piece in firsts if piece.section == section}

    def fill(self, section: Section, name: str, first: int, out: Tensor) -> None:
        out.copy_(self.rows(section, name, first, (*out.shape, 1)[0]))

    def rows(self, section: Section, name: str, first: int, count: int) -> Tensor:
        found = [piece.value for _, piece in sorted(self.parts[section, name].items())]
        return torch.cat(found)[first : first + count] if found[0].dim() else found[0].clone()


@dataclass
class RankEnds:
    run: RunDir
    verdicts: list[RankVerdict]
    states: list["RankState"]

    @property
    def rows(self) -> list[TrainingRow]:
        return list(read_training(self.run.training))


@cache
def machine() -> Env:
    """This one, asked once."""
    return probe()


def prepare_run(folder: Path, source: str, overrides: list[str]) -> tuple[Job, Plan, RunDir]:
    """A planned job and its run directory, as the flow would make them."""
    job = load_job(source, overrides)
    plan = make_plan(job, machine())
    require_feasible(plan)
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    run = RunDir.create("test", folder)
    run.data.write_text(json.dumps(job.workload.prepared))
    run.config.write_text(dump_config(job.config))
    plan.save(run.plan)
    return job, plan, run


def run_ranks(folder: Path, source: str, overrides: list[str]) -> RankEnds:
    """Train on as many processes as the plan says; every rank's final state comes back."""
    _, plan, run = prepare_run(folder, source, overrides)
    start_ranks(run, plan.world_size, partial(_train, source, overrides))
    return _ends(run, plan.world_size)


def run_each(folder: Path, source: str, cases: dict[str, list[str]]) -> dict[str, RankEnds]:
    """Runs on equally many ranks, one after the other in one group of processes, to be quick."""
    runs = {name: prepare_run(folder / name, source, cases[name])[1:] for name in cases}
    [world_size] = {plan.world_size for plan, _ in runs.values()}
    dirs = [(run, cases[name]) for name, (_, run) in runs.items()]
    limit_s = TIMEOUT_S + EACH_S * len(cases)
    start_ranks(RunDir(folder), world_size, partial(_train_each, source, dirs), limit_s)
    return {name: _ends(run, world_size) for name, (_, run) in runs.items()}


def _ends(run: RunDir, world_size: int) -> RankEnds:
    ranks = range(world_size)
    return RankEnds(
        run,
        [RankVerdict.load(run.verdict(rank)) for rank in ranks],
        [torch.load(run.rank(rank) / "state.pt", weights_only=False) for rank in ranks],
    )


def start_ranks(
    run: RunDir,
    world_size: int,
    work: Callable[[RunDir, RankId], object],
    limit_s: float = TIMEOUT_S,
) -> None:
    """`work` on each of so many processes, which have joined a group; what one raised is raised
    here."""
    warm_fork_server()
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rank, args=(run, RankId(rank, rank, world_size), work))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    failures = [path.read_text() for path in run.ranks.glob("*/error.txt")]
    assert not failures, "\n".join(failures)
    assert not stuck, f"{len(stuck)} ranks did not finish in {limit_s:g} s"


def warm_fork_server() -> None:
    """Let the server that ranks are forked from have all loaded that they need."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def run_here(folder: Path, source: str, overrides: list[str]) -> RankEnds:
    """The same for one rank, in this process: for tests that look inside it."""
    job, plan, run = prepare_run(folder, source, [*overrides, "launch.nproc=1"])
    place = RankId(0, 0, 1)
    device = claim_device(plan.device.value, place, [])
    join_group(plan.backend.value, place, device, dist.HashStore(), TIMEOUT_S)
    try:
        rank = RankRun(job, plan, run, place)
        verdict = rank.execute()
        assert rank.engine is not None
        return RankEnds(run, [verdict], [RankState.of(rank.engine)])
    finally:
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process only."""
    device = torch.device("cpu")
    join_group("gloo", RankId(0, 0, 1), device, dist.HashStore(), TIMEOUT_S)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(run: RunDir, place: RankId, work: Callable[[RunDir, RankId], object]) -> None:
    run.rank(place.rank).mkdir(parents=True, exist_ok=True)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(run.root / "store"), place.world_size)
        join_group("gloo", place, torch.device("cpu"), store, TIMEOUT_S)
        work(run, place)
    except BaseException:
        (run.rank(place.rank) / "error.txt").write_text(traceback.format_exc())
    os._exit(0)  # gloo sometimes aborts in interpreter exit, after the verdict


def _train(source: str, overrides: list[str], run: RunDir, place: RankId) -> None:
    job = load_job(source, overrides)
    job.workload.prepared = json.loads(run.data.read_text())
    rank_run = RankRun(job, Plan.load(run.plan), run, place)
    rank_run.execute()
    assert rank_run.engine is not None
    torch.save(RankState.of(rank_run.engine), run.rank(place.rank) / "state.pt")


def _train_each(
    source: str, runs: list[tuple[RunDir, list[str]]], group: RunDir, place: RankId
) -> None:
    for run, overrides in runs:
        try:
            _train(source, overrides, run, place)
        except Exception as error:
            error.add_note(f"in {run.root.name}")
            raise


def build_engine(run: RunDir, source: str, overrides: list[str]) -> tuple[Engine, list[Any]]:
    """On a rank that has joined: the engine of a planned run, untrained, and its first batches."""
    job, plan, rank = load_job(source, overrides), Plan.load(run.plan), dist.get_rank()
    job.workload.prepared = json.loads(run.data.read_text())
    parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
    data = job.workload.build_data(job.config, "train")
    assert data is not None
    shape = (plan.batch.grad_accum, plan.batch.dp, plan.batch.micro)
    rows = np.arange(plan.batch.global_size).reshape(shape)[:, plan.dp_rank(rank)]
    engine = find_strategy(plan.strategy.value).build(parts)
    return engine, [collate(data, row) for row in rows]


def make_kept(step: int, best: BestMetric | None = None) -> Kept:
    """What a checkpoint keeps beside tensors, for those that look at tensors only."""
    position = DataPosition(
        position=step, num_samples=100, seed=0, epoch=0, segment=0, start_index=0, end_index=step,
        fingerprint="none",
    )  # fmt: skip
    return Kept(
        step=step, reason="every", saved_at=0.0, data=position, num_skips=0, lr=0.1, num_steps=9,
        best=best, strategy="ddp", world_size=1, precision="fp32", global_size=1,
        config_fingerprint="none", versions={},
    )  # fmt: skip
