"""Threads of a rank that write while it trains.

heartbeat_rank<r>.jsonl   this rank is alive, in this phase of this step
telemetry.csv             what GPUs, host and ranks do
"""

import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

import psutil
import torch

from paceline.config.schema import ObserveConfig
from paceline.machine.gpus import Nvml
from paceline.machine.topology import RankId
from paceline.records.disk import Appender, Losses
from paceline.records.heartbeats import Beat
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import MEASURES, TELEMETRY
from paceline.schedules.actions import Action, Kind

MARK = struct.Struct("<q")
ACTION = struct.Struct("<cqq")
NO_ACTION = b"-"
MAX_BEATS = 1000  # that are kept: enough to tell when step 1 began


class Progress(Protocol):
    """Where the rank is; the loop's clock."""

    step: int
    phase: str
    marks: int


class Ticker:
    """Calls `tick` every `interval_s` on a daemon thread, and once more when it stops. An error in
    one call does not prevent the next ones; the first error is reported."""

    def __init__(self, interval_s: float, name: str) -> None:
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def tick(self) -> None:
        raise AssertionError("a ticker must say what it does")

    def tell(self, error: Exception) -> None:
        """Report the first error, as Python reports an exception that ends a thread."""
        caught = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(caught))

    def _run(self) -> None:
        self._tick()
        while not self._stop.wait(self._interval_s):
            self._tick()
        self._tick()

    def _tick(self) -> None:
        try:
            self.tick()
        except OSError:  # a full disk, which is noted by who writes
            return
        except Exception as error:  # whatever it is, the next call may do better
            if not self._has_failed:
                self._has_failed = True
                self.tell(error)


class Mark:
    """Keeps a few bytes in a file, written in place: it costs next to nothing, needs no room, and
    is right however the process ends. It is no mapped file: where a disk has become read-only, a
    page of it would end the process (SIGBUS)."""

    def __init__(self, path: Path, raw: bytes, lost: Losses | None = None) -> None:
        self._path, self._lost = path, Losses() if lost is None else lost
        self._handle: int | None = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._handle = os.open(path, flags, 0o644)
        except OSError as error:
            self._lost.note(path, error, len(raw))
        self.put(raw)

    def put(self, raw: bytes) -> None:
        if self._handle is None:
            return
        try:
            os.pwrite(self._handle, raw, 0)
        except OSError as error:
            self._lost.note(self._path, error, len(raw))


class StepMark(Mark):
    """Keeps the number of the step that a rank has begun."""

    def __init__(self, path: Path, lost: Losses | None = None) -> None:
        super().__init__(path, bytes(MARK.size), lost)

    def set(self, step: int) -> None:
        self.put(MARK.pack(step))


def read_mark(path: Path) -> int:
    """Return the step that a rank has begun; 0 where it began none."""
    try:
        return int(MARK.unpack(path.read_bytes())[0])
    except (OSError, struct.error):
        return 0


class ActionMark(Mark):
    """Keeps the action of a pipeline that a rank is in; None: it is in none."""

    def __init__(self, path: Path, lost: Losses | None = None) -> None:
        super().__init__(path, ACTION.pack(NO_ACTION, 0, 0), lost)

    def set(self, action: Action | None) -> None:
        if action is None:
            self.put(ACTION.pack(NO_ACTION, 0, 0))
        else:
            self.put(ACTION.pack(action.kind.encode(), action.stage, action.microbatch))


def read_action(path: Path) -> str:
    """Return `stage 1, forward of microbatch 3`; empty where the rank was in no action."""
    try:
        kind, stage, microbatch = ACTION.unpack(path.read_bytes())
        return Action(Kind(kind.decode()), stage, microbatch).words
    except (OSError, struct.error, ValueError):
        return ""


class Heartbeat(Ticker):
    """Writes that this rank is alive, with its step and phase: the first beats one after the other,
    and from then on each over the last, so that a long run's file does not grow. Where the disk
    does not take one, the supervisor is told, lest it takes the rank for a frozen one."""

    def __init__(
        self,
        file: Appender,
        rank: int,
        progress: Progress,
        interval_s: float,
        tell: Callable[[Beat], None] = lambda beat: None,
    ) -> None:
        super().__init__(interval_s, "heartbeat")
        self._file, self._rank, self._progress, self._tell = file, rank, progress, tell
        self._num_beats = 0
        self._first_step = 0  # that this rank takes
        self._place, self._moved_at = (0, 0), monotonic()

    def tick(self) -> None:
        now, at = round(wall_time(), 3), self._progress
        beat = Beat(now, self._rank, at.step, at.phase, at.marks, self._still_s(at))
        if not self._write(beat.to_line().encode()):
            self._tell(beat)

    def _still_s(self, at: Progress) -> float:
        """Return for how long the rank has entered no phase, to a tick; 0 up to its first step."""
        place, now = (at.step, at.marks), monotonic()
        self._first_step = self._first_step or at.step
        if place != self._place or at.step == self._first_step:
            self._place, self._moved_at = place, now
        return round(now - self._moved_at, 1)

    def _write(self, line: bytes) -> bool:
        if self._num_beats > MAX_BEATS:
            return self._file.write_over(line)
        self._num_beats += 1
        self._file.append(line)
        return self._file.flush()

    def stop(self) -> None:
        super().stop()
        self._file.close()


class Telemetry(Ticker):
    """Samples what the machine does: its first rank the host and each GPU that this run may use,
    the others only their own memory."""

    def __init__(self, file: TableFile, interval_s: float, is_first: bool) -> None:
        super().__init__(interval_s, "telemetry")
        self._file = file
        self._process = psutil.Process(os.getpid())
        self._is_first = is_first
        self._nvml = Nvml.open() if is_first else None
        self._xids = self._nvml.watch_errors() if self._nvml else None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        psutil.cpu_percent(interval=None)  # the first call only sets the reference point

    def tick(self) -> None:
        now = f"{wall_time():.3f}"
        if self._is_first:
            self._file.add({"time": now, "source": "host", **self._host()})
        else:
            own = {"rss_bytes": self._process.memory_info().rss, **self._allocator()}
            self._file.add({"time": now, "source": "rank", **own})
        for handle in self._nvml.handles if self._nvml else []:
            sample = handle.sample()
            if self._xids is not None:
                sample["xid"] = self._xids.last(handle)
            known = {name: sample.get(name) for name in MEASURES}
            self._file.add({"time": now, "source": f"gpu{handle.index}", **known})
        self._file.flush()

    def stop(self) -> None:
        super().stop()
        self._file.close()

    def _host(self) -> dict[str, float]:
        return {
            "utilisation_percent": psutil.cpu_percent(interval=None),
            "memory_bytes": psutil.virtual_memory().used,
            "rss_bytes": self._process.memory_info().rss,
            **self._allocator(),
        }

    def _allocator(self) -> dict[str, float]:
        """Return how often torch had to empty its cache to find room on this rank's GPU."""
        if self._device is None:
            return {}
        return {"alloc_retries": torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)}


def build_tickers(
    run: RunDir,
    place: RankId,
    progress: Progress,
    observe: ObserveConfig,
    tell: Callable[[Beat], None] = lambda beat: None,
) -> list[Ticker]:
    """Return the threads by which a rank is observed, not started yet."""
    file = Appender(run.heartbeat(place.rank), run.lost, hold=0)
    table = TableFile(run.telemetry_of(place.rank), TELEMETRY, lost=run.lost)
    return [
        Heartbeat(file, place.rank, progress, observe.heartbeat_s, tell),
        Telemetry(table, observe.telemetry_s, place.local_rank == 0),
    ]
