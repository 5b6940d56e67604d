"""Ranks for tests: real processes over gloo, each leaving its verdict in a file before teardown.

`run_ranks` trains a job without the launcher and returns what every rank held at the end.
"""

import json
import multiprocessing
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.facts import probe
from paceline.cluster.group import Place, claim_device, join_group
from paceline.config.load import dump_config
from paceline.flow import require_feasible
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.records import Plan, RankVerdict
from paceline.rundir import RunDir
from paceline.tables import TrainingRow, read_training
from paceline.train.worker import RankRun

TIMEOUT_S = 90
multiprocessing.set_forkserver_preload(["tests.harness"])


@dataclass
class RankEnds:
    run: RunDir
    verdicts: list[RankVerdict]
    states: list[dict[str, Any]]

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
        [torch.load(run.rank(rank) / "state.pt") for rank in range(plan.world_size)],
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
        return RankEnds(run, [verdict], [rank.engine.state()])
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
        torch.save(rank_run.engine.state(), run.rank(rank) / "state.pt")
    except BaseException:
        (run.rank(rank) / "error.txt").write_text(traceback.format_exc())
    os._exit(0)  # gloo sometimes aborts in interpreter exit, after the verdict
