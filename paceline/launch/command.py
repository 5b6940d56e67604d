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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import ClusterError
from paceline.launch.base import MEMBER, LaunchEnd, Order
from paceline.launch.member import load_ends
from paceline.launch.supervisor import POLL_S, Notes, noted_signals
from paceline.records import LaunchPlan
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
    with noted_signals() as notes, run.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            launch.argv,
            env=dict(os.environ) | launch.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on, once
            preexec_fn=partial(_end_with_parent, stop),
        )
        try:
            _watch(process, notes, run, Ending(stop, launch.limits.grace_s + EXTRA_S))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ends = load_ends(run, launch.crew.world_size)
    failed = any(end.exit_code and not end.asked_to_end for end in ends.values())
    asked = notes.ending[0] if notes.ending and not failed else None
    refusal = ""
    if process.returncode and not ends and asked is None:
        refusal = f"{Path(launch.argv[0]).name} ended with exit code {process.returncode}"
        refusal += f" before any rank had started{_last_words(run.launcher_log)}"
    return LaunchEnd(ends=ends, signal=asked, refusal=refusal)


@dataclass(frozen=True)
class Ending:
    stop: int
    patience_s: float


def _watch(process: subprocess.Popen[bytes], notes: Notes, run: RunDir, ending: Ending) -> None:
    dumps, kill_at = 0, None
    while process.poll() is None:
        if notes.dumps > dumps:
            dumps = notes.dumps
            request_dump(run)
        if notes.ending and kill_at is None:
            kill_at = time.monotonic() + ending.patience_s
            process.send_signal(ending.stop)
        impatient = notes.ending.count(signal.SIGINT) > 1
        if kill_at is not None and (impatient or time.monotonic() > kill_at):
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)


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
