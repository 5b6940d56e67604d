"""Steps of rank 0 -> the timing points of the speech seed, so that its tables can be filled.

A point is written at every step that `log_every` divides: the median of each phase over the last
100 steps, warm-up and all. `iter` is the sum of the phases, not wall time: what lies between two
steps is outside. The tail is the last 20 points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from paceline.records.phases import WORK_PHASES, Phase
from paceline.records.tables import StepRow, Table

WINDOW, TAIL_POINTS = 100, 20
# What the columns are called there; a phase without a name of its own keeps ours.
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
    return [
        _point(int(steps[end - 1]), np.median(table[max(0, end - WINDOW) : end], axis=0))
        for end in ends
    ]


def _point(step: int, medians: NDArray[np.float64]) -> TimingPoint:
    *phases, whole = medians.tolist()
    return TimingPoint(step, dict(zip(TIMED.values(), phases, strict=True)), whole)


def summarise_points(points: Sequence[TimingPoint]) -> PointSummary | None:
    values = [point.iter_ms_p50 for point in points]
    if not values:
        return None
    return PointSummary(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
