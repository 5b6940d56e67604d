"""Ranks for tests: real processes over gloo, each leaving its verdict in a file before teardown.

`run_ranks` trains a job without the launcher and returns what every rank held at the end.
"""

import json
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import Piece, Section, moment_name
from paceline.cluster.facts import probe
from paceline.cluster.group import Place, claim_device, join_group
from paceline.config.load import dump_config
from paceline.flow import require_feasible
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.records import Plan, RankVerdict
from paceline.rundir import RunDir
from paceline.strategies.base import Engine
from paceline.strategies.stored import SCALER
from paceline.tables import TrainingRow, read_training
from paceline.train.worker import RankRun

TIMEOUT_S = 90
multiprocessing.set_forkserver_preload(["tests.harness"])


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

    def rows(self, section: Section, name: str, first: int, count: int) -> Tensor:
        found = [piece.value for _, piece in sorted(self.parts[section, name].items())]
        return torch.cat(found)[first : first + count] if found[0].dim() else found[0]


@dataclass
class RankEnds:
    run: RunDir
    verdicts: list[RankVerdict]
    states: list["RankState"]

    @property
    def rows(self) -> list[TrainingRow]:
        return read_training(self.run.training)


def prepare_run(folder: Path, source: str, overrides: list[str]) -> tuple[Job, Plan, RunDir]:
    """A planned job and its run directory, as the flow would make them."""
    job = load_job(source, overrides)
    plan = make_plan(job, probe())
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
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=_rank, args=(str(run.root), source, overrides, rank))
        for rank in range(plan.world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck, f"{len(stuck)} ranks did not finish in {TIMEOUT_S} s"
    failures = [path.read_text() for path in run.ranks.glob("*/error.txt")]
    assert not failures, "\n".join(failures)
    return RankEnds(
        run,
        [RankVerdict.load(run.verdict(rank)) for rank in range(plan.world_size)],
        [
            torch.load(run.rank(rank) / "state.pt", weights_only=False)
            for rank in range(plan.world_size)
        ],
    )


def run_here(folder: Path, source: str, overrides: list[str]) -> RankEnds:
    """The same for one rank, in this process: for tests that look inside it."""
    job, plan, run = prepare_run(folder, source, [*overrides, "launch.nproc=1"])
    place = Place(0, 0, 1)
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
    join_group("gloo", Place(0, 0, 1), device, dist.HashStore(), TIMEOUT_S)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(root: str, source: str, overrides: list[str], rank: int) -> None:
    run = RunDir(Path(root))
    run.rank(rank).mkdir(parents=True, exist_ok=True)
    try:
        torch.set_num_threads(1)
        plan = Plan.load(run.plan)
        place = Place(rank, rank, plan.world_size)
        store = dist.FileStore(str(run.root / "store"), plan.world_size)
        join_group(plan.backend.value, place, torch.device("cpu"), store, TIMEOUT_S)
        job = load_job(source, overrides)
        job.workload.prepared = json.loads(run.data.read_text())
        rank_run = RankRun(job, plan, run, place)
        rank_run.execute()
        assert rank_run.engine is not None
        torch.save(RankState.of(rank_run.engine), run.rank(rank) / "state.pt")
    except BaseException:
        (run.rank(rank) / "error.txt").write_text(traceback.format_exc())
    os._exit(0)  # gloo sometimes aborts in interpreter exit, after the verdict
