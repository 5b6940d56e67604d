"""Steps of rank 0 -> timing points: running medians of each phase, and of all of them together.

A point is written at every step that `log_every` divides: the median of each phase over the last
100 steps, warm-up and all. `iter` is the sum of the phases, not wall time: what lies between two
steps is outside. The tail is the last 20 points. docs/statistics.md says when to look at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from paceline.records.phases import WORK_PHASES, Phase
from paceline.records.tables import StepRow, Table

WINDOW, TAIL_POINTS = 100, 20
CHUNK = 1000  # windows whose medians are taken at once
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


@dataclass(frozen=True)
class PointSummary:
    """Mean and sample deviation (0 for a single point) of the points' iter_ms_p50."""

    mean: float
    std: float
    num_points: int


def list_points(rows: Table[StepRow], log_every: int) -> list[TimingPoint]:
    phases_ms = 1000 * np.nan_to_num([rows.column(phase.column) for phase in TIMED]).T
    table = np.column_stack([phases_ms, phases_ms.sum(axis=1)])
    steps = rows.column("step")
    ends = np.flatnonzero(steps % log_every == 0) + 1
    early, later = ends[ends < WINDOW], ends[ends >= WINDOW]
    medians = [np.median(table[:end], axis=0) for end in early]
    for some in np.array_split(later, len(later) // CHUNK + 1):
        medians.extend(np.median(table[some[:, None] + np.arange(-WINDOW, 0)], axis=1))
    return [_point(int(steps[end - 1]), each) for end, each in zip(ends, medians, strict=True)]


def _point(step: int, medians: NDArray[np.float64]) -> TimingPoint:
    *phases, whole = medians.tolist()
    return TimingPoint(step, dict(zip(TIMED.values(), phases, strict=True)), whole)


def summarise_points(points: Sequence[TimingPoint]) -> PointSummary | None:
    values = [point.iter_ms_p50 for point in points]
    if not values:
        return None
    return PointSummary(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
