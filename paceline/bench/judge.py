"""Judges a pair from its runs: the figures of both sides, intervals of the ratios, and whether
the losses agree. Nothing is clamped, and a crash is a failure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.bench.pairs import Pair, PlannedArm
from paceline.bench.records import ArmResult, PairResult, Range
from paceline.records import Fingerprints, Plan, Result
from paceline.records.recorded import last_to_arrive
from paceline.records.rundir import RunDir
from paceline.records.words import count
from paceline.report.story import read_overlaps
from paceline.stats.balance import Balance, measure_balance
from paceline.stats.figures import Losses, RunFigures, measure_run
from paceline.stats.standings import Group, Standings, compare_groups
from paceline.sweep.folder import SUCCESS, Row, SweepDir

MEMORY_WORDS = {"faster": "less memory", "slower": "more memory"}


@dataclass
class ArmRuns:
    """Hold the runs of one side, in the order of the repeats."""

    figures: list[RunFigures] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    run_dirs: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    fingerprints: Fingerprints | None = None
    balance: Balance | None = None


def collect_runs(folder: SweepDir, rows: Sequence[Row], arm: str) -> ArmRuns:
    """Return the newest run of each repeat: one that failed and was run again counts once."""
    newest = {row["repeat"]: row for row in rows if row["group"] == arm}
    found = ArmRuns()
    for repeat in sorted(newest, key=int):
        row, run = newest[repeat], folder.run(newest[repeat])
        figures = measure_run(run) if row["status"] == SUCCESS else None
        if figures is None:
            found.failures.append(f"repeat {repeat}: {_why(row, run)}")
            continue
        found.figures.append(figures)
        found.run_dirs.append(row["run_dir"])
        result = Result.load(run.result)
        found.peak_bytes += [result.peak_bytes] if result.peak_bytes is not None else []
        found.fingerprints = result.fingerprints
        found.balance = measure_balance(run, Plan.load(run.plan))
        overlaps = read_overlaps(run, result.world_size)
        found.exposed_s += [last_to_arrive(overlaps).exposed_s] if overlaps else []
    return found


def judge_pair(pair: Pair, runs: dict[str, ArmRuns], margin: float, repeats: int) -> PairResult:
    """Turn the runs of both sides into the result of the pair."""
    target, first = pair.target, pair.baseline
    metric = "tokens_per_s" if first.plan.unit == "tokens" else "samples_per_s"
    arms = [_measure_arm(pair, arm, runs[arm.name], metric, repeats) for arm in pair.arms]
    arms = _compare(arms, margin)
    tolerance = target.tolerance(pair.device)
    if tolerance is not None:
        arms = [_agree(arm, runs[arm.name], runs[first.name], tolerance) for arm in arms]
    failures = [f"{arm.name}: {arm.because}" for arm in arms if arm.status == "failed"]
    left_out = [
        ArmResult(name=name, status="skipped", because=why) for name, why in pair.left_out.items()
    ]
    return PairResult(
        target=target.name,
        title=target.title,
        goal=target.goal,
        status="failed" if failures else "ok",
        because="; ".join(failures),
        device=pair.device,
        recipe=pair.recipe,
        metric=metric,
        per_device=target.per_device,
        baseline=first.name,
        steps=first.plan.steps,
        repeats=repeats,
        differs=target.differs,
        equal=pair.facts,
        loss_tolerance=tolerance,
        loss_because=target.loss.because,
        arms=[*arms, *left_out],
    )


def skipped_pair(pair: Pair) -> PairResult:
    target = pair.target
    return PairResult(
        target=target.name,
        title=target.title,
        goal=target.goal,
        status="skipped",
        because=pair.skipped,
        device=pair.device,
        differs=target.differs,
    )


def _measure_arm(
    pair: Pair, arm: PlannedArm, runs: ArmRuns, metric: str, repeats: int
) -> ArmResult:
    figures = runs.figures
    missing = repeats - len(figures) - len(runs.failures)
    problems = [*runs.failures, *([f"{count(missing, 'run')} missing"] if missing > 0 else [])]
    divisor = arm.plan.world_size if pair.target.per_device else 1
    startups = [each.startup_s for each in figures if each.startup_s is not None]
    return ArmResult(
        name=arm.name,
        overrides=arm.overrides,
        status="failed" if problems else "ok",
        because="; ".join(problems),
        run_dirs=runs.run_dirs,
        fingerprints=runs.fingerprints,
        rates=[(each.value(metric) or each.samples_per_s) / divisor for each in figures],
        peak_bytes=runs.peak_bytes,
        losses=list(figures[0].losses) if figures else [],
        step_s_p50=median(each.step_s_p50 for each in figures) if figures else None,
        step_s_p90=median(each.step_s_p90 for each in figures) if figures else None,
        startup_s=median(startups) if startups else None,
        compile_s=median(each.compile_s for each in figures) if figures else None,
        busy_percent=list(runs.balance.busy) if runs.balance else [],
        exposed_s=median(runs.exposed_s) if runs.exposed_s else None,
    )


def _compare(arms: list[ArmResult], margin: float) -> list[ArmResult]:
    """Compare rates and memory of every arm with the first, each with the interval of its ratio."""
    baseline = arms[0].name
    if not arms[0].rates:
        return arms
    speed = compare_groups(
        [Group(arm.name, tuple(arm.rates)) for arm in arms], baseline=baseline, margin=margin
    )
    memory = None
    if all(len(arm.peak_bytes) == len(arm.rates) for arm in arms):
        groups = [Group(arm.name, tuple(map(float, arm.peak_bytes))) for arm in arms]
        memory = compare_groups(groups, baseline=baseline, margin=margin, lower_is_better=True)
    return [_with_standing(arm, arm.name == baseline, speed, memory) for arm in arms]


def _with_standing(
    arm: ArmResult, is_baseline: bool, speed: Standings, memory: Standings | None
) -> ArmResult:
    standing = speed.of(arm.name)
    found: dict[str, object] = {"rate": Range.of(standing.rate)}
    if not is_baseline and arm.rates:
        found |= {"speedup": Range.of(standing.speedup), "verdict": str(standing.verdict)}
        if memory is not None:
            held = memory.of(arm.name)
            words = str(held.verdict)
            found |= {
                "memory_ratio": Range.of(held.speedup),
                "memory_verdict": MEMORY_WORDS.get(words, words),
            }
    return arm.model_copy(update=found)


def _agree(arm: ArmResult, runs: ArmRuns, baseline: ArmRuns, tolerance: float) -> ArmResult:
    """Hold every run's losses against those of the baseline's first run."""
    if not runs.figures or not baseline.figures:
        return arm
    expected = baseline.figures[0].losses
    worst = max(loss_difference(each.losses, expected) for each in runs.figures)
    if worst <= tolerance:
        return arm.model_copy(update={"loss_difference": worst})
    said = f"losses differ by {worst:.2g} of the baseline's; {tolerance:g} is allowed"
    if not math.isfinite(worst):
        said = "losses of other steps than the baseline's, or not finite"
    because = "; ".join(filter(None, (arm.because, said)))
    shown = worst if math.isfinite(worst) else None
    return arm.model_copy(update={"loss_difference": shown, "status": "failed", "because": because})


def loss_difference(losses: Losses, expected: Losses) -> float:
    """Return the relative difference at the worst step; infinite where steps are missing or a
    loss is not finite."""
    if len(losses) != len(expected) or not len(expected):
        return math.inf
    worst = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True)]
    return max(worst) if all(map(math.isfinite, worst)) else math.inf


def _why(row: Row, run: RunDir) -> str:
    if row["status"] == SUCCESS:
        return "no step was taken after the warm-up; give more --steps"
    said = f"{row['outcome']} (exit {row['exit_code']})"
    failure = Result.load(run.result).failure if run.result.is_file() else None
    return f"{said}: {failure.message.splitlines()[0]}" if failure else said
