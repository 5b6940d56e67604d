"""Everything a report shows, read from a run directory; what does not exist yet is None or
empty."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.plain import read_config_text
from paceline.metrics import TRAIN, VAL
from paceline.records import (
    Audit,
    BestMetric,
    Env,
    Overlap,
    Plan,
    Result,
    StepSeconds,
    Window,
)
from paceline.records.columns import Table
from paceline.records.findings import Findings, RunFinding
from paceline.records.phases import STEP_PHASES
from paceline.records.recorded import last_to_arrive
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    TelemetryRow,
    TrainingRow,
    read_checkpoints,
    read_steps,
    read_telemetry,
    read_training,
)
from paceline.records.texts import Sample, read_samples
from paceline.records.words import count, duration, elapsed, flop_rate, number, size
from paceline.report.profile import Sheet, memory_sheets, profile_sheets, read_memory
from paceline.schedules.measured import Measured, load_measured
from paceline.stats.balance import LEAST_PERCENT, MOST_PERCENT, balance_of
from paceline.stats.figures import RunFigures, last_loss, last_metrics, measure_run
from paceline.stats.stability import explain_drift, explain_spread
from paceline.traces.flow import read_profile_facts
from paceline.workloads.given import resuming

# The parts of a bar in the report, and their columns in steps.csv.
PHASES = {str(phase): phase.column for phase in STEP_PHASES} | {"unaccounted": "unaccounted_s"}


@dataclass(frozen=True)
class SoFar:
    """What the files of a run say while it has no result."""

    path: Path
    speed: RunFigures | None
    kept_step: int | None  # of the newest checkpoint


@dataclass(frozen=True)
class Story:
    """All that a report shows of a run. `result` is None while the run continues, or when its
    supervisor was killed."""

    name: str
    plan: Plan
    env: Env
    result: Result | None
    audit: Audit | None
    training: Table[TrainingRow]
    phases_s: dict[int, dict[str, float]]  # medians by rank, with what no phase saw
    telemetry: dict[int, Table[TelemetryRow]]  # by rank
    config: str
    measured: Measured | None = None
    overlaps: tuple[Overlap, ...] = ()  # of the ranks that exchange something
    samples: tuple[Sample, ...] = ()  # texts that the model wrote, by step
    findings: tuple[RunFinding, ...] = ()  # what was judged of it, the gravest first
    sheets: tuple[Sheet, ...] = ()  # of profiles and memory, where there are some
    so_far: SoFar | None = None  # where there is no result

    @property
    def window(self) -> Window | None:
        """Return the steps from which the figures of speed come."""
        if self.so_far is not None:
            return self.so_far.speed.window if self.so_far.speed else None
        return self.result.window if self.result else None


@dataclass(frozen=True)
class Figure:
    """One number of the headline, and its note in smaller letters."""

    label: str
    value: str
    unit: str = ""
    beside: str = ""

    @property
    def text(self) -> str:
        return f"{self.value} {self.unit}".rstrip()


def read_story(run: RunDir) -> Story:
    plan = Plan.load(run.plan)
    result = Result.load(run.result) if run.result.is_file() else None
    so_far = None if result else _read_so_far(run)
    speed = result or (so_far and so_far.speed)
    return Story(
        name=plan.name,
        plan=plan,
        env=Env.load(run.env),
        result=result,
        audit=Audit.load(run.audit) if run.audit.is_file() else None,
        training=read_training(run.training),
        phases_s=_phases(run, plan.world_size, speed.window if speed else None),
        telemetry={rank: read_telemetry(run.telemetry_of(rank)) for rank in range(plan.world_size)},
        config=read_config_text(run.config),
        measured=load_measured(run, plan),
        overlaps=read_overlaps(run, plan.world_size),
        samples=tuple(read_samples(run.texts)),
        findings=_findings(run),
        sheets=(
            *memory_sheets(read_memory(run, plan.world_size)),
            *profile_sheets(read_profile_facts(run)),
        ),
        so_far=so_far,
    )


def _read_so_far(run: RunDir) -> SoFar:
    kept = [row.step for row in read_checkpoints(run.checkpoint_log) if row.is_written]
    return SoFar(run.root, measure_run(run), kept[-1] if kept else None)


def _findings(run: RunDir) -> tuple[RunFinding, ...]:
    """Return the findings of a run that is over; a run of an older version has none."""
    if not run.findings.is_file():
        return ()
    return tuple(Findings.load(run.findings).findings)


def read_overlaps(run: RunDir, num_ranks: int) -> tuple[Overlap, ...]:
    """Return what each rank's profiled step spent on communication, if it was measured."""
    paths = [run.overlap(rank) for rank in range(num_ranks)]
    return tuple(Overlap.load(path) for path in paths if path.is_file())


