"""A run directory -> its figures: one number per metric, and what is needed to trust it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.plain import number_at, read_plain
from paceline.records import Attempt, Plan, Result, Window
from paceline.records.base import damaged
from paceline.records.heartbeats import iter_beats
from paceline.records.rundir import RunDir
from paceline.records.tables import StepRow, Table, TrainingRow, read_steps, read_training
from paceline.stats.steady import Seconds, count_warmup, find_compile_steps, measure_spread
from paceline.stats.timing_points import (
    TAIL_POINTS,
    TimingPoint,
    list_points,
    summarise_points,
)

METRICS = ("samples_per_s", "tokens_per_s", "tail_mean_iter_p50_ms")
LOWER_IS_BETTER = {"tail_mean_iter_p50_ms"}


@dataclass(frozen=True)
class RunFigures:
    """Hold the figures of the last attempt: those before it may have had other ranks."""

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
    losses: tuple[float, ...]  # of all steps of the run
    startup_s: float | None  # from the start of the attempt to its first step, where known

    @property
    def spread(self) -> float:
        """Return p90 over p50 of the step times: above 1 by how slow the slow steps are."""
        return self.step_s_p90 / self.step_s_p50 if self.step_s_p50 else 1.0

    @property
    def window(self) -> Window:
        return Window(
            file="training.csv",
            first_step=self.first_step,
            last_step=self.last_step,
            num_compile_steps=self.num_compile_steps,
        )

    def value(self, metric: str) -> float | None:
        assert metric in METRICS, f"{metric} is none of {METRICS}"
        found: float | None = getattr(self, metric)
        return found


def measure_run(run: RunDir) -> RunFigures | None:
    """Return the figures of a run; None where no step was taken after the warm-up."""
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
    whole, tail = summarise_points(points), summarise_points(points[-TAIL_POINTS:])
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
        losses=tuple(every_row.column("loss").tolist()),
        startup_s=_startup_s(run, steps, started_at),
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


def _startup_s(run: RunDir, steps: Table[StepRow], started_at: float | None) -> float | None:
    """Estimate the seconds from the start of the attempt to its first step. No file says when
    that step began, but each heartbeat says which step it fell into: its moment less the time of
    the steps before is at or after the start of step 1. The earliest is nearest."""
    if started_at is None or not steps:
        return None
    before_s = np.cumsum([0.0, *steps.column("wall_s")[:-1]])
    begin_of = dict(zip(steps.column("step").tolist(), before_s.tolist(), strict=True))
    begins = [
        beat.time - begin_of[beat.step]
        for beat in iter_beats(run.heartbeat(0))
        if beat.step in begin_of and beat.time >= started_at
    ]
    return max(0.0, min(begins) - started_at) if begins else None
