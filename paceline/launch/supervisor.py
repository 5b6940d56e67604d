"""The owner of ranks on this machine: starts them, watches them, ends them, leaves none behind.

It never touches CUDA and never waits for a rank, so whatever a rank is stuck in, this answers. It
is a loop in the main thread; signal handlers only write to a log that the loop reads.

    a signal to us       ranks are asked to stop in order, and killed when the grace is over
    a rank has failed    the others are killed at once: without it they can do nothing useful, and
                         one that is busy outside a collective would not notice for long
"""

import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path

from paceline.errors import Outcome
from paceline.launch.deadlines import Deadline, Deadlines
from paceline.launch.ending import LaunchEnd
from paceline.launch.process import REAP_S, RankProcess, count_oom_kills, wait_for_any
from paceline.launch.rank import RankSpec
from paceline.launch.signals import SignalLog, kill_time, request_for
from paceline.machine.fork_server import set_preloads
from paceline.records import Limits, RankEnd, RankVerdict
from paceline.records.disk import Appender, release, reserve, save_last
from paceline.records.files import modified_at
from paceline.records.rundir import RunDir
from paceline.records.words import visible

POLL_S = 0.05
DUMP_S = 2.0  # how long a stack dump may take before ranks are ended
CONTROL_S = 1.0
ASK_S = 1.0  # a rank that is only starting ignores the request: it is repeated
SETTLE_S = 0.2
VERDICT_BYTES, END_BYTES = 32 << 10, 4 << 10  # of room that is reserved for what a rank says last


