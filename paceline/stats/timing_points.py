"""Steps of rank 0 -> timing points: running medians of each phase, and of all of them together.

A point is written at every step that `log_every` divides: the median of each phase over the last
100 steps, warm-up and all. `iter` is the sum of the phases, not wall time: what lies between two
steps is outside. The tail is the last 20 points. docs/statistics.md says when to look at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from paceline.records.columns import Table
from paceline.records.phases import WORK_PHASES, Phase
from paceline.records.tables import StepRow

WINDOW, TAIL_POINTS = 100, 20
CHUNK = 10_000  # windows whose medians are taken at once
# What the columns of timing_points.csv call a phase; one without a short name keeps its own.
SHORT = {
    Phase.DATA: "data_wait", Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "step",
}  # fmt: skip
TIMED = {phase: SHORT.get(phase, str(phase)) for phase in WORK_PHASES}


@dataclass(frozen=True)
class TimingPoint:
    """Medians in milliseconds, of each phase by its short name, and of all together."""

    step: int
    phases_ms_p50: dict[str, float]
    iter_ms_p50: float


@dataclass(frozen=True, eq=False)
class TimingPoints(Sequence[TimingPoint]):
    """All points of a run, kept as arrays, for a long run has many."""

    steps: NDArray[np.int64]
    medians_ms: NDArray[np.float64]  # one row per point: each phase of TIMED, then all together

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> TimingPoint: ...
    @overload
    def __getitem__(self, index: slice) -> "TimingPoints": ...
    def __getitem__(self, index: int | slice) -> "TimingPoint | TimingPoints":
        if isinstance(index, slice):
            return TimingPoints(self.steps[index], self.medians_ms[index])
        *phases, whole = self.medians_ms[index].tolist()
        names = dict(zip(TIMED.values(), phases, strict=True))
        return TimingPoint(int(self.steps[index]), names, whole)


@dataclass(frozen=True)
class PointSummary:
    """Mean and sample deviation (0 for a single point) of the points' iter_ms_p50."""

    mean: float
    std: float
    num_points: int


def list_points(rows: Table[StepRow], log_every: int) -> TimingPoints:
    """Return a point for every step that `log_every` divides."""
    steps = rows.column("step")
    ends = np.flatnonzero(steps % log_every == 0) + 1
    medians = np.empty((len(ends), len(TIMED) + 1))
    whole = np.zeros(len(rows))
    for place, phase in enumerate(TIMED):
        times_ms = 1000 * np.nan_to_num(rows.column(phase.column))
        medians[:, place] = _running_medians(times_ms, ends)
        whole += times_ms
    medians[:, -1] = _running_medians(whole, ends)
    return TimingPoints(steps[ends - 1], medians)


def _running_medians(values: NDArray[np.float64], ends: NDArray[Any]) -> NDArray[np.float64]:
    """Return the median of the last WINDOW values before each end."""
    if not values.any():  # a phase that this run does not have
        return np.zeros(len(ends))
    # Windows at the start are shorter, so each has its own median; full ones go by many at once.
    early, later = ends[ends < WINDOW], ends[ends >= WINDOW]
    parts = [np.array([np.median(values[:end]) for end in early])]
    for some in np.array_split(later, len(later) // CHUNK + 1):
        parts.append(np.median(values[some[:, None] + np.arange(-WINDOW, 0)], axis=1))
    return np.concatenate(parts)


def summarise_points(points: TimingPoints) -> PointSummary | None:
    values = points.medians_ms[:, -1]
    if not len(values):
        return None
    std = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return PointSummary(float(values.mean()), std, len(values))
