"""What torchrun, srun, mpirun and deepspeed share: a command that starts the ranks.

Each rank has a supervisor of its own on its machine (member.py); this process watches the command,
passes requests on, and makes sure that nothing of it is left.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from paceline.errors import ClusterError
from paceline.launch.base import LaunchOrder
from paceline.launch.deadlines import Deadlines
from paceline.launch.ending import Ending, LaunchEnd, judge_end
from paceline.launch.member import load_ends, starter_variables
from paceline.launch.signals import SignalLog, kill_time, logged_signals, repeats
from paceline.launch.supervisor import POLL_S
from paceline.machine.process import die_with_parent
from paceline.machine.secret import make_secret
from paceline.records import LaunchPlan, Limits
from paceline.records.disk import discard
from paceline.records.files import modified_at, write_atomic
from paceline.records.rundir import RunDir

EXTRA_S = 15.0  # members need their own grace before the command may be killed
HASTE_S = 3.0  # the same after a second Ctrl-C, when they kill at once
LAST_LINES = 8


def member_argv(order: LaunchOrder) -> list[str]:
    """Return what every rank runs: this very python, so that all nodes have one environment."""
    return [sys.executable, "-m", order.task.module, order.run_dir]


def require_program(name: str, hint: str) -> None:
    if shutil.which(name) is None:
        raise ClusterError(f"{name} is not on this machine's PATH\nhint: {hint}")


def run_command(launch: LaunchPlan, run: RunDir, stop: int = signal.SIGTERM) -> Ending:
    """Run the plan's command to its end, and judge it; its own output goes to launcher.log. `stop`
    is SIGUSR2 for a launcher that passes it on to its ranks, SIGTERM for one that does not."""
    discard(run.stop_request)
    secret = make_secret(run.secret)
    with logged_signals() as signals, run.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            launch.argv,
            env=dict(os.environ) | launch.env | starter_variables(launch, secret),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on, once
            # It is our direct child, so the kernel can signal it when we are gone.
            preexec_fn=partial(die_with_parent, stop),
        )
        watch = CommandWatch(process, signals, run, launch, stop)
        try:
            watch.until_end()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            end_session(process.pid, launch.limits.grace_s + EXTRA_S)
            discard(run.stop_request)
            discard(run.secret)
    return judge_end(run, launch.crew.world_size, watch.seen())


class CommandWatch:
    """Watches a command until it has ended. Members keep the deadlines of their own ranks; this
    process those of ranks that never came."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        signals: SignalLog,
        run: RunDir,
        launch: LaunchPlan,
        stop: int,
    ) -> None:
        self.process, self.signals, self.run, self.launch = process, signals, run, launch
        self.stop = stop
        self.had_failed = False  # a rank, before anybody asked for the end
        self.stall = ""  # the deadline that ranks missed which never came
        self._num_ranks = launch.crew.world_size
        self._dumps = self._num_asked = 0
        self._kill_at = float("inf")
        self._watch_attempt()

    def until_end(self) -> None:
        while self.process.poll() is None:
            self._answer()
            if self.signals.stops:
                self._pass_on()
            elif not self.stall:
                self._keep_deadlines()
            if time.monotonic() > self._kill_at:
                self.process.kill()
            time.sleep(POLL_S)

    def seen(self) -> LaunchEnd:
        """Return the ends that members have left, and why there are none if the command failed."""
        name, ends = Path(self.launch.argv[0]).name, load_ends(self.run, self._num_ranks)
        asked = self.signals.first if not self.had_failed else None
        refusal = ""
        if self.stall:
            refusal = f"{name} had not started every rank in time{self._last_lines()}"
        elif self.process.returncode and not ends and asked is None:
            refusal = f"{name} ended with exit code {self.process.returncode}"
            refusal += f" before any rank had started{self._last_lines()}"
        return LaunchEnd(ends=ends, signal=asked, refusal=refusal, stall=self.stall)

    def _last_lines(self) -> str:
        try:
            text = self.run.launcher_log.read_text(errors="replace")
        except OSError:  # gone with its directory
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return ":\n" + "\n".join(lines[-LAST_LINES:]) if lines else ""

    def _answer(self) -> None:
        if self.signals.dumps > self._dumps:
            self._dumps = self.signals.dumps
            request_dump(self.run)

    def _pass_on(self) -> None:
        """Pass requests to stop on through a file: torchrun and mpirun give their ranks less time
        than they may need, and make one signal of all. Do so through the launcher as well where
        that does no harm, for members on other machines that do not see the file soon."""
        asked = [self.signals.stops[0], *repeats(self.signals.stops)]
        if len(asked) == self._num_asked:
            return
        if not self._num_asked:
            self.had_failed = self._has_failed()
        self._num_asked = len(asked)
        words = " ".join(str(stop.number) for stop in asked)
        was_written = self.run.lost.keep(self.run.stop_request, words, write_control)
        if self.stop == signal.SIGUSR2 or not was_written:
            os.killpg(self.process.pid, self.stop)
        kill_at = kill_time(self.signals.stops, self.launch.limits.grace_s)
        # Members end their ranks first.
        self._kill_at = kill_at + (EXTRA_S if kill_at > asked[-1].at else HASTE_S)

    def _keep_deadlines(self) -> None:
        if modified_at(self.run.attempt) != self._attempt_seen:
            self._watch_attempt()
        self.stall = self._deadlines.missed() or ""
        if self.stall:
            self.had_failed = self._has_failed()
            self._kill_at = time.monotonic() + self.launch.limits.grace_s + EXTRA_S
            os.killpg(self.process.pid, self.stop)  # deepspeed passes nothing on to its own child

    def _watch_attempt(self) -> None:
        """Begin to watch an attempt: each has its heartbeats, and its time to start."""
        self._attempt_seen = modified_at(self.run.attempt)
        ranks, limits = range(self._num_ranks), _later(self.launch.limits)
        self._deadlines = Deadlines(self.run, ranks, limits)

    def _has_failed(self) -> bool:
        ends = load_ends(self.run, self._num_ranks)
        return any(found.failed for found in ends.values())


def _later(limits: Limits) -> Limits:
    """Return later limits than the members have: they act first, knowing which rank it is."""
    later = {
        name: getattr(limits, name) + EXTRA_S
        for name in ("start_s", "progress_s", "total_s")
        if getattr(limits, name) is not None
    }
    return limits.model_copy(update=later)


def end_session(session: int, patience_s: float) -> None:
    """End what the command started, in the session we made for it, and left behind."""
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
    run.lost.keep(run.dump_request, "", write_control)


def write_control(path: Path, content: str) -> None:
    """Write a request into the folder that ranks' supervisors look into."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, content)
