"""Everything a report tells, read from a run directory; what is not there yet is None or empty."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.records import Audit, Env, Plan, Result, Window
from paceline.records.phases import STEP_PHASES
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    Table,
    TelemetryRow,
    TrainingRow,
    read_steps,
    read_telemetry,
    read_training,
)
from paceline.schedules.measured import Measured, load_measured

# What a bar of the report is made of, and its column in steps.csv.
PHASES = {str(phase): phase.column for phase in STEP_PHASES} | {"unaccounted": "unaccounted_s"}


@dataclass(frozen=True)
class Story:
    """`result` is None while the run goes on, or when its supervisor was killed."""

    name: str
    plan: Plan
    env: Env
    result: Result | None
    audit: Audit | None
    training: Table[TrainingRow]
    phases_s: dict[int, dict[str, float]]  # medians by rank, with what no phase saw
    telemetry: Table[TelemetryRow]
    config: str
    measured: Measured | None = None


@dataclass(frozen=True)
class Figure:
    """One number of the headline, with what it was computed from."""

    label: str
    value: str
    source: str = ""


def read_story(run: RunDir) -> Story:
    plan = Plan.load(run.plan)
    result = Result.load(run.result) if run.result.is_file() else None
    return Story(
        name=plan.name,
        plan=plan,
        env=Env.load(run.env),
        result=result,
        audit=Audit.load(run.audit) if run.audit.is_file() else None,
        training=read_training(run.training),
        phases_s=_phases(run, plan.world_size, result.window if result else None),
        telemetry=read_telemetry(run.telemetry),
        config=run.config.read_text(),
        measured=load_measured(run, plan),
    )


def headline(story: Story) -> list[Figure]:
    """The figures a reader looks for first. Each names the file and steps it comes from."""
    result = story.result
    if result is None:
        return [Figure("state", "no result yet: running, or its supervisor was killed")]
    figures = [
        Figure("outcome", str(result.outcome), f"exit code {result.exit_code}"),
        Figure("steps", f"{result.steps} of {story.plan.steps}"),
    ]
    figures += _attempt_figures(result)
    figures += _loss_figures(result)
    figures += _rate_figures(result)
    memory = result.peak_bytes
    if memory:
        kind = "allocator, active" if result.peak_active_bytes else "resident set of the process"
        figures.append(Figure("peak memory a rank", size(memory), kind))
    return figures + _kept_figures(result)


def _kept_figures(result: Result) -> list[Figure]:
    """What was kept, and what it cost."""
    figures, kept = [], result.checkpoints
    if kept is not None:
        failed = f", {kept.num_failed} failed" if kept.num_failed else ""
        last = f", the last at step {kept.last_step} ({size(kept.num_bytes)})"
        figures.append(
            Figure(
                "checkpoints",
                f"{kept.num_written}{failed}{last if kept.last_step is not None else ''}",
                f"checkpoints.csv; training waited {duration(kept.stall_s)} for them",
            )
        )
    return figures


def _attempt_figures(result: Result) -> list[Figure]:
    if len(result.attempts) < 2:
        return []
    share = f"productive time {result.ettr:.0%}" if result.ettr is not None else ""
    return [Figure("attempts", str(len(result.attempts)), share)]


def _loss_figures(result: Result) -> list[Figure]:
    figures = []
    if result.final_loss is not None:
        figures.append(Figure("loss", f"{result.final_loss:.4f}", "training.csv, last finite row"))
    if result.val_loss is not None:
        entropy = result.data_facts.get("unigram_entropy")
        beside = f"byte-unigram entropy {entropy:.4f}" if entropy is not None else "training.csv"
        figures.append(Figure("validation loss", f"{result.val_loss:.4f}", beside))
    return figures


def _rate_figures(result: Result) -> list[Figure]:
    if result.window is None or result.step_s is None or result.samples_per_s is None:
        return []
    source = str(result.window)
    figures = []
    if result.tokens_per_s is not None:
        figures.append(Figure("tokens/s", f"{result.tokens_per_s:,.0f}", source))
    figures += [
        Figure("samples/s", f"{result.samples_per_s:,.4g}", source),
        Figure("steps/s", f"{result.steps_per_s:,.3g}", source),
        Figure("step p50", duration(result.step_s.p50), source),
        Figure("step p90", duration(result.step_s.p90), source),
    ]
    if result.tflops_per_rank is not None:
        figures.append(Figure("compute a rank", flop_rate(result.tflops_per_rank), source))
    if result.mfu is not None:
        figures.append(Figure("MFU", f"{result.mfu:.1%}", source))
    if result.matmul_share is not None:
        share = f"{result.matmul_share:.1%}"
        figures.append(Figure("of the matmul rate", share, "paceline check on this machine"))
    return figures


def _phases(run: RunDir, num_ranks: int, window: Window | None) -> dict[int, dict[str, float]]:
    """Return the median seconds of each phase in the window of the rates, by rank, with the
    unaccounted rest; of all steps where there is no window yet. One rank's table at a time is in
    memory."""
    found = {}
    for rank in range(num_ranks):
        rows = read_steps(run.steps(rank))
        rows = rows.since(window.first_step if window else 1) or rows
        if rows:
            found[rank] = {name: _median(rows.column(column)) for name, column in PHASES.items()}
    return found


def _median(values: NDArray[np.float64]) -> float:
    return float(np.median(np.nan_to_num(values)))


def asked(story: Story) -> str:
    """The command line, as run.yaml's first line keeps it."""
    first = story.config.partition("\n")[0]
    return first.removeprefix("# asked: ").replace("'", "") if first.startswith("# asked") else ""


def started(story: Story) -> str:
    if story.result is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.result.started_at))


def size(num_bytes: float) -> str:
    """Bytes for people: `812 MiB`, `1.30 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def shown(value: object) -> str:
    """A value of the plan for people; None is something not known yet."""
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flop_rate(tflops: float) -> str:
    return f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{tflops * 1000:.3g} GFLOP/s"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
