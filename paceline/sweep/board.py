"""The live status of a sweep: done, running, failed, best so far, time left."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean

from paceline.records.swept import Metric, SweptPhase
from paceline.stats.figures import lower_is_better
from paceline.stats.standings import MARGIN, Group, compare_groups
from paceline.sweep.folder import STOPPED, SUCCESS, Row


@dataclass
class Line:
    """One cell in the live table."""

    name: str
    num_asked: int
    values: list[float] = field(default_factory=list)
    num_done: int = 0
    num_failed: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def value(self) -> float | None:
        """Return the geometric mean of its runs, as the verdicts do; None while it has none."""
        return geometric_mean(self.values) if self.values else None


@dataclass
class Board:
    """Hold what is known of the phase that runs now; the runner calls `begin`, `start` and
    `end`."""

    metric: Metric
    phase: str = ""
    lines: dict[str, Line] = field(default_factory=dict)
    running: str = ""
    repeat: int = 0
    margin: float = MARGIN
    is_told_apart: bool = False  # the best so far, from every other
    _to_run: list[str] = field(default_factory=list)
    _began_at: float = 0.0

    def begin(self, phase: SweptPhase, to_run: Iterable[str]) -> None:
        """Start a phase with an empty table; `to_run` names the cell of each run that is
        missing."""
        self.phase, self._to_run = phase.name, list(to_run)
        self.lines = {name: Line(name, phase.repeats) for name in phase.cells}
        self.is_told_apart = False

    def start(self, cell: str, repeat: int) -> None:
        """Note that a run begins now."""
        self.running, self.repeat, self._began_at = cell, repeat, time.monotonic()

    def end(self, row: Row, value: float | None) -> None:
        """Note a run that has ended, now or in an earlier call of the same sweep."""
        line = self.lines[row["group"]]
        line.num_done += row["status"] == SUCCESS
        line.num_failed += row["status"] != SUCCESS and row["outcome"] not in STOPPED
        line.values += [value] if value is not None else []
        line.seconds.append(float(row["duration_sec"]))
        self.is_told_apart = self._tell_apart()
        if self.running == line.name:
            self.running = ""
            self._to_run.remove(line.name)

    def _tell_apart(self) -> bool:
        """Tell whether the verdicts, were they given now, would name one cell the fastest."""
        groups = [Group(line.name, tuple(line.values)) for line in self.lines.values()]
        unknown = [line for line in self.lines.values() if not (line.values or line.num_failed)]
        if unknown or sum(bool(group.values) for group in groups) < 2:
            return False  # a cell that has not run yet may be faster
        lower = lower_is_better(self.metric)
        found = compare_groups(groups, lower_is_better=lower, margin=self.margin)
        return len(found.winners) == 1

    @property
    def num_done(self) -> int:
        return sum(line.num_done for line in self.lines.values())

    @property
    def num_failed(self) -> int:
        return sum(line.num_failed for line in self.lines.values())

    @property
    def num_ended(self) -> int:
        return self.num_done + self.num_failed

    @property
    def num_asked(self) -> int:
        return sum(line.num_asked for line in self.lines.values())

    @property
    def best(self) -> Line | None:
        """Return the line with the best mean so far: a glance, not a verdict."""
        found = [line for line in self.lines.values() if line.value is not None]
        sign = 1 if lower_is_better(self.metric) else -1
        return min(found, key=lambda line: sign * (line.value or 0.0), default=None)

    def left_s(self) -> float | None:
        """Estimate the seconds to the end of the phase: each run takes as long as the last one
        of its cell, or as the mean run where its cell has none yet."""
        known = [s for line in self.lines.values() for s in line.seconds]
        if not known:
            return None
        ahead = sum(_expected(self.lines[name].seconds, known) for name in self._to_run)
        spent = time.monotonic() - self._began_at if self.running else 0.0
        return max(0.0, ahead - spent)


def _expected(own: Sequence[float], known: Sequence[float]) -> float:
    return own[-1] if own else fmean(known)
