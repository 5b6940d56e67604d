"""The first lines of a rank: its own environment, process group and log, and an eye on its parent.

The fork server imports this module, and with it torch, once; every rank is then a fork of it.
"""

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, synchronize, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import EXIT_CODES
from paceline.job import reload_job
from paceline.machine.group import StoreAddress
from paceline.machine.topology import RankId
from paceline.records import LaunchPlan, Plan, RankVerdict
from paceline.records.rundir import RunDir
from paceline.train.control import Ask, Requests
from paceline.train.verdict import explain, outcome_of
from paceline.train.worker import RankRun

LOG = logging.getLogger("paceline")
PR_SET_PDEATHSIG = 1
ASKS = {
    signal.SIGTERM: Ask.PREEMPT,
    signal.SIGUSR2: Ask.PREEMPT,
    signal.SIGINT: Ask.INTERRUPT,
}


@dataclass(frozen=True)
class RankContext:
    """Where a rank stands, where it meets the others, where its files go, what is asked of it."""

    run: RunDir
    place: RankId
    store: StoreAddress
    requests: Requests


Task = Callable[[RankContext], None]


def answering(task: Task) -> Task:
    """Marks a task that looks at its requests: signals are then notes, and do not end it."""
    task.answers = True  # type: ignore[attr-defined]
    return task


@dataclass(frozen=True)
class RankSpec:
    """What travels to a rank; the environment is never written to a file."""

    run_dir: str
    working_dir: str
    environment: dict[str, str]
    place: RankId
    store: StoreAddress
    supervisor_pid: int
    temporary: str  # where the fork server's socket lies; a killed supervisor leaves it behind
    task: Task


def rank_main(spec: RankSpec) -> None:
    """Run one rank to its verdict. A failure ends the process with the outcome's exit code."""
    context = RankContext(RunDir(Path(spec.run_dir)), spec.place, spec.store, Requests())
    _apply_environment(spec)
    os.setpgid(0, 0)  # Ctrl-C reaches the supervisor alone, which ends the ranks in order
    _redirect(context.run.rank_log(context.place.rank))
    _die_with(spec.supervisor_pid, spec.temporary)
    _dump_stacks_on_request(context.run.stacks(context.place.rank))
    _take_signals(context.requests if getattr(spec.task, "answers", False) else None)
    try:
        spec.task(context)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _require_verdict(context, error)
        _end_children()
        os._exit(EXIT_CODES[outcome_of(error)])
    _end_children()
    if dist.is_initialized():
        dist.destroy_process_group()
    _release_semaphores()
    sys.stdout.flush()
    os._exit(0)  # a thread that the user left running must not keep a finished rank


def _take_signals(requests: Requests | None) -> None:
    """The fork server is deaf; a rank notes what it is asked. A task that has no ear for requests
    is ended by them: it has nothing to lose."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if requests is None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        return

    def note(number: int, frame: Any) -> None:
        requests.raise_to(ASKS[signal.Signals(number)])

    for number in ASKS:
        signal.signal(number, note)
        signal.siginterrupt(number, False)  # C++ code need not know of it


@answering
def train_rank(context: RankContext) -> None:
    """The task of `paceline train`."""
    plan = Plan.load(context.run.plan)
    torch.set_num_threads(plan.threads.value)
    launch = LaunchPlan.load(context.run.launch)
    job = reload_job(context.run, launch.workload)
    place = context.place
    LOG.info("rank %d of %d: process %d", place.rank, place.world_size, os.getpid())
    rank = RankRun(job, plan, context.run, place, context.store, requests=context.requests)
    verdict = rank.execute()
    LOG.info("%s after step %d", verdict.outcome, verdict.step)


def check_rank(context: RankContext) -> None:
    """The task of `paceline check`."""
    from paceline.check.rank import examine_rank  # a page of measuring that no run needs

    launch = LaunchPlan.load(context.run.launch)
    torch.set_num_threads(launch.threads)
    examine_rank(context.run, launch, context.place, context.store)


def verify_rank(context: RankContext) -> None:
    """The task of `paceline verify`."""
    from paceline.verify.trial import try_rank

    torch.set_num_threads(LaunchPlan.load(context.run.launch).threads)
    try_rank(context.run, context.place, context.store)


TASKS: dict[str, Task] = {"train": train_rank, "check": check_rank, "verify": verify_rank}


def save_failure(run: RunDir, rank: int, error: BaseException) -> None:
    """The verdict of a rank whose run never began."""
    verdict = RankVerdict(
        rank=rank,
        host=socket.gethostname(),
        outcome=outcome_of(error),
        step=0,
        ended_at=time.time(),
        error=explain(error),
    )
    verdict.save(run.verdict(rank))


def _require_verdict(context: RankContext, error: BaseException) -> None:
    """A rank that failed before its run began has not said why yet."""
    if not context.run.verdict(context.place.rank).is_file():
        save_failure(context.run, context.place.rank, error)


def _end_children() -> None:
    """Loaders ignore TERM; one that hangs in a user's code must not outlive the rank."""
    for child in multiprocessing.active_children():
        child.kill()


def _release_semaphores() -> None:
    """Those of a library's worker pools, as torch's compiler has them: `os._exit` runs nobody's
    clean-up, and the tracker that we share with the supervisor would complain on its screen."""
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
    clean_up = synchronize.SemLock._cleanup  # type: ignore[attr-defined]
    for registered in list(registry.values()):
        if registered._callback is clean_up:
            registered()


def _apply_environment(spec: RankSpec) -> None:
    """The fork server's own variables are those of the first run in its process."""
    os.environ.clear()
    os.environ.update(spec.environment)
    os.chdir(spec.working_dir)


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


def _dump_stacks_on_request(path: Path) -> None:
    """SIGUSR1 writes every thread's stack there, from C: a rank stuck in C++ answers too. The
    file's existence tells the supervisor that this process can take the signal."""
    early = path.with_name("stacks.tmp")
    # faulthandler keeps the file open.
    faulthandler.register(signal.SIGUSR1, file=early.open("a"), all_threads=True, chain=False)
    early.rename(path)


def _let_go_of_fork_server() -> None:
    """Every child holds the pipe that keeps the fork server alive; a rank needs no fork server,
    and a user's code that does gets its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _die_with(supervisor_pid: int, temporary: str) -> None:
    """End this rank when the supervisor is gone, however it went: no orphan holds a GPU."""
    _let_go_of_fork_server()
    # The fork server leaves a moment after the supervisor, and the kernel then ends this process
    # even if some C code holds the interpreter and the thread below cannot run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.pidfd_open(supervisor_pid)

    def watch() -> None:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.poll()
        shutil.rmtree(temporary, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # with it what it started itself

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
