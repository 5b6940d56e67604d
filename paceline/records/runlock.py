"""The lock of a run directory: one live run in it at a time, on whatever machine that is."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from paceline.errors import ConfigError, DiskError
from paceline.records.files import FileLock
from paceline.records.heartbeats import Beat, last_beat

BEATS = "heartbeat_rank*.jsonl"
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
WATCH_S = 40.0  # a machine may keep what it writes to a network file system back for 35 s


class RunLock(FileLock):
    """Held while a run is live; its file names the process that holds it, and is empty once that
    has ended in order.

    The kernel takes the lock back from a process that was killed. But some network file systems
    keep locks on each machine alone: there a name that was left by another machine counts until
    its run has shown no sign of life for a while.
    """

    NAME = ".lock"

    def __init__(self, root: Path, say: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(root / self.NAME, wait=False)
        self._say = say

    def __enter__(self) -> Self:
        try:
            super().__enter__()
        except BlockingIOError as error:
            raise self._is_live() from error
        except OSError as error:
            raise DiskError.of(error) from error
        try:
            self._require_dead_elsewhere()
        except BaseException:
            super().__exit__()
            raise
        with suppress(OSError):  # on a full disk it names nobody, and holds all the same
            self.path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.write_text("")
        super().__exit__()

    def require_free(self) -> None:
        """Raise if the run is alive; leave the file as it is."""
        try:
            super().__enter__()
        except BlockingIOError as error:
            raise self._is_live() from error
        super().__exit__()

    def _owner(self) -> tuple[str, str]:
        """Return process and host of the last owner, as far as the file tells."""
        process, _, host = self.path.read_text(errors="replace").strip().partition(" ")
        return process, host

    def _is_live(self) -> ConfigError:
        process, host = self._owner()
        where = f" on {host}" if host not in ("", socket.gethostname()) else ""
        return ConfigError(
            f"{self.path.parent} belongs to a live run (process {process}{where})\n"
            "hint: wait for it, or give this run another --out"
        )

    def _require_dead_elsewhere(self) -> None:
        process, host = self._owner()
        if host in ("", socket.gethostname()) or _is_local(self.path.parent):
            return
        self._say(
            f"process {process} on {host} has not said that its run is over: looking for"
            f" heartbeats of it for {WATCH_S:g} s"
        )
        before, deadline = self._signs(), time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(WATCH_S / 40)
            if self._signs() != before:
                raise self._is_live()

    def _signs(self) -> list[tuple[Path, Beat]]:
        """Return the last heartbeats of a run's ranks, or of all runs of a sweep."""
        found = [*self.path.parent.glob(BEATS), *self.path.parent.glob(f"runs/*/{BEATS}")]
        return [(path, last_beat(path)) for path in sorted(found)]


def _is_local(folder: Path) -> bool:
    """True on a file system that only this machine can have mounted: its locks are for all."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = {line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == device}
    return bool(kinds) and kinds <= LOCAL
