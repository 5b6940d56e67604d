"""Threads of a rank that write while it trains.

heartbeat_rank<r>.jsonl   this rank is alive, in this phase of this step
telemetry.csv             what GPUs, host and ranks do
"""

import mmap
import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from paceline.machine.gpus import Nvml
from paceline.records.heartbeats import Beat
from paceline.records.table_file import TableFile
from paceline.records.tables import MEASURES, TELEMETRY
from paceline.schedules.actions import Action, Kind

MARK = struct.Struct("<q")
ACTION = struct.Struct("<cqq")
NO_ACTION = b"-"


class Progress(Protocol):
    """Where the rank is; the loop's clock."""

    step: int
    phase: str
    marks: int


class Ticker:
    """Calls `tick` every `interval_s` on a daemon thread, and once more when it stops."""

    def __init__(self, interval_s: float, name: str) -> None:
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def tick(self) -> None:
        raise AssertionError("a ticker must say what it does")

    def _run(self) -> None:
        self._tick()
        while not self._stop.wait(self._interval_s):
            self._tick()
        self._tick()

    def _tick(self) -> None:
        with suppress(OSError):  # a full disk must not end the thread
            self.tick()


class StepMark:
    """Keeps the number of the step that a rank has begun in a mapped file: it costs next to
    nothing, and is right to the step however the process ends."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(MARK.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), MARK.size)

    def set(self, step: int) -> None:
        MARK.pack_into(self._memory, 0, step)


def read_mark(path: Path) -> int:
    """Return the step that a rank has begun; 0 where it began none."""
    try:
        return int(MARK.unpack(path.read_bytes())[0])
    except (OSError, struct.error):
        return 0


class ActionMark:
    """Keeps the action of a pipeline that a rank is in, as StepMark keeps the step; None: it is in
    none."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(ACTION.pack(NO_ACTION, 0, 0))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), ACTION.size)

    def set(self, action: Action | None) -> None:
        if action is None:
            ACTION.pack_into(self._memory, 0, NO_ACTION, 0, 0)
        else:
            kind = action.kind.encode()
            ACTION.pack_into(self._memory, 0, kind, action.stage, action.microbatch)


def read_action(path: Path) -> str:
    """Return `stage 1, forward of microbatch 3`; empty where the rank was in no action."""
    try:
        kind, stage, microbatch = ACTION.unpack(path.read_bytes())
        return Action(Kind(kind.decode()), stage, microbatch).words
    except (OSError, struct.error, ValueError):
        return ""


class Heartbeat(Ticker):
    """Writes that this rank is alive, with its step and phase."""

    def __init__(self, path: Path, rank: int, progress: Progress, interval_s: float) -> None:
        super().__init__(interval_s, "heartbeat")
        self._file = path.open("a", buffering=1)
        self._rank, self._progress = rank, progress

    def tick(self) -> None:
        now, at = round(time.time(), 3), self._progress
        self._file.write(Beat(now, self._rank, at.step, at.phase, at.marks).to_line())


class Telemetry(Ticker):
    """Samples what the machine does: its first rank the host and each GPU that this run may use,
    the others only their own memory."""

    def __init__(self, path: Path, interval_s: float, is_first: bool) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = TableFile(path, TELEMETRY)
        self._process = psutil.Process(os.getpid())
        self._is_first = is_first
        self._nvml = Nvml.open() if is_first else None
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = f"{time.time():.3f}"
        if self._is_first:
            self._file.add({"time": now, "source": "host", **self._host()})
        else:
            rss_bytes = self._process.memory_info().rss
            self._file.add({"time": now, "source": "rank", "rss_bytes": rss_bytes})
        for handle in self._nvml.handles if self._nvml else []:
            sample = handle.sample()
            known = {name: sample.get(name) for name in MEASURES}
            self._file.add({"time": now, "source": f"gpu{handle.index}", **known})
        self._file.flush()

    def _host(self) -> dict[str, float]:
        return {
            "utilisation_percent": psutil.cpu_percent(interval=None),
            "memory_bytes": psutil.virtual_memory().used,
            "rss_bytes": self._process.memory_info().rss,
        }
