"""What torchrun, srun, mpirun and deepspeed have in common: a command that starts members.

Each rank has a supervisor of its own on its machine (member.py); this process watches the command,
passes requests on, and makes sure that nothing of it is left.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from paceline.errors import ClusterError
from paceline.launch.base import MEMBER, LaunchEnd, Order
from paceline.launch.member import load_ends, starter_variable
from paceline.launch.pulse import Pulse
from paceline.launch.supervisor import POLL_S, Notes, noted_signals
from paceline.records import LaunchPlan, Limits
from paceline.rundir import RunDir

PR_SET_PDEATHSIG = 1
EXTRA_S = 15.0  # members need their own grace before the command may be killed
LAST_LINES = 8


def member_argv(order: Order) -> list[str]:
    """What every rank runs: this very python, so that all nodes use the same environment."""
    return [sys.executable, *MEMBER, order.run_dir]


def require_program(name: str, hint: str) -> None:
    if shutil.which(name) is None:
        raise ClusterError(f"{name} is not on this machine's PATH\nhint: {hint}")


def run_command(launch: LaunchPlan, run: RunDir, stop: int = signal.SIGTERM) -> LaunchEnd:
    """Run the plan's command to its end; its own output goes to launcher.log. `stop` is the signal
    by which this launcher lets its ranks end in order."""
    name = Path(launch.argv[0]).name
    with noted_signals() as notes, run.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            launch.argv,
            env=dict(os.environ) | launch.env | starter_variable(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on, once
            preexec_fn=partial(_end_with_parent, stop),
        )
        try:
            end = _watch(process, notes, run, launch, stop)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            _end_session(process.pid, launch.limits.grace_s + EXTRA_S)
    ends = load_ends(run, launch.crew.world_size)
    asked = notes.ending[0] if notes.ending and not end.had_failed else None
    refusal = ""
    if end.stall:
        refusal = f"{name} had not started every rank in time{_last_words(run.launcher_log)}"
    elif process.returncode and not ends and asked is None:
        refusal = f"{name} ended with exit code {process.returncode}"
        refusal += f" before any rank had started{_last_words(run.launcher_log)}"
    return LaunchEnd(ends=ends, signal=asked, refusal=refusal, stall=end.stall)


@dataclass
class CommandEnd:
    had_failed: bool = False  # a rank, before anybody asked for the end
    stall: str = ""


def _watch(
    process: subprocess.Popen[bytes], notes: Notes, run: RunDir, launch: LaunchPlan, stop: int
) -> CommandEnd:
    """Until the command has ended. Members keep the deadlines of their own ranks; this process
    those of ranks that never came."""
    dumps, kill_at, end = 0, None, CommandEnd()
    pulse = Pulse(run, range(launch.crew.world_size), _later(launch.limits))
    while process.poll() is None:
        if notes.dumps > dumps:
            dumps = notes.dumps
            request_dump(run)
        if kill_at is None and not notes.ending:
            end.stall = pulse.missed() or ""
        if (notes.ending or end.stall) and kill_at is None:
            ends = load_ends(run, launch.crew.world_size)
            end.had_failed = any(found.failed for found in ends.values())
            kill_at = time.monotonic() + launch.limits.grace_s + EXTRA_S
            os.killpg(process.pid, stop)  # deepspeed passes nothing on to its own child
        impatient = notes.ending.count(signal.SIGINT) > 1
        if kill_at is not None and (impatient or time.monotonic() > kill_at):
            process.kill()
        time.sleep(POLL_S)
    return end


def _later(limits: Limits) -> Limits:
    """Members act first: they know which rank it is."""
    later = {
        name: getattr(limits, name) + EXTRA_S
        for name in ("start_s", "progress_s", "total_s")
        if getattr(limits, name) is not None
    }
    return limits.model_copy(update=later)


def _end_session(session: int, patience_s: float) -> None:
    """What the command started in the session we made for it and left behind when it went."""
    deadline = time.monotonic() + patience_s
    while left := _members_of(session):
        for process in left:
            with suppress(psutil.Error):
                process.terminate() if time.monotonic() < deadline else process.kill()
        psutil.wait_procs(left, timeout=1.0)


def _members_of(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def request_dump(run: RunDir) -> None:
    """Ask every rank's supervisor for stacks through a file: some launchers die of SIGUSR1."""
    run.dump_request.parent.mkdir(exist_ok=True)
    run.dump_request.touch()


def _end_with_parent(stop: int) -> None:
    """The command is our direct child, so it can ask the kernel for a signal when we are gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, stop)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return ":\n" + "\n".join(lines[-LAST_LINES:]) if lines else ""
