"""Everything a report tells, read from a run directory; what is not there yet is None or empty."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline.records import Audit, Env, Plan, Result
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    StepRow,
    TelemetryRow,
    TrainingRow,
    read_steps,
    read_telemetry,
    read_training,
)
from paceline.records.words import duration, flop_rate, size
from paceline.schedules.measured import Measured, load_measured

UNACCOUNTED = "unaccounted"


@dataclass(frozen=True)
class Story:
    """`result` is None while the run goes on, or when its supervisor was killed."""

    name: str
    plan: Plan
    env: Env
    result: Result | None
    audit: Audit | None
    training: list[TrainingRow]
    steps: dict[int, list[StepRow]]
    telemetry: list[TelemetryRow]
    config: str
    measured: Measured | None = None

    @property
    def phases_s(self) -> dict[int, dict[str, float]]:
        """Median seconds of each phase after warm-up, by rank, with the unaccounted rest."""
        return {rank: _median_phases(rows) for rank, rows in self.steps.items() if rows}


@dataclass(frozen=True)
class Figure:
    """One number of the headline, with what it was computed from."""

    label: str
    value: str
    source: str = ""


def read_story(run: RunDir) -> Story:
    plan = Plan.load(run.plan)
    return Story(
        name=plan.name,
        plan=plan,
        env=Env.load(run.env),
        result=Result.load(run.result) if run.result.is_file() else None,
        audit=Audit.load(run.audit) if run.audit.is_file() else None,
        training=read_training(run.training),
        steps={rank: read_steps(run.steps(rank)) for rank in range(plan.world_size)},
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
    window = result.window
    source = f"{window.file}, steps {window.first_step} to {window.last_step}"
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


def _median_phases(rows: Sequence[StepRow]) -> dict[str, float]:
    kept = [row for row in rows if not row.warmup] or rows
    names = [*kept[0].phases_s, UNACCOUNTED]
    middle = {}
    for name in names:
        values = [row.unaccounted_s if name == UNACCOUNTED else row.phases_s[name] for row in kept]
        middle[name] = median(values)
    return middle


def asked(story: Story) -> str:
    """The command line, as run.yaml's first line keeps it."""
    first = story.config.partition("\n")[0]
    return first.removeprefix("# asked: ").replace("'", "") if first.startswith("# asked") else ""


def started(story: Story) -> str:
    if story.result is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.result.started_at))
