"""Throughput over a window of steps that is named, so that the figure can be checked."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.records import StepSeconds, Window
from paceline.records.tables import TrainingRow


@dataclass(frozen=True)
class Throughput:
    window: Window
    step_s: StepSeconds
    samples_per_s: float
    tokens_per_s: float | None
    steps_per_s: float


def measure_throughput(rows: Sequence[TrainingRow], file: str) -> Throughput | None:
    """Totals over the steps after warm-up; None where there are none. Rates are work over time,
    not means of rates, so a slow step weighs what it cost."""
    kept = [row for row in rows if not row.warmup]
    if not kept:
        return None
    elapsed_s = sum(row.step_s for row in kept)
    samples = sum(row.samples_per_s * row.step_s for row in kept)
    tokens = [row.tokens_per_s * row.step_s for row in kept if row.tokens_per_s is not None]
    seconds = sorted(row.step_s for row in kept)
    return Throughput(
        window=Window(file=file, first_step=kept[0].step, last_step=kept[-1].step),
        step_s=StepSeconds(p50=quantile(seconds, 0.5), p90=quantile(seconds, 0.9)),
        samples_per_s=samples / elapsed_s,
        tokens_per_s=sum(tokens) / elapsed_s if tokens else None,
        steps_per_s=len(kept) / elapsed_s,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of a sorted sequence."""
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
