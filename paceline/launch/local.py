"""Ranks on this machine, through torch elastic and a fork server that has torch loaded already."""

import logging
import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.errors import ConfigError
from paceline.job import Job
from paceline.launch.base import LaunchEnd
from paceline.launch.rank import RankTicket, rank_main
from paceline.records import Env, LaunchPlan, Plan, RankPlace
from paceline.rundir import RunDir

ELASTIC_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_S = 10


class LocalLauncher:
    def plan(self, job: Job, plan: Plan, env: Env) -> LaunchPlan:
        cuda = plan.device.value == "cuda"
        return LaunchPlan(
            launcher="local",
            nproc=plan.world_size,
            entrypoint=f"{rank_main.__module__}:{rank_main.__name__}",
            workload=_absolute(job.config.workload),
            env={"OMP_NUM_THREADS": str(plan.threads.value)},
            ranks=[
                RankPlace(
                    rank=rank,
                    local_rank=rank,
                    host=env.host,
                    device=f"cuda:{rank}" if cuda else "cpu",
                )
                for rank in range(plan.world_size)
            ],
        )

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                "this process is itself a rank of torchrun; ranks cannot start ranks\n"
                "hint: run `paceline train` without torchrun: it starts its own"
            )
        ticket = RankTicket(str(run.root), os.getcwd(), dict(os.environ) | launch.env, os.getpid())
        multiprocessing.set_forkserver_preload([rank_main.__module__])
        with _signals_restored(), _elastic_logs_to(run.launcher_log):
            return _launch(launch.nproc, ticket)


def _launch(nproc: int, ticket: RankTicket) -> LaunchEnd:
    # Without it a restarted rank can read the address of a dead one from the shared store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port, never a fixed one
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    if hasattr(config, "shutdown_timeout"):  # torch before 2.12 waits a fixed 30 s
        config.shutdown_timeout = GRACE_S
    with _rank_processes() as started:
        try:
            elastic_launch(config, rank_main)(ticket)
        except ChildFailedError:
            return LaunchEnd(exit_codes=_exit_codes(started))
        except SignalException as error:
            return LaunchEnd(exit_codes=_exit_codes(started), signal=int(error.sigval))
    return LaunchEnd(exit_codes=_exit_codes(started))


@contextmanager
def _rank_processes() -> Iterator[list[PContext]]:
    """elastic reports the first failure it sees, which may be a rank that only lost its peer.
    Keep hold of what it starts, to know how every rank ended."""
    started: list[PContext] = []
    agent: Any = local_elastic_agent
    start = agent.start_processes

    def noting(*arguments: Any, **settings: Any) -> PContext:
        started.append(start(*arguments, **settings))
        return started[-1]

    agent.start_processes = noting
    try:
        yield started
    finally:
        agent.start_processes = start


def _exit_codes(started: list[PContext]) -> dict[int, int]:
    """By rank, -N for signal N; a rank that elastic ended itself shows its TERM."""
    processes = started[-1]._pc.processes if started else []  # type: ignore[attr-defined]
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    return {rank: code for rank, code in codes.items() if code is not None}


def _absolute(workload: str) -> str:
    """FILE.py:Class with a full path: a rank must find it whatever its working directory."""
    if ".py:" not in workload:
        return workload
    file, _, name = workload.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


@contextmanager
def _signals_restored() -> Iterator[None]:
    """elastic replaces these handlers and leaves its own behind."""
    before = {number: signal.getsignal(number) for number in ELASTIC_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elastic_logs_to(path: Path) -> Iterator[None]:
    """elastic, and what it calls in torch, talks to launcher.log, not to the user's terminal."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    loggers = [logging.getLogger(name) for name in ("torch", *names)]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()
