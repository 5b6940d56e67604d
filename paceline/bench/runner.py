"""`paceline bench run`: plan every pair, prove it equal, run it interleaved, judge it, write it.

DIR/bench.json   summary.md   TARGET/ (a sweep directory: sweep.json, run_manifest.tsv, runs/)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.bench.expectations import Expectations, check_rows, hardware_of
from paceline.bench.judge import collect_runs, judge_pair, skipped_pair
from paceline.bench.pairs import Pair, plan_pair
from paceline.bench.profiles import ProfileKind, take_profiles
from paceline.bench.records import BenchReport, GateRow, PairResult
from paceline.bench.target import AskedTargets, load_targets
from paceline.bench.words import summarise
from paceline.config.overrides import parse_override
from paceline.errors import ConfigError, Outcome, PacelineError
from paceline.launch.signals import logged_signals
from paceline.machine.facts import probe
from paceline.records import Env
from paceline.records.files import write_atomic
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.runlock import RunLock
from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.sweep.flow import open_folder, report_sweep
from paceline.sweep.folder import Row, SweepDir, rows_of
from paceline.sweep.matrix import PLAIN
from paceline.sweep.runner import SweepRunner, SweepTalk

REPORT, SUMMARY = "bench.json", "summary.md"
Say = Callable[[str], None]


class Ran(NamedTuple):
    """Rows of a manifest, and the outcome that ended it early, if any."""

    rows: list[Row]
    stopped_by: str = ""


# Runs every cell of the record that is missing in the folder.
PairRunner = Callable[[SweepRecord, Path], Ran]


@dataclass(frozen=True)
class BenchSettings:
    repeats: int = 5
    steps: int = 60
    margin: float = 0.02
    out: Path | None = None
    check: Path | None = None
    save: Path | None = None
    profile: ProfileKind = "none"


@dataclass
class _Bench:
    """Hold a bench while it runs."""

    settings: BenchSettings
    env: Env
    root: Path
    started_at: float
    pairs: list[PairResult] = field(default_factory=list)
    gate: list[GateRow] = field(default_factory=list)
    saved: str = ""

    def take(self, pair: Pair, run_pair: PairRunner, say: Say) -> str:
        """Run and judge one pair. Return the outcome that asks to stop, or nothing."""
        name, settings = pair.target.name, self.settings
        if pair.skipped:
            say(f"{name}: skipped: {pair.skipped}")
            self.pairs.append(skipped_pair(pair))
            return ""
        arms = ", ".join(arm.name for arm in pair.arms)
        say(f"{name}: {pair.target.title} ({arms}; {settings.repeats} runs each)")
        folder = SweepDir(self.root / name)
        try:
            ran = run_pair(record_of(pair, settings.repeats, settings.margin), folder.root)
        except PacelineError as error:
            say(f"{name}: {error}")
            failed = {"status": "failed", "because": str(error)}
            self.pairs.append(skipped_pair(pair).model_copy(update=failed))
            return ""
        runs = {arm.name: collect_runs(folder, ran.rows, arm.name) for arm in pair.arms}
        judged = judge_pair(pair, runs, settings.margin, settings.repeats)
        if ran.stopped_by:
            stopped = {
                "status": "stopped",
                "because": f"{ran.stopped_by} before all runs had ended",
            }
            judged = judged.model_copy(update=stopped)
        elif settings.profile != "none":
            record = record_of(pair, settings.repeats, settings.margin)
            profiles = take_profiles(
                record, folder.root, settings.profile, lambda asked, at: run_pair(asked, at).rows
            )
            judged = judged.model_copy(update={"profiles": profiles})
        self.pairs.append(judged)
        return ran.stopped_by

    def report(self, outcome: Outcome) -> BenchReport:
        return BenchReport(
            out=str(self.root),
            exit_code=outcome.exit_code,
            hardware=hardware_of(self.env),
            margin=self.settings.margin,
            started_at=self.started_at,
            elapsed_s=wall_time() - self.started_at,
            pairs=self.pairs,
            gate=self.gate,
            saved=self.saved,
        )

    def write(self, outcome: Outcome) -> BenchReport:
        made = self.report(outcome)
        made.save(self.root / REPORT)
        write_atomic(self.root / SUMMARY, summarise(made))
        return made


def run_bench(
    asked: AskedTargets, settings: BenchSettings, run_pair: PairRunner, say: Say
) -> BenchReport:
    """Run all pairs. What can be refused is refused before the first run; a failed pair does not
    stop the others."""
    started_at, env = wall_time(), probe()
    pairs = plan_pairs(asked, env, settings.steps)
    expected = _expectations(settings, env, pairs)
    bench = _Bench(settings, env, open_bench(settings.out), started_at)
    for pair in pairs:
        stopped_by = bench.take(pair, run_pair, say)
        if stopped_by:
            say(f"stopped ({stopped_by}): the same command with --out {bench.root} resumes")
            return bench.write(Outcome(stopped_by))
        bench.write(Outcome.OK)
    if expected is not None and settings.check is not None:
        bench.gate = check_rows(expected, bench.pairs)
    is_bad = any(pair.status == "failed" for pair in bench.pairs)
    is_bad |= any(row.is_worse for row in bench.gate)
    if settings.save is not None and not is_bad:
        bench.saved = str(_save(settings.save, bench, pairs))
    return bench.write(Outcome.CHECK_FAILED if is_bad else Outcome.OK)


def plan_pairs(asked: AskedTargets, env: Env, steps: int) -> list[Pair]:
    """Plan every pair, and raise all their problems at once."""
    pairs: list[Pair] = []
    problems: list[str] = []
    for target in asked.targets:
        try:
            pairs.append(plan_pair(target, env, asked.overrides[target.name], steps))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return pairs


def open_bench(out: Path | None) -> Path:
    """Return a new directory, or that of a bench, which is then resumed."""
    if out is None:
        return RunDir.create("bench", None, is_run=False).root
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if names and REPORT not in names and not names <= set(load_targets()):
        raise ConfigError(
            f"{out} holds files and is not the directory of a bench\nhint: give --out another one"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error.strerror}") from error
    return out.resolve()


def record_of(pair: Pair, repeats: int, margin: float) -> SweepRecord:
    """Return the pair as a sweep whose cells are its arms."""
    cells = [
        SweptCell(
            name=arm.name,
            settings={item.key: item.raw for item in map(parse_override, arm.overrides)},
            overrides=arm.overrides,
        )
        for arm in pair.arms
    ]
    names = [cell.name for cell in cells]
    steps = pair.baseline.plan.steps
    return SweepRecord(
        mode="bench",
        recipe=pair.recipe,
        overrides=[word for word in pair.common if word not in PLAIN],  # every cell has those
        axes={},
        cells=cells,
        phases=[SweptPhase(name="", cells=names, repeats=repeats, steps=steps)],
        metric="tokens_per_s" if pair.baseline.plan.unit == "tokens" else "samples_per_s",
        margin=margin,
        baseline=pair.baseline.name,
        seed=pair.baseline.job.config.train.seed,
        loss_tolerance=pair.target.tolerance(pair.device) or 1.0,
    )


def _expectations(settings: BenchSettings, env: Env, pairs: Sequence[Pair]) -> Expectations | None:
    if settings.check is None:
        return None
    expected = Expectations.find(settings.check, env)
    expected.require_same_work(pairs, settings.repeats)
    return expected


def _save(path: Path, bench: _Bench, pairs: Sequence[Pair]) -> Path:
    return Expectations.merge(path, bench.env, bench.pairs, pairs)


def through_sweeps(talk: SweepTalk) -> PairRunner:
    """Return a runner that runs each pair as a sweep: interleaved, resumed by fingerprints,
    recorded in a directory of its own."""

    def run_pair(record: SweepRecord, root: Path) -> Ran:
        folder = open_folder(record, root.name, root)
        with RunLock(folder.root), logged_signals() as signals:
            record.save(folder.record)
            runner = SweepRunner(record, folder, talk, signals)
            try:
                runner.run_phase(record.phases[0])
            finally:
                report_sweep(runner)
            runner.is_stopped()
        return Ran(rows_of(record.phases[0], runner.rows), runner.stopped_by)

    return run_pair