def _overlap_figures(story: Story) -> list[Figure]:
    if not story.overlaps:
        return []
    last = last_to_arrive(story.overlaps)
    spent = duration(last.communication_s)
    beside = f"of {spent} in collectives, on rank {last.rank} in step {last.step}"
    return [Figure("exposed communication", duration(last.exposed_s), beside=beside)]


def headline(story: Story) -> list[Figure]:
    """Return the few figures that a reader looks for first: outcome, loss, speed, memory, time."""
    result = story.result
    if result is None:
        return _figures_so_far(story)
    outcome = Figure("outcome", str(result.outcome), beside=f"exit code {result.exit_code}")
    steps = f"{result.steps} of {count(story.plan.steps, 'step')}"
    figures = [
        outcome,
        *_loss_figures(result),
        *_metric_figures(result.metrics, result.best),
        *_rate_figures(result),
        *_memory_figures(story, result),
        Figure("time", elapsed(result.elapsed_s), beside=steps),
    ]
    return figures


def further(story: Story) -> list[Figure]:
    """Return what deserves a line below: checkpoints, an early end, attempts, skipped steps."""
    result = story.result
    if result is None:
        return _way_on(story)
    figures = [*_stability_figures(result), *_overlap_figures(story)]
    kept = result.checkpoints
    if kept is not None:
        failed = f", {kept.num_failed} failed" if kept.num_failed else ""
        last = f"the last at step {kept.last_step}, {size(kept.num_bytes)}; "
        beside = f"training waited {duration(kept.stall_s)} for them"
        beside = f"{last if kept.last_step is not None else ''}{beside}"
        figures.append(Figure("checkpoints", f"{kept.num_written}{failed}", beside=beside))
    balance = balance_of(story.telemetry.items(), story.plan) if story.plan.on_gpu else None
    if balance is not None:
        expected = f"{LEAST_PERCENT:.0f} to {MOST_PERCENT:.0f}% on each is what to expect"
        figures.append(Figure("GPUs", str(balance), beside=expected))
    if result.padding is not None:
        what = "of what was computed: samples filled up to the longest of their batch"
        figures.append(Figure("padding", f"{result.padding:.1%}", beside=what))
    if result.why_early:
        ended = f"after step {result.steps} of {story.plan.steps}"
        figures.append(Figure("ended early", ended, beside=result.why_early))
    if len(result.attempts) > 1:
        share = f"productive time {result.ettr:.0%}" if result.ettr is not None else ""
        figures.append(Figure("attempts", str(len(result.attempts)), beside=share))
    if result.skipped_steps:
        why = "their gradients were not finite, or fp16 looked for its scale"
        figures.append(Figure("steps without an update", str(result.skipped_steps), beside=why))
    return figures


def last_samples(story: Story) -> list[Sample]:
    """Return what the model wrote at the last evaluation."""
    last = max((sample.step for sample in story.samples), default=0)
    return [sample for sample in story.samples if sample.step == last]


def basis(story: Story) -> str:
    """Say once which rows the figures of speed come from; empty if there are none."""
    window = story.window
    if window is None:
        return ""
    return f"Speed is of {window}, without evaluation; losses are of the last finite row."


def _loss_figures(result: Result) -> list[Figure]:
    beside, step = [], result.final_loss_step
    if step is not None and step < result.steps:
        beside.append(f"of step {step}")
    if result.val_loss is not None:
        beside.append(f"validation {result.val_loss:.4f}")
        if result.best is not None and result.best.name == "val/loss":
            beside.append(f"best {result.best.value:.4f} at step {result.best.step}")
        entropy = result.data_facts.get("unigram_entropy")
        beside += [f"byte-unigram entropy {entropy:.4f}"] if entropy is not None else []
    if result.final_loss is None:
        return []
    return [Figure("loss", f"{result.final_loss:.4f}", beside="; ".join(beside))]


def _metric_figures(found: Mapping[str, float], best: BestMetric | None) -> list[Figure]:
    """Return the last value of each metric; if training has it too, beside validation's."""
    figures = []
    for name, value in found.items():
        bare, beside = name.partition("/")[2], []
        if name.startswith(TRAIN) and f"{VAL}{bare}" in found:
            continue
        if name.startswith(VAL) and f"{TRAIN}{bare}" in found:
            beside.append(f"training {number(found[f'{TRAIN}{bare}'])}")
        if best is not None and best.name == name:
            beside.append(f"best {number(best.value)} at step {best.step}")
        figures.append(Figure(name, number(value), beside="; ".join(beside)))
    return figures


