"""The owner of ranks on this machine: starts them, watches them, ends them, leaves none behind.

It never touches CUDA and never waits for a rank, so whatever a rank is stuck in, this answers.
A loop in the main thread; signal handlers only take notes.
"""

import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import Outcome
from paceline.launch.base import LaunchEnd
from paceline.launch.pulse import Deadline, Pulse
from paceline.launch.rank import RankTicket, rank_main
from paceline.records import Limits, RankEnd, RankVerdict
from paceline.rundir import RunDir

POLL_S = 0.05
DUMP_S = 2.0  # how long a stack dump may take before ranks are ended
CONTROL_S = 1.0
SETTLE_S = 0.2
NURSERY = "paceline.launch.nursery"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@dataclass
class Notes:
    """What signals asked for. Handlers write here and do nothing else."""

    ending: list[int] = field(default_factory=list)
    dumps: int = 0


@contextmanager
def noted_signals() -> Iterator[Notes]:
    """Take note of signals meanwhile; afterwards every handler is what it was."""
    notes = Notes()
    if threading.current_thread() is not threading.main_thread():
        yield notes  # only the main thread may have handlers; its owner decides about signals
        return

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            notes.dumps += 1
        else:
            notes.ending.append(number)

    # nohup has had SIGHUP ignored, and so it stays.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    watched = [number for number in (*ENDING, signal.SIGUSR1) if number not in ignored]
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield notes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class RankProcess:
    """A rank as a process: signalled through its pidfd, which can never name another's."""

    rank: int
    process: Any
    pidfd: int
    asked_to_end: bool = False
    was_stopped: bool = False
    done_at: float = 0.0

    @classmethod
    def start(cls, ticket: RankTicket) -> "RankProcess":
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=rank_main, args=(ticket,), name=f"rank{ticket.place.rank}")
        process.start()
        assert process.pid is not None, "it has been started"
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it is gone already; its exit code tells
            pidfd = -1
        return cls(ticket.place.rank, process, pidfd)

    @property
    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    def signal(self, number: int) -> None:
        if self.pidfd >= 0 and self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


