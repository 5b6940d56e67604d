"""What every rank does first and last: environment, process group, log, signals; then its task.

The fork server imports this module, and with it torch, once; every rank is then a fork of it. A
rank watches its supervisor and dies with it.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, synchronize, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from paceline.launch.base import RankContext, Task
from paceline.machine.group import StoreAddress
from paceline.machine.process import die_with_parent
from paceline.machine.topology import RankId
from paceline.records import RankVerdict, list_unwritten
from paceline.records.disk import LOG_BYTES, PATIENCE_S, Appender, LogStream
from paceline.records.heartbeats import Beat
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.train.control import Ask, Requests
from paceline.train.verdict import Tell, explain, outcome_of, save_verdict

MAX_TOLD, MAX_IDS_TOLD = 32_000, 1000
ASKS = {
    signal.SIGTERM: Ask.PREEMPT,
    signal.SIGUSR2: Ask.PREEMPT,
    signal.SIGINT: Ask.INTERRUPT,
}


@dataclass(frozen=True)
class RankSpec:
    """What a rank is started with. It travels through a pipe: the environment, which may hold
    secrets, is never written to a file."""

    run_dir: str
    working_dir: str
    environment: dict[str, str]
    place: RankId
    store: StoreAddress
    supervisor_pid: int
    temporary: str  # where the fork server's socket is; a killed supervisor leaves it behind
    task: Task
    workload: str


def rank_main(spec: RankSpec, supervisor: Connection | None = None) -> None:
    """Run one rank to its verdict. A failure ends the process with the outcome's exit code."""
    run, tell = RunDir(Path(spec.run_dir)), partial(_tell, supervisor)
    context = RankContext(run, spec.place, spec.store, Requests(), spec.workload, tell)
    _apply_environment(spec)
    os.setpgid(0, 0)  # Ctrl-C reaches the supervisor alone, which ends the ranks in order
    _redirect(run, spec.place.rank)
    _die_with(spec.supervisor_pid, spec.temporary)
    dump_stacks_on_request(run, spec.place.rank)
    _take_signals(context.requests if spec.task.polls_requests else None)
    try:
        spec.task.work(context)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _require_verdict(context, error)
        _end_children()
        os._exit(outcome_of(error).exit_code)
    _end_children()
    if dist.is_initialized():
        dist.destroy_process_group()
    _release_semaphores()
    sys.stdout.flush()
    os._exit(0)  # a thread that the user left running must not keep a finished rank


def _take_signals(requests: Requests | None) -> None:
    """Take back what the fork server ignores. A task that polls `requests` finds there what signals
    asked for; one that does not (None) keeps the default handlers and dies on a signal."""
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


def _tell(supervisor: Connection | None, word: RankVerdict | Beat) -> None:
    """Send a rank's verdict or heartbeat to its supervisor through a pipe, which needs no disk. The
    pipe's buffer holds all of it, so nobody waits for the rest."""
    if supervisor is None:
        return
    text = word.to_line() if isinstance(word, Beat) else word.to_json()
    if isinstance(word, RankVerdict) and len(text) > MAX_TOLD:
        error = word.error and word.error.model_copy(update={"traceback": ""})
        short = {"error": error, "bad_sample_ids": word.bad_sample_ids[:MAX_IDS_TOLD]}
        text = word.model_copy(update=short).to_json()
    with suppress(OSError):  # it is gone, and so is this rank in a moment
        supervisor.send_bytes(text.encode())


def hear(word: bytes) -> RankVerdict | Beat:
    """Parse what a rank has sent to its supervisor."""
    body = json.loads(word)
    if body.pop("schema", None) is None:
        return Beat.from_line(word)
    return RankVerdict.model_validate(body)


def save_failure(
    run: RunDir, rank: int, error: BaseException, tell: Tell = lambda word: None
) -> None:
    """Save the verdict of a rank whose task never began."""
    verdict = RankVerdict(
        rank=rank,
        host=socket.gethostname(),
        outcome=outcome_of(error),
        step=0,
        ended_at=wall_time(),
        error=explain(error),
        unwritten=list_unwritten(run),
    )
    save_verdict(run, verdict, tell)


def _require_verdict(context: RankContext, error: BaseException) -> None:
    """Save a verdict for a rank that failed before its task could."""
    run, rank = context.run, context.place.rank
    if not run.verdict(rank).is_file() and run.verdict(rank) not in run.lost.by_file:
        save_failure(run, rank, error, context.tell)


def _end_children() -> None:
    """Kill loader processes: they ignore TERM, and one that hangs in a user's code would outlive
    the rank."""
    for child in multiprocessing.active_children():
        child.kill()


def _release_semaphores() -> None:
    """Release the semaphores of libraries' worker pools, such as the compiler's: `os._exit` runs no
    clean-up, and the tracker that we share with the supervisor would complain on its screen."""
    registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
    clean_up = synchronize.SemLock._cleanup  # type: ignore[attr-defined]
    for registered in list(registry.values()):
        if registered._callback is clean_up:
            registered()


def _apply_environment(spec: RankSpec) -> None:
    """Replace the variables inherited from the fork server: those of its process's first run."""
    os.environ.clear()
    os.environ.update(spec.environment)
    os.chdir(spec.working_dir)


def _redirect(run: RunDir, rank: int) -> None:
    """Send stdout and stderr of this process, C++ included, to its own log, line by line. Printing
    from Python never fails on a full disk, and never waits for a slow one."""
    file = Appender(run.rank_log(rank), run.lost, LOG_BYTES)
    try:
        run.make_rank(rank)
        handle = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # what Python prints is held back, and tried again
        handle = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    sys.stdout = sys.__stdout__ = LogStream.open_text(file, 1, PATIENCE_S)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = LogStream.open_text(file, 2, PATIENCE_S)  # type: ignore[misc]
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)


def dump_stacks_on_request(run: RunDir, rank: int) -> TextIO | None:
    """Have SIGUSR1 write every thread's stack there, from C: a rank stuck in C++ answers too. The
    file's existence tells the supervisor that this process can take the signal. Return the file."""
    path = run.stacks(rank)
    early = path.with_name("stacks.tmp")
    try:
        file = early.open("a")  # faulthandler keeps it open
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
        early.rename(path)
        return file
    except OSError:  # no file: the supervisor does not ask
        faulthandler.unregister(signal.SIGUSR1)
        return None


def _leave_fork_server() -> None:
    """Close the pipe that keeps the fork server alive, of which every child has a copy. A rank
    needs no fork server; a user's code that does gets its own."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _die_with(supervisor_pid: int, temporary: str) -> None:
    """End this rank when the supervisor is gone, however it went: no orphan holds a GPU."""
    _leave_fork_server()
    # The fork server leaves a moment after the supervisor, and the kernel then ends this process
    # even if some C code holds the interpreter and the thread below cannot run.
    die_with_parent()
    parent = os.pidfd_open(supervisor_pid)

    def watch() -> None:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.poll()
        shutil.rmtree(temporary, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # with it what it started itself

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
