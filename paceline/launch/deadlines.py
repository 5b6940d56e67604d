"""Deadlines, read from heartbeats: has every rank begun, is every rank still getting somewhere?"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.records import Limits
from paceline.records.rundir import RunDir

Deadline = Literal["start", "progress", "total", "collective"]
TAIL_BYTES = 4096


@dataclass(frozen=True)
class Beat:
    """A rank's last heartbeat. `marks` counts every phase it has entered."""

    time: float = 0.0
    step: int = 0
    phase: str = "start"
    marks: int = 0


def last_beat(path: Path) -> Beat:
    """The newest whole line; a rank that has not begun has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        beat = json.loads(lines[-1])
    except (OSError, IndexError, ValueError):
        return Beat()
    return Beat(beat["time"], beat["step"], beat["phase"], beat.get("marks", 0))


class Deadlines:
    """Call `missed` often; it looks at the files only now and then."""

    def __init__(
        self,
        run: RunDir,
        ranks: Iterable[int],
        limits: Limits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._limits, self._now = run, limits, now
        self._started_at = self._looked_at = now()
        self._beats = dict.fromkeys(ranks, Beat())
        self._moved_at = dict.fromkeys(ranks, self._started_at)
        self._beaten_at = dict.fromkeys(ranks, self._started_at)
        known = [s for s in (limits.start_s, limits.progress_s, limits.total_s) if s is not None]
        self._interval_s = min([1.0, *(seconds / 10 for seconds in known)])

    def missed(self) -> Deadline | None:
        """The deadline that has passed, if one has."""
        now, limits = self._now(), self._limits
        if now - self._looked_at < self._interval_s:
            return None
        self._looked_at = now
        if limits.total_s is not None and now - self._started_at > limits.total_s:
            return "total"
        self._look(now)
        waiting = [rank for rank in self._beats if not self._run.verdict(rank).is_file()]
        if limits.progress_s is not None:
            if any(self._idle_s(rank, now) > limits.progress_s for rank in waiting):
                return "progress"
        if limits.start_s is not None and now - self._started_at > limits.start_s:
            if any(self._beats[rank].step == 0 for rank in waiting):
                return "start"
        return None

    def _idle_s(self, rank: int, now: float) -> float:
        """Since a rank last got anywhere; before step 1, since it last gave a sign of life: one
        that is frozen cannot beat, and one that loads for an hour can."""
        beat = self._beats[rank]
        if beat.time == 0.0:
            return 0.0  # it has not joined yet
        return now - (self._moved_at[rank] if beat.step else self._beaten_at[rank])

    def _look(self, now: float) -> None:
        for rank, before in self._beats.items():
            beat = last_beat(self._run.heartbeat(rank))
            if (beat.step, beat.phase, beat.marks) != (before.step, before.phase, before.marks):
                self._moved_at[rank] = now
            if beat.time != before.time:
                self._beaten_at[rank] = now
            self._beats[rank] = beat
