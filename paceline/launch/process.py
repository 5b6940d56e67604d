"""Ranks as processes of this machine: started, signalled, and ended with all their children."""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from paceline.launch.rank import RankSpec, hear, rank_main
from paceline.records import RankVerdict
from paceline.records.heartbeats import Beat

REAP_S = 10.0
STARTING = threading.Lock()  # two runs of one program may start ranks at the same time


@dataclass
class RankProcess:
    """A rank as a process: signalled through its pidfd, which can never name another's."""

    rank: int
    process: Any
    pidfd: int
    told: Connection  # what it says without a disk: its verdict, heartbeats that were not written
    asked_to_end: bool = False
    was_stopped: bool = False
    silent_s: float = 0.0
    done_at: float = 0.0
    verdict: RankVerdict | None = None
    beat: Beat = Beat()

    @classmethod
    def start(cls, spec: RankSpec) -> "RankProcess":
        context = multiprocessing.get_context("forkserver")
        told, tell = context.Pipe(duplex=False)
        name = f"rank{spec.place.rank}"
        process = context.Process(target=rank_main, args=(spec, tell), name=name)
        with _without_main(name):
            process.start()
        tell.close()
        assert process.pid is not None, "it has been started"
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it is gone already; its exit code tells
            pidfd = -1
        return cls(spec.place.rank, process, pidfd, told)

    def listen(self) -> None:
        """Read what the rank has sent since the last time."""
        with suppress(EOFError, OSError):
            while self.told.poll():
                word = hear(self.told.recv_bytes())
                if isinstance(word, Beat):
                    self.beat = word
                else:
                    self.verdict = word

    @property
    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    @property
    def has_gone(self) -> bool:
        """Return True once the kernel has ended it, a moment before the fork server reports its
        exit code."""
        return self.pidfd < 0 or wait_for_any([self.pidfd], 0)

    @property
    def is_stopped(self) -> bool:
        """Return True for a process that a signal has frozen: it reacts to nothing but KILL."""
        try:
            return psutil.Process(self.process.pid).status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
        except psutil.Error:
            return False

    def signal(self, number: int) -> None:
        if self.pidfd >= 0 and self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> bool:
        """Kill it; return False if it had already ended by itself."""
        if self.has_gone:
            return False
        self.asked_to_end = True
        self.signal(signal.SIGKILL)
        return True

    def reap(self) -> int:
        """Wait for its end, clear away what it started, and return its exit code."""
        self.process.join(timeout=REAP_S)
        _end_group(self.process.pid)
        self.listen()
        self.told.close()
        code = self.process.exitcode
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return int(code) if code is not None else -signal.SIGKILL


@contextmanager
def _without_main(own: str) -> Iterator[None]:
    """While inside, a process of this name is not told which program started it: multiprocessing
    would run that program's file in it once more, and a user's script that calls `paceline.train`
    would train in every rank. A rank needs nothing of it: what it does travels by its name."""
    with STARTING:
        told = spawn.get_preparation_data

        def tell(name: str) -> dict[str, Any]:
            data: dict[str, Any] = told(name)
            mine = ("init_main_from_name", "init_main_from_path") if name == own else ()
            return {key: value for key, value in data.items() if key not in mine}

        spawn.get_preparation_data = tell
        try:
            yield
        finally:
            spawn.get_preparation_data = told


def wait_for_any(handles: Sequence[int], timeout_s: float) -> bool:
    """True once one of them is readable; poll, because select stops at 1024 descriptors."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _end_group(pgid: int) -> None:
    """Kill what a rank started and left in its process group, which is in our own session."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            is_ours = os.getpgid(process.pid) == pgid and os.getsid(process.pid) == os.getsid(0)
            if is_ours and process.pid != pgid:
                process.kill()


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed in our control group to free memory."""
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