def _figures_so_far(story: Story) -> list[Figure]:
    """Return what training.csv says about a live run, or one that died with its supervisor."""
    state = Figure("state", "no result yet", beside="running, or its supervisor was killed")
    rows, speed = story.training, story.so_far.speed if story.so_far else None
    if not rows:
        return [state]
    figures = [
        state,
        Figure("last step", str(rows[-1].step), beside=f"of {story.plan.steps} planned"),
    ]
    metrics = {name: value for name, value in last_metrics(rows).items() if np.isfinite(value)}
    validation = metrics.pop("val/loss", None)
    beside = f"validation {validation:.4f}" if validation is not None else ""
    if (loss := last_loss(rows)) is not None:
        figures.append(Figure("loss", f"{loss[1]:.4f}", beside=beside))
    figures += _metric_figures(metrics, None)
    if speed is not None:
        step_s = StepSeconds(p50=speed.step_s_p50, p90=speed.step_s_p90)
        figures.append(_throughput(speed.samples_per_s, speed.tokens_per_s, step_s))
    return figures


def _way_on(story: Story) -> list[Figure]:
    """Return the command that resumes a run without a result, and where it would begin."""
    if story.so_far is None:
        return []
    step = story.so_far.kept_step
    begins = "step 1, as it has no checkpoint" if step is None else f"its checkpoint of step {step}"
    command = resuming(story.so_far.path, story.plan.workload)
    return [Figure("to resume it", command, beside=f"if it runs no more; from {begins}")]


def _throughput(samples_per_s: float, tokens_per_s: float | None, step_s: StepSeconds) -> Figure:
    unit = "samples/s" if tokens_per_s is None else "tokens/s"
    rate = samples_per_s if tokens_per_s is None else tokens_per_s
    times = f"step p50 {duration(step_s.p50)}; p90 {duration(step_s.p90)}"
    return Figure("throughput", number(rate), unit, times)


def _rate_figures(result: Result) -> list[Figure]:
    if result.window is None or result.step_s is None or result.samples_per_s is None:
        return []
    figures = [_throughput(result.samples_per_s, result.tokens_per_s, result.step_s)]
    if result.tflops_per_rank is None:
        return figures
    computed, _, unit = flop_rate(result.tflops_per_rank).partition(" ")
    share = ""
    if result.matmul_share is not None:
        share = f"{result.matmul_share:.1%} of the matmul rate of paceline check"
    if result.mfu is None:
        return [*figures, Figure("compute a rank", computed, unit, share)]
    beside = "; ".join(filter(None, [f"{computed} {unit} per rank", share]))
    return [*figures, Figure("MFU", f"{result.mfu:.1%}", beside=beside)]


def _stability_figures(result: Result) -> list[Figure]:
    """Say whether the run was steady: first what is not, then the rest of what was measured."""
    found = result.stability
    if found is None:
        return []
    grown = {"GPU": found.gpu_mib_per_min, "rank": found.host_mib_per_min}
    measured = [] if explain_spread(found.p90_over_p50) else [f"p90/p50 {found.p90_over_p50:.2f}"]
    measured += [] if explain_drift(found.drift) else [f"drift {found.drift:+.1%}"]
    measured += [
        f"{n} memory {mib:+.1f} MiB a minute" for n, mib in grown.items() if mib is not None
    ]
    value = "no" if found.problems else "yes"
    return [Figure("steady", value, beside="; ".join([*found.problems, *measured]))]


def _memory_figures(story: Story, result: Result) -> list[Figure]:
    if not result.peak_bytes:
        return []
    on_gpu = bool(result.peak_active_bytes)
    peaks = [item.peak_active_bytes or item.peak_reserved_bytes for item in result.rank_memory]
    known = [peak for peak in peaks if peak]
    spread = f"; {size(min(known))} on the least" if known and min(known) < max(known) else ""
    value, _, unit = size(result.peak_bytes).partition(" ")
    kind = "active in the allocator" if on_gpu else "resident set"
    return [Figure("peak memory a rank", value, unit, f"{kind}{spread}")]


def _phases(run: RunDir, num_ranks: int, window: Window | None) -> dict[int, dict[str, float]]:
    """Return the median seconds of each phase by rank, with the unaccounted rest: in the window
    of the rates, or over all steps where there is no window yet. Only one rank's table at a time
    is in memory."""
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
    """Return the command line, as run.yaml's first line keeps it."""
    first = story.config.partition("\n")[0]
    return first.removeprefix("# asked: ").replace("'", "") if first.startswith("# asked") else ""


def started(story: Story) -> str:
    if story.result is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(story.result.started_at))
