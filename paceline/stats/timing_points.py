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

from paceline.records.tables import StepRow

WINDOW, TAIL_POINTS = 100, 20
# Ours to the seed's. It times tokenizing apart (`preprocess`); our workers do that inside `data`.
PHASES = {"data": "data_wait", "forward": "fwd", "backward": "bwd", "optimizer": "step"}


@dataclass(frozen=True)
class TimingPoint:
    """Medians in milliseconds."""

    step: int
    data_wait_ms_p50: float
    fwd_ms_p50: float
    bwd_ms_p50: float
    step_ms_p50: float
    iter_ms_p50: float
    preprocess_ms_p50: None = None


@dataclass(frozen=True)
class PointSummary:
    """Mean and sample deviation (0 for a single point) of the points' iter_ms_p50."""

    mean: float
    std: float
    num_points: int


def list_points(rows: Sequence[StepRow], log_every: int) -> list[TimingPoint]:
    phases_ms = np.array([[1000 * row.phases_s.get(name, 0.0) for name in PHASES] for row in rows])
    if not len(rows):
        return []
    table = np.column_stack([phases_ms, phases_ms.sum(axis=1)])
    ends = [n + 1 for n, row in enumerate(rows) if row.step % log_every == 0]
    return [
        _point(rows[end - 1].step, np.median(table[max(0, end - WINDOW) : end], axis=0))
        for end in ends
    ]


def _point(step: int, medians: NDArray[np.float64]) -> TimingPoint:
    data_wait, fwd, bwd, optimizer, whole = (float(value) for value in medians)
    return TimingPoint(step, data_wait, fwd, bwd, optimizer, whole)


def summarise_points(points: Sequence[TimingPoint]) -> PointSummary | None:
    values = [point.iter_ms_p50 for point in points]
    if not values:
        return None
    return PointSummary(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))