class Supervisor:
    """Runs `tickets` to their ends. `is_over` says that the run has ended elsewhere."""

    def __init__(
        self,
        run: RunDir,
        tickets: Sequence[RankTicket],
        limits: Limits,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run_dir, self.tickets, self.limits, self.is_over = run, tickets, limits, is_over
        self.ranks: list[RankProcess] = []
        self.stall: Deadline | None = None
        self.kill_at: float | None = None
        self.signal: int | None = None
        self._dumps_done = 0
        self._control_at = self._looked_at = 0.0
        self._control_seen = _modified_at(run.dump_request)
        self._oom_kills = count_oom_kills()

    def run(self) -> LaunchEnd:
        multiprocessing.set_forkserver_preload([NURSERY, rank_main.__module__])
        with noted_signals() as notes:
            try:
                self._start(notes)
                pulse = Pulse(self.run_dir, [r.rank for r in self.ranks], self.limits)
                while self._wait():
                    self._answer(notes)
                    if self.kill_at is None and self._must_end(notes, pulse):
                        self._ask_to_end()
                    self._escalate(notes)
                    self._end_lingering()
            finally:
                self._kill_all()
            self._settle(notes)
        return self._conclude()

    def _start(self, notes: Notes) -> None:
        for ticket in self.tickets:
            if not notes.ending:
                self.ranks.append(RankProcess.start(ticket))
                self._log(f"rank {ticket.place.rank} is process {self.ranks[-1].process.pid}")

    def _log(self, text: str) -> None:
        """A line in launcher.log, which the supervisors of all machines share."""
        with self.run_dir.launcher_log.open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {socket.gethostname()}: {text}\n")

    def _wait(self) -> bool:
        """Until something happens or a moment has passed; False once no rank is alive."""
        alive = [r.process.sentinel for r in self.ranks if r.is_alive]
        if alive:
            connection.wait(alive, timeout=POLL_S)
        return any(r.is_alive for r in self.ranks)

    def _answer(self, notes: Notes) -> None:
        """Stack dumps on request: by signal, or by the file that a launcher cannot swallow."""
        asked = self._dump_was_requested()
        if notes.dumps > self._dumps_done or asked:
            self._dumps_done = notes.dumps
            self.dump_stacks("on request")

    def _dump_was_requested(self) -> bool:
        if time.monotonic() - self._control_at < CONTROL_S:
            return False
        self._control_at = time.monotonic()
        modified_at = _modified_at(self.run_dir.dump_request)
        is_new = modified_at != self._control_seen
        self._control_seen = modified_at
        return is_new and modified_at is not None

    def _must_end(self, notes: Notes, pulse: Pulse) -> bool:
        if notes.ending:
            self.signal = notes.ending[0]
            return True
        failed = [r for r in self.ranks if not r.is_alive and self._has_failed(r)]
        if any(self._timed_out(r) for r in failed):
            self.stall = "collective"
        elif failed or self.is_over():
            return True
        else:
            self.stall = pulse.missed()
        if self.stall is None:
            return False
        for rank in self.ranks:
            rank.was_stopped = _is_stopped(rank)
        self.dump_stacks(f"the {self.stall} deadline has passed")
        return True

    def _has_failed(self, rank: RankProcess) -> bool:
        """By its own word: gloo sometimes aborts in teardown, after all is done and said."""
        verdict = self._verdict(rank)
        return verdict is None or verdict.error is not None

    def _timed_out(self, rank: RankProcess) -> bool:
        verdict = self._verdict(rank)
        return verdict is not None and verdict.outcome is Outcome.STALL

    def _verdict(self, rank: RankProcess) -> RankVerdict | None:
        path = self.run_dir.verdict(rank.rank)
        return RankVerdict.load(path) if path.is_file() else None

    def _end_lingering(self) -> None:
        """A rank that has said its last word and does not leave: a thread of the user's, or a
        process group that cannot be torn down. Its word stands."""
        now = time.monotonic()
        if now - self._looked_at < CONTROL_S:
            return
        self._looked_at = now
        for rank in self.ranks:
            if rank.is_alive and self.run_dir.verdict(rank.rank).is_file():
                rank.done_at = rank.done_at or now
                if now - rank.done_at > self.limits.grace_s:
                    self._log(f"rank {rank.rank} is done and does not leave: killed")
                    rank.signal(signal.SIGKILL)

    def dump_stacks(self, why: str) -> None:
        """Every thread of every rank into its stacks.txt, which exists once it can answer."""
        before = {}
        for rank in self.ranks:
            path = self.run_dir.stacks(rank.rank)
            if rank.is_alive and path.is_file() and not _is_stopped(rank):
                with path.open("a") as file:
                    file.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}\n")
                before[path] = path.stat().st_size
                rank.signal(signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and _unchanged(before):
            time.sleep(POLL_S)

    def _ask_to_end(self) -> None:
        """TERM to all; one that is stopped cannot hear it and is killed."""
        self.kill_at = time.monotonic() + self.limits.grace_s
        for rank in self.ranks:
            if rank.is_alive:
                rank.asked_to_end = True
                self._log(f"rank {rank.rank} is asked to end: {self._reason()}")
                rank.signal(signal.SIGKILL if _is_stopped(rank) else signal.SIGTERM)

    def _reason(self) -> str:
        if self.signal is not None:
            return f"we got {signal.Signals(self.signal).name}"
        if self.stall is not None:
            return f"the {self.stall} deadline has passed"
        ended = [f"rank {r.rank} has failed" for r in self.ranks if not r.is_alive]
        return ended[0] if ended else "the run has ended elsewhere"

    def _escalate(self, notes: Notes) -> None:
        """KILL when the grace is over, or at the second Ctrl-C."""
        if self.kill_at is None:
            return
        impatient = notes.ending.count(signal.SIGINT) > 1
        if impatient or time.monotonic() > self.kill_at:
            self._kill_all()

    def _kill_all(self) -> None:
        for rank in self.ranks:
            if rank.is_alive:
                rank.asked_to_end = True
                rank.signal(signal.SIGKILL)
        for rank in self.ranks:
            if rank.pidfd >= 0:
                wait_for_any([rank.pidfd], 10.0)

    def _settle(self, notes: Notes) -> None:
        """A launcher that ends a run signals every supervisor, and ranks fail as their peers go.
        A failure beside such a signal is the run's end, not its cause."""
        if any(self._has_failed(r) for r in self.ranks) and not notes.ending:
            time.sleep(SETTLE_S)
        if notes.ending and self.kill_at is None:
            self.signal = notes.ending[0]
            for rank in self.ranks:
                rank.asked_to_end = True

    def _conclude(self) -> LaunchEnd:
        host, oom_kills = socket.gethostname(), count_oom_kills() - self._oom_kills
        ends = {}
        for rank in self.ranks:
            rank.process.join(timeout=10)
            _end_group(rank.process.pid)
            code = rank.process.exitcode
            self._log(f"rank {rank.rank} ended with exit code {code}")
            killed = code == -signal.SIGKILL and not rank.asked_to_end
            ends[rank.rank] = RankEnd(
                rank=rank.rank,
                host=host,
                exit_code=code if code is not None else -signal.SIGKILL,
                asked_to_end=rank.asked_to_end,
                stall=self.stall or "",
                failed=self._has_failed(rank),
                was_stopped=rank.was_stopped,
                ran_out_of_memory=killed and oom_kills > 0,
            )
            self.run_dir.rank(rank.rank).mkdir(parents=True, exist_ok=True)
            ends[rank.rank].save(self.run_dir.rank_end(rank.rank))
            rank.close()
        return LaunchEnd(ends=ends, signal=self.signal)


def wait_for_any(handles: Sequence[int], timeout_s: float) -> bool:
    """True once one of them is readable; poll, because select stops at 1024 descriptors."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _is_stopped(rank: RankProcess) -> bool:
    try:
        return psutil.Process(rank.process.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.Error:
        return False


def _end_group(pgid: int) -> None:
    """What a rank started and left behind in its process group, which is in our own session."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            is_ours = os.getpgid(process.pid) == pgid and os.getsid(process.pid) == os.getsid(0)
            if is_ours and process.pid != pgid:
                process.kill()


def _unchanged(before: dict[Path, int]) -> bool:
    """True while a dump has not ended: a file has not grown yet."""
    return any(path.stat().st_size == size for path, size in before.items())


def _modified_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def count_oom_kills() -> int:
    """Processes that the kernel has killed in our control group for want of memory."""
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition("::")[2]
        for folder in (Path("/sys/fs/cgroup") / group.lstrip("/"), Path("/sys/fs/cgroup")):
            events = folder / "memory.events"
            if events.is_file():
                lines = dict(line.split() for line in events.read_text().splitlines())
                return int(lines["oom_kill"])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return 0
