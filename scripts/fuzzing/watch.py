"""Watches one case: does it end in time, and does it run, load or write what reading never may?

Reading must not start a program, unpickle, or compile or import what lies in the folder of inputs.
An audit hook sees that inside of this process, a canary file whatever else happens; files that are
written outside of the folder are seen by the same hook. A hang is an alarm; code that does not come
back to Python for it is ended, with its stack, by faulthandler.
"""

import faulthandler
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

CANARY = "paceline_canary"  # no module of that name may be imported
STARTS = frozenset(
    {
        "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn",
        "subprocess.Popen", "pickle.find_class",
    }
)  # fmt: skip
# A plan of nsa for GPUs measures dense attention in a program of ours, which is given numbers.
MEASURES = ["-m", "paceline.attention.crossover"]
WRITES = 0o3  # O_WRONLY and O_RDWR
MEMORY_BYTES = 4 << 30  # more than any case may take beside what is loaded: a MemoryError
DEAF_FACTOR = 6  # how much longer than an alarm we wait for code that hears none


class Hang(BaseException):
    """The alarm of a case: not an Exception, so that no handler of ours takes it for one."""


class Watch:
    """What is seen of the case that runs now; `folder` is where inputs lie."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = str(folder), limit_s
        self.canary = folder / "CANARY"
        self.is_on = False
        self.armed_at = -math.inf
        self.runs: list[str] = []
        self.writes: list[str] = []
        sys.addaudithook(self._hear)
        signal.signal(signal.SIGALRM, self._ring)

    @contextmanager
    def case(self) -> Iterator[None]:
        """Watch what happens inside; `Hang` is raised there when the time is over."""
        self.runs, self.writes = [], []
        self._arm()
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self.canary.exists():
                self.runs.append("the canary was touched")
                self.canary.unlink()

    def _arm(self) -> None:
        """Let faulthandler end us when no case begins for long: not armed anew for each of them, as
        that starts a thread."""
        now = time.monotonic()
        if now - self.armed_at > self.limit_s:
            self.armed_at = now
            wait_s = DEAF_FACTOR * self.limit_s
            faulthandler.dump_traceback_later(wait_s, exit=True, file=sys.__stderr__)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self.is_on:
            raise Hang

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "subprocess.Popen" and list(args[1][1:3]) == MEASURES:
            return
        if event in STARTS:
            self.runs.append(f"{event} {args!r:.200}")
        elif event == "open":
            self._hear_open(*args)
        elif event in ("compile", "exec", "import", "ctypes.dlopen") and self._is_ours(event, args):
            self.runs.append(f"{event} {args!r:.200}")

    def _is_ours(self, event: str, args: tuple[Any, ...]) -> bool:
        """Tell whether code comes from the inputs: by its file, or by what it says."""
        if event == "exec":
            return str(getattr(args[0], "co_filename", "")).startswith(self.folder)
        told = [word.decode(errors="replace") if isinstance(word, bytes) else word for word in args]
        texts = [word for word in told if isinstance(word, str)]
        return any(text.startswith(self.folder) or CANARY in text for text in texts)

    def _hear_open(self, path: object, mode: object, flags: int) -> None:
        if flags & WRITES and isinstance(path, str | bytes):
            name = path.decode(errors="replace") if isinstance(path, bytes) else path
            if not name.startswith((self.folder, "/dev/null")) and name[:1] == "/":
                self.writes.append(name)


def limit_memory() -> None:
    """Make a case that asks for too much memory a MemoryError of its own, not the machine's end."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
