"""The first lines of a rank: its own environment, process group and log, and an eye on its parent.

The fork server imports this module, and with it torch, once; every rank is then a fork of it.
"""

import faulthandler
import logging
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.errors import EXIT_CODES, Outcome
from paceline.job import reload_job
from paceline.records import LaunchPlan, Plan, RankVerdict
from paceline.rundir import RunDir
from paceline.train.verdict import explain, outcome_of
from paceline.train.worker import Place, RankRun

LOG = logging.getLogger("paceline")
# What elastic tells a rank. All other variables come with `RankTicket.environment`, because the
# fork server's own are those of the first run in this process.
ELASTIC_NAMES = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)  # fmt: skip


@dataclass(frozen=True)
class RankTicket:
    """What travels to a rank; the environment is never written to a file."""

    run_dir: str
    working_dir: str
    environment: dict[str, str]
    supervisor_pid: int


def rank_main(ticket: RankTicket) -> int:
    """Run one rank to its verdict. A failure ends the process with the outcome's exit code."""
    _apply_environment(ticket)
    os.setpgid(0, 0)  # Ctrl-C reaches the supervisor alone, which ends the ranks in order
    run, place = RunDir(Path(ticket.run_dir)), Place.from_environment()
    _redirect(run.rank_log(place.rank))
    _die_with(ticket.supervisor_pid)
    try:
        plan = Plan.load(run.plan)
        torch.set_num_threads(plan.threads.value)
        job = reload_job(run, LaunchPlan.load(run.launch).workload)
        LOG.info("rank %d of %d: process %d", place.rank, place.world_size, os.getpid())
        verdict = RankRun(job, plan, run, place).execute()
        LOG.info("%s after step %d", verdict.outcome, verdict.step)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _require_verdict(run, place, error)
        _end_children()
        os._exit(EXIT_CODES[outcome_of(error)])
    _end_children()
    dist.destroy_process_group()
    return 0


def _require_verdict(run: RunDir, place: Place, error: BaseException) -> None:
    """A rank that failed before its run began has not said why yet."""
    if not run.verdict(place.rank).is_file():
        verdict = RankVerdict(
            rank=place.rank,
            host=socket.gethostname(),
            outcome=outcome_of(error),
            step=0,
            ended_at=time.time(),
            error=explain(error),
        )
        verdict.save(run.verdict(place.rank))


def _end_children() -> None:
    """Loaders ignore TERM; one that hangs in a user's code must not outlive the rank."""
    for child in multiprocessing.active_children():
        child.kill()


def _apply_environment(ticket: RankTicket) -> None:
    given = {
        name: value
        for name, value in os.environ.items()
        if name in ELASTIC_NAMES or name.startswith("TORCHELASTIC_")
    }
    os.environ.clear()
    os.environ.update(ticket.environment | given)
    os.chdir(ticket.working_dir)


def _redirect(log: Path) -> None:
    """stdout and stderr of this process, C++ included, go to its own file, line by line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)


def _die_with(supervisor_pid: int) -> None:
    """End this rank when the supervisor is gone, however it went: no orphan holds a GPU."""
    parent = os.pidfd_open(supervisor_pid)

    def watch() -> None:
        select.select([parent], [], [])
        os._exit(EXIT_CODES[Outcome.CRASHED])

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
