"""A run directory -> its figures: one number per metric, and what is needed to trust it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.plain import number_at, read_plain
from paceline.metrics import VAL, Goal
from paceline.records import Attempt, BestMetric, Plan, Result, Window
from paceline.records.base import damaged
from paceline.records.columns import Table
from paceline.records.heartbeats import iter_beats
from paceline.records.rundir import RunDir
from paceline.records.tables import StepRow, TrainingRow, read_steps, read_training
from paceline.stats.stability import Growth, explain_drift, explain_spread, measure_growth
from paceline.stats.steady import Seconds, count_warmup, find_compile_steps, measure_spread
from paceline.stats.timing_points import (
    TAIL_POINTS,
    TimingPoint,
    list_points,
    summarise_points,
)

Losses = Sequence[float] | NDArray[np.float64]
METRICS = ("samples_per_s", "tokens_per_s", "tail_mean_iter_p50_ms")
LOWER_IS_BETTER = {"tail_mean_iter_p50_ms"}


def is_speed(metric: str) -> bool:
    """Say whether it is one of METRICS; otherwise it is a metric of the job, such as
    `val/wer:min`."""
    return metric in METRICS


def lower_is_better(metric: str) -> bool:
    return metric in LOWER_IS_BETTER if is_speed(metric) else not Goal.parse(metric).is_max


def require_metric(text: str) -> str:
    """Return the metric that was asked for, a job's own with its direction; ValueError says what is
    wrong with it."""
    if is_speed(text):
        return text
    try:
        return str(Goal.parse(text))
    except ValueError as error:
        raise ValueError(f"{error}; or one of {', '.join(METRICS)}") from error


class Course(NamedTuple):
    """A metric of the job over a run: its extremes, and the mean over the last fifth."""

    least: float
    most: float
    tail: float


@dataclass(frozen=True)
class RunFigures:
    """The figures of a run's last attempt: earlier ones may have had other ranks."""

    samples_per_s: float  # work over time in the steady window, compile steps apart
    tokens_per_s: float | None
    steps_per_s: float
    first_step: int  # of the steady window
    last_step: int
    num_compile_steps: int
    compile_s: float  # what those steps took beyond a usual one
    step_s_p50: float
    step_s_p90: float
    drift: float  # of the step time from the start to the end of the window, relative
    standard_error: float  # of the mean step time, relative, by batch means
    blocks_s: tuple[float, ...]
    tail_mean_iter_p50_ms: float | None
    tail_std_iter_p50_ms: float | None
    all_mean_iter_p50_ms: float | None
    all_std_iter_p50_ms: float | None
    tail_points_used: int
    points: Sequence[TimingPoint]
    tail_loss: float | None  # mean over the last fifth of the steps, at least five
    losses: Losses  # of all steps of the run
    startup_s: float | None  # from the start of the attempt to its first step, where known
    growth: tuple[Growth, ...] = ()  # of the memory of each GPU and rank, where long enough
    courses: Mapping[str, Course] = field(default_factory=dict)  # of the job's metrics, by name

    @property
    def spread(self) -> float:
        """Return p90 over p50 of the step times: above 1 by how slow the slow steps are."""
        return self.step_s_p90 / self.step_s_p50 if self.step_s_p50 else 1.0

    @property
    def unrest(self) -> list[str]:
        """Return why these figures deserve less trust, or the run should not go on for days."""
        found = [explain_spread(self.spread), explain_drift(self.drift)]
        found += [f"memory grows: {growth}" for growth in self.growth if growth.is_leak]
        return [why for why in found if why]

    @property
    def window(self) -> Window:
        return Window(
            file="training.csv",
            first_step=self.first_step,
            last_step=self.last_step,
            num_compile_steps=self.num_compile_steps,
        )

    def value(self, metric: str) -> float | None:
        """Return the number that stands for the run: for a metric of evaluations its best value, as
        the best checkpoint has it; for a training metric, which is noisy, the mean over the last
        fifth."""
        if is_speed(metric):
            found: float | None = getattr(self, metric)
            return found
        goal = Goal.parse(metric)
        course = self.courses.get(goal.name)
        if course is None:
            return None
        best = course.most if goal.is_max else course.least
        value = best if goal.name.startswith(VAL) else course.tail
        return value if value > 0 else None  # runs are compared by ratios


def best_of(rows: Table[TrainingRow], goal: Goal) -> BestMetric | None:
    """Return the best value of a metric in a run, and its step; None where it has no number."""
    if goal.name not in rows.metrics:
        return None
    steps, values = rows.metric(goal.name)
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if not len(values):
        return None
    place = int(values.argmax() if goal.is_max else values.argmin())  # the first, where equal
    return BestMetric(step=int(steps[place]), name=goal.name, value=float(values[place]))


def last_loss(rows: Table[TrainingRow]) -> tuple[int, float] | None:
    """Return the last loss that is a number, after its step."""
    found = rows.pick(np.isfinite(rows.column("loss")))
    return (found[-1].step, found[-1].loss) if found else None


def last_metrics(rows: Table[TrainingRow]) -> dict[str, float]:
    """Return the last value of each metric but the training loss; it may not be a number."""
    found = {name: rows.metric(name)[1] for name in rows.metrics if name != "train/loss"}
    return {name: float(values[-1]) for name, values in found.items() if len(values)}