class Supervisor:
    """Runs ranks to their ends. `is_over` says that the run has ended elsewhere."""

    def __init__(
        self,
        run: RunDir,
        specs: Sequence[RankSpec],
        limits: Limits,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run_dir, self.specs, self.limits, self.is_over = run, specs, limits, is_over
        self.ranks: list[RankProcess] = []
        self.stall: Deadline | None = None
        self.signal: int | None = None
        self.has_killed = self._is_gone = False
        self._dumps_done = 0
        self._asked_at = self._control_at = self._looked_at = 0.0
        self._control_seen = modified_at(run.dump_request)
        self._oom_kills = count_oom_kills()
        self._home = run.identity()

    def run(self, signals: SignalLog) -> LaunchEnd:
        """Run all ranks. The caller logs `signals`: one may have come before the first rank."""
        set_preloads()
        try:
            self._start(signals)
            beats = {rank.rank: partial(getattr, rank, "beat") for rank in self.ranks}
            deadlines = Deadlines(self.run_dir, beats, self.limits)
            while self._wait():
                self._answer(signals)
                if signals.stops and not self.has_killed:
                    self.signal = signals.first
                    self._ask_to_stop()
                if why := self._why_kill(signals, deadlines):
                    self._note_silence(deadlines)
                    self._kill_all(why)
                self._end_lingering()
        finally:
            self._kill_all("the supervisor leaves")
        self._settle(signals)
        return self._conclude()

    def _start(self, signals: SignalLog) -> None:
        for spec in self.specs:
            if not signals.stops:
                self._reserve(spec.place.rank)
                self.ranks.append(RankProcess.start(spec))
                self._log(f"rank {spec.place.rank} is process {self.ranks[-1].process.pid}")

    def _reserve(self, rank: int) -> None:
        """Take the room of what says how a rank has ended. Without it the pipe has to do."""
        with suppress(OSError):
            self.run_dir.make_rank(rank)
            reserve(self.run_dir.verdict(rank), VERDICT_BYTES)
            reserve(self.run_dir.rank_end(rank), END_BYTES)

    def _log(self, text: str) -> None:
        log_line(self.run_dir, text)

    def _wait(self) -> bool:
        """Wait until something happens or a moment has passed; False once no rank is alive."""
        alive = [r.process.sentinel for r in self.ranks if r.is_alive]
        if alive:
            connection.wait(alive, timeout=POLL_S)
        for rank in self.ranks:
            rank.listen()
        return any(r.is_alive for r in self.ranks)

    def _answer(self, signals: SignalLog) -> None:
        """Answer requests for stacks, by signal or by file; log requests to stop by file. There are
        files because some launchers swallow signals."""
        asked = False
        if time.monotonic() - self._control_at >= CONTROL_S:
            self._control_at = time.monotonic()
            self._is_gone = self.run_dir.is_gone(self._home)
            asked = self._dump_was_requested()
            self._read_stop_request(signals)
        if signals.dumps > self._dumps_done or asked:
            self._dumps_done = signals.dumps
            self.dump_stacks("on request")

    def _dump_was_requested(self) -> bool:
        found = modified_at(self.run_dir.dump_request)
        is_new = found != self._control_seen
        self._control_seen = found
        return is_new and found is not None

    def _read_stop_request(self, signals: SignalLog) -> None:
        """Log the stops that our starter was asked for (command.py) and the launcher kept back."""
        try:
            asked = [int(word) for word in self.run_dir.stop_request.read_text().split()]
        except (OSError, ValueError):
            return
        for number in asked[len(signals.stops) :]:
            signals.add(number)

    def _why_kill(self, signals: SignalLog, deadlines: Deadlines) -> str:
        """Return the reason to kill all ranks, or "". The order is that of what is known for sure:

        1. a rank has failed, and not because a collective timed out: it is the cause;
        2. the run has ended elsewhere: another rank, or our launcher, is the cause; or its
           directory is gone, and nothing that it does can be kept;
        3. we were asked to stop: ranks have the grace, and no deadline counts any more;
        4. a deadline has passed. A collective that timed out is one too: the rank that says so
           has only waited for another, which the stacks of all ranks will show.
        """
        failed = [r for r in self.ranks if not r.is_alive and self._has_failed(r)]
        if failed and not any(self._timed_out(r) for r in failed):
            return f"rank {failed[0].rank} has failed"
        if self.is_over():
            return "the run has ended elsewhere"
        if self._is_gone:
            return "the run directory is gone"
        if signals.stops:
            return self._why_impatient(signals)
        stall: Deadline | None = "collective" if failed else deadlines.missed()
        if stall is None or self.has_killed:
            return ""
        self.stall = stall
        # Before the dump: a stopped process cannot write its stacks, and that is the finding.
        for rank in self.ranks:
            rank.was_stopped = rank.is_stopped
        self.dump_stacks(f"the {stall} deadline has passed")
        return f"the {stall} deadline has passed"

    def _note_silence(self, deadlines: Deadlines) -> None:
        for rank in self.ranks:
            if rank.is_alive:
                rank.silent_s = deadlines.silent_s(rank.rank)

    def _why_impatient(self, signals: SignalLog) -> str:
        """Return why ranks that were asked to stop get no more time, or ""."""
        if len(self.ranks) < len(self.specs):
            return "the signal came before all ranks had started"
        if time.monotonic() < kill_time(signals.stops, self.limits.grace_s):
            return ""
        again = len(signals.stops) > 1
        return "we got another signal" if again else f"{self.limits.grace_s:g} s of grace are over"

    def _has_failed(self, rank: RankProcess) -> bool:
        """True by its verdict, not its exit code: gloo sometimes aborts in teardown, after all is
        done and the verdict is written."""
        verdict = self._verdict(rank)
        return verdict is None or verdict.error is not None

    def _timed_out(self, rank: RankProcess) -> bool:
        verdict = self._verdict(rank)
        return verdict is not None and verdict.outcome is Outcome.STALL

    def _verdict(self, rank: RankProcess) -> RankVerdict | None:
        path = self.run_dir.verdict(rank.rank)
        return RankVerdict.load(path) if path.is_file() else rank.verdict

    def _end_lingering(self) -> None:
        """Kill a rank that has left its verdict and stays: a thread of the user's keeps it, or a
        process group that cannot be torn down. Its verdict counts."""
        now = time.monotonic()
        if now - self._looked_at < CONTROL_S:
            return
        self._looked_at = now
        for rank in self.ranks:
            if rank.is_alive and self._verdict(rank) is not None:
                rank.done_at = rank.done_at or now
                if now - rank.done_at > self.limits.grace_s:
                    self._log(f"rank {rank.rank} is done and does not leave: killed")
                    rank.signal(signal.SIGKILL)

    def dump_stacks(self, why: str) -> None:
        """Write every thread of every rank to its stacks.txt, which exists once it can answer."""
        before = {}
        for rank in self.ranks:
            path = self.run_dir.stacks(rank.rank)
            if rank.is_alive and path.is_file() and not rank.is_stopped:
                file = Appender(path, self.run_dir.lost, hold=0)
                file.append(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')}: {why}\n".encode())
                file.close()
                before[path] = _size(path)
                rank.signal(signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and _unchanged(before):
            time.sleep(POLL_S)

    def _ask_to_stop(self) -> None:
        """Ask ranks to agree on a step, write a checkpoint and leave. They are asked again and
        again, which changes nothing: one that was only starting has ignored the first time."""
        assert self.signal is not None, "somebody has asked us"
        if time.monotonic() - self._asked_at < ASK_S:
            return
        self._asked_at = time.monotonic()
        name, request = signal.Signals(self.signal).name, request_for(self.signal)
        for rank in self.ranks:
            if rank.is_alive:
                if not rank.asked_to_end:
                    self._log(f"rank {rank.rank} is asked to stop: we got {name}")
                rank.asked_to_end = True
                rank.signal(signal.SIGKILL if rank.is_stopped else request)

    def _kill_all(self, why: str) -> None:
        for rank in self.ranks:
            if rank.kill():
                self.has_killed = True
                self._log(f"rank {rank.rank} is killed: {why}")
        for rank in self.ranks:
            if rank.pidfd >= 0:
                wait_for_any([rank.pidfd], REAP_S)

    def _settle(self, signals: SignalLog) -> None:
        """Wait a moment for the signal that a failure may be due to: a launcher that ends a run
        signals every supervisor, and ranks fail as their peers go. Then the signal is the cause."""
        if self._fails_by_signals and any(self._has_failed(r) for r in self.ranks):
            if not signals.stops:
                time.sleep(SETTLE_S)
        if signals.stops and self.signal is None and not self.has_killed:
            self.signal = signals.first
            for rank in self.ranks:
                rank.asked_to_end = True

    @property
    def _fails_by_signals(self) -> bool:
        """Say whether a rank may fail by a signal that we get, too: it has peers elsewhere, or dies
        on one itself. Where neither is so, the next attempt need not wait."""
        first = self.specs[0]
        return len(self.specs) < first.place.world_size or not first.task.polls_requests

    def _conclude(self) -> LaunchEnd:
        oom_kills = count_oom_kills() - self._oom_kills
        ends = {rank.rank: self._end_of(rank, oom_kills > 0) for rank in self.ranks}
        for rank, end in ends.items():
            self._log(f"rank {rank} ended with exit code {end.exit_code}")
            self.run_dir.lost.keep(self.run_dir.rank_end(rank), end.to_json(), save_last)
            release(self.run_dir.verdict(rank))
        told = {rank.rank: rank.verdict for rank in self.ranks if rank.verdict is not None}
        for rank, verdict in told.items():  # which its own word cannot tell
            if not self.run_dir.verdict(rank).is_file():
                self.run_dir.lost.keep(self.run_dir.verdict(rank), verdict.to_json())
        return LaunchEnd(ends=ends, signal=self.signal, told=told)

    def _end_of(self, rank: RankProcess, had_oom_kill: bool) -> RankEnd:
        code = rank.reap()
        was_killed = code == -signal.SIGKILL and not rank.asked_to_end
        return RankEnd(
            rank=rank.rank,
            host=socket.gethostname(),
            exit_code=code,
            asked_to_end=rank.asked_to_end,
            signal=self.signal,
            stall=self.stall or "",
            failed=self._has_failed(rank),
            was_stopped=rank.was_stopped,
            silent_s=rank.silent_s,
            ran_out_of_memory=was_killed and had_oom_kill,
        )


def log_line(run: RunDir, text: str) -> None:
    """Add a line to launcher.log, which the supervisors of all machines share."""
    log = Appender(run.launcher_log, run.lost, hold=0)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    log.append(f"{now} {socket.gethostname()}: {visible(text)}\n".encode())
    log.close()


def _unchanged(before: dict[Path, int]) -> bool:
    """True while a dump has not ended: a file has not grown yet."""
    return any(_size(path) == size for path, size in before.items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
