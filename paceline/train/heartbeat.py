"""heartbeat_rank<r>.jsonl: this rank is alive, in this phase of this step, written by a thread."""

import mmap
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from paceline.records.heartbeats import Beat
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
        with suppress(OSError):  # a full disk is no reason to fall silent for ever
            self.tick()


class StepMark:
    """The number of the step that a rank has begun, in a file that is memory of ours: it costs next
    to nothing, and is right to the step however the process ends."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(MARK.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), MARK.size)

    def set(self, step: int) -> None:
        MARK.pack_into(self._memory, 0, step)


def read_mark(path: Path) -> int:
    """0 where no step was begun."""
    try:
        return int(MARK.unpack(path.read_bytes())[0])
    except (OSError, struct.error):
        return 0


class ActionMark:
    """The action of a pipeline that a rank is in, kept as a step is; None: it is in none."""

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
    """`stage 1, forward of microbatch 3`; empty where the rank was in no action."""
    try:
        kind, stage, microbatch = ACTION.unpack(path.read_bytes())
        return Action(Kind(kind.decode()), stage, microbatch).words
    except (OSError, struct.error, ValueError):
        return ""


class Heartbeat(Ticker):
    def __init__(self, path: Path, rank: int, progress: Progress, interval_s: float) -> None:
        super().__init__(interval_s, "heartbeat")
        self._file = path.open("a", buffering=1)
        self._rank, self._progress = rank, progress

    def tick(self) -> None:
        now, at = round(time.time(), 3), self._progress
        self._file.write(Beat(now, self._rank, at.step, at.phase, at.marks).to_line())