def measure_run(run: RunDir, tail_points: int = TAIL_POINTS) -> RunFigures | None:
    """Return the figures of a run; None where no step was taken after the warm-up. `tail_points`:
    how many of the last timing points the tail is the mean of."""
    every_row = read_training(run.training)
    _require_measured(run, every_row)
    first_step, started_at = _last_attempt(run)
    rows = every_row.since(first_step)
    step_s = rows.column("step_s")
    compiled = _compile_mask(run, step_s)
    steady = rows.pick(~compiled)
    steady = steady[count_warmup(steady.column("step_s")) :]
    if not steady:
        return None
    kept_s = steady.column("step_s")
    spread = measure_spread(kept_s)
    steps = read_steps(run.steps(0)).since(first_step)
    points = list_points(steps, number_at(read_plain(run.config), "train", "log_every", run.config))
    whole, tail = summarise_points(points), summarise_points(points[-tail_points:])
    samples_per_s, tokens_per_s = _rates(steady)
    p50, p90 = np.quantile(kept_s, [0.5, 0.9]).tolist()
    return RunFigures(
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s,
        steps_per_s=len(steady) / float(kept_s.sum()),
        first_step=steady[0].step,
        last_step=steady[-1].step,
        num_compile_steps=int(compiled.sum()),
        compile_s=float((step_s[compiled] - p50).sum()),
        step_s_p50=p50,
        step_s_p90=p90,
        drift=spread.drift,
        standard_error=spread.standard_error,
        blocks_s=spread.blocks_s,
        tail_mean_iter_p50_ms=tail.mean if tail else None,
        tail_std_iter_p50_ms=tail.std if tail else None,
        all_mean_iter_p50_ms=whole.mean if whole else None,
        all_std_iter_p50_ms=whole.std if whole else None,
        tail_points_used=tail.num_points if tail else 0,
        points=points,
        tail_loss=_tail_loss(every_row),
        losses=every_row.column("loss"),
        courses=_courses(every_row),
        startup_s=_startup_s(run, steps, started_at),
        growth=measure_growth(run, started_at),
    )


def _require_measured(run: RunDir, rows: Table[TrainingRow]) -> None:
    """Refuse rows that no run writes: every step takes some time and some samples."""
    wanted = {name: rows.column(name) for name in ("step_s", "samples_per_s")}
    for name, values in wanted.items():
        odd = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(odd):
            row = rows[int(odd[0])]
            raise damaged(run.training, f"step {row.step}", f"{name} is {values[odd[0]]:g}")


def _last_attempt(run: RunDir) -> tuple[int, float | None]:
    """Return the first step of the last attempt, and when it started."""
    if run.attempt.is_file():
        attempt = Attempt.load(run.attempt)
        first_step, started_at = attempt.first_step, attempt.started_at
    elif run.result.is_file():
        result = Result.load(run.result)
        first_step = result.attempts[-1].first_step if result.attempts else 1
        started_at = result.attempts[-1].started_at if result.attempts else result.started_at
    else:
        return 1, None
    return max(first_step, 1), started_at


def _compile_mask(run: RunDir, step_s: Seconds) -> NDArray[np.bool_]:
    """Mark the steps that compiled. Slow steps are set apart only where the plan says that
    something compiles."""
    compiles = run.plan.is_file() and Plan.load(run.plan).compile.value != "off"
    if not compiles or not len(step_s):
        return np.zeros(len(step_s), dtype=bool)
    return find_compile_steps(step_s)


def _rates(rows: Table[TrainingRow]) -> tuple[float, float | None]:
    """Return samples and tokens per second: sums of work over sums of time, so a slow step
    weighs what it cost."""
    step_s = rows.column("step_s")
    samples, tokens = (rows.column(name) * step_s for name in ("samples_per_s", "tokens_per_s"))
    known = tokens[~np.isnan(tokens)]
    elapsed_s = float(step_s.sum())
    return float(samples.sum()) / elapsed_s, float(known.sum()) / elapsed_s if len(known) else None


def _tail_loss(rows: Table[TrainingRow]) -> float | None:
    losses = rows.column("loss")[-max(5, len(rows) // 5) :]
    return float(losses.mean()) if len(losses) and np.isfinite(losses).all() else None


def _courses(rows: Table[TrainingRow]) -> dict[str, Course]:
    found = {}
    for name in rows.metrics:
        values = rows.metric(name)[1]
        values = values[np.isfinite(values)]
        if len(values):
            tail = float(values[-max(5, len(values) // 5) :].mean())
            found[name] = Course(float(values.min()), float(values.max()), tail)
    return found


def _startup_s(run: RunDir, steps: Table[StepRow], started_at: float | None) -> float | None:
    """Estimate the seconds from the start of the attempt to its first step. No file says when
    that step began, but each heartbeat says which step it fell into: its moment less the time of
    the steps before is at or after the start of step 1. The earliest is nearest."""
    if started_at is None or not steps:
        return None
    numbers, wall_s = steps.column("step"), steps.column("wall_s")
    before_s = np.cumsum(wall_s) - wall_s
    begins = []
    for beat in iter_beats(run.heartbeat(0)):
        place = int(np.searchsorted(numbers, beat.step))
        is_known = place < len(numbers) and numbers[place] == beat.step
        if is_known and beat.time >= started_at:
            begins.append(beat.time - float(before_s[place]))
    return max(0.0, min(begins) - started_at) if begins else None
