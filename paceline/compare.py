"""Runs and groups of runs compared with each other: what differs between them first, then rates,
memory and loss, and a verdict that needs repeats. Reads files only; needs no torch.

paceline compare runs/a runs/b        runs/a/ may hold repeats; SWEEP_DIR:CELL is a sweep's cell
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from pydantic import Field

from paceline.config.describe import differing
from paceline.config.plain import read_plain
from paceline.errors import ConfigError, DataError, Outcome
from paceline.records import Env, Part, Plan, Record, Result
from paceline.records.rundir import RunDir
from paceline.records.swept import Metric, SweepRecord
from paceline.records.words import count
from paceline.stats.figures import RunFigures, is_speed, lower_is_better, measure_run
from paceline.stats.intervals import Interval
from paceline.stats.standings import Group, Standing, Standings, compare_groups
from paceline.sweep.folder import SUCCESS, SweepDir, load_manifest
from paceline.sweep.spec import find_cell

# What of a machine and its software may make a difference; its packages are compared too.
ENV_FACTS = ("host", "cpu", "cores", "driver", "python", "torch", "cuda", "nccl", "hip")
FINGERPRINTS = ("code", "data", "hardware")
MAX_PACKAGES = 12
LOSS_TOLERANCE = 0.02
Kind = Literal["config", "code", "data", "hardware", "env"]


@dataclass(frozen=True)
class Side:
    """One argument: its name as typed, its runs that succeeded, and how the others ended."""

    name: str
    runs: list[RunDir]
    failed: list[str]


class SideFigures(Part):
    """One side in numbers, one per run; `low` and `high` hold the true value."""

    name: str
    num_runs: int
    failed: list[str]
    values: list[float]
    value: float | None
    low: float | None
    high: float | None
    step_s_p50: float | None
    step_s_p90: float | None
    peak_bytes: int | None
    windows: list[str] = Field(description="What each value was computed from.")
    tail_loss: float | None = Field(description="Mean over the last fifth of the steps.")
    metrics: dict[str, float] = Field(
        {}, description="The last value of each metric of the job, mean over the runs."
    )
    ratio: float | None = Field(description="Mean value over the baseline's.")
    speedup: list[float] | None = Field(description="Value, low, high; above 1 is better.")
    verdict: str


class Apart(Part):
    """Something that differs: `values` in the order of the sides."""

    kind: Kind
    what: str
    values: list[str]


class Comparison(Record):
    metric: str
    margin: float
    differences: list[Apart]
    notes: list[str]
    sides: list[SideFigures]


def open_side(text: str) -> Side:
    """Open a run directory, a folder of run directories, or SWEEP_DIR:CELL."""
    path = Path(text)
    if RunDir(path).config.is_file():
        return _side(text, [RunDir(path.resolve())])
    sweep, colon, cell = text.partition(":")
    if colon and SweepDir(Path(sweep)).manifest.is_file():
        return _cell(text, SweepDir(Path(sweep)), cell)
    if not path.is_dir():
        raise DataError(f"{text} is not a run directory, a folder of runs, or SWEEP_DIR:CELL")
    runs = [RunDir(child.resolve()) for child in sorted(path.iterdir()) if not child.is_symlink()]
    runs = [run for run in runs if run.config.is_file()]
    if SweepDir(path).record.is_file():
        cells = [cell.name for cell in SweepRecord.load(SweepDir(path).record).cells]
        names = "\n".join(f"  {text}:{cell}" for cell in cells)
        raise ConfigError(f"{text} is a sweep; compare two of its cells:\n{names}")
    if not runs and RunDir(path).imported.is_file():
        raise RunDir.refuse_imported(path)
    if not runs:
        raise DataError(
            f"{text} holds no run directories\n"
            "hint: give a run directory, or a folder whose children are some"
        )
    side = _side(text, runs)
    _require_repeats(side)
    return side


def _require_repeats(side: Side) -> None:
    """Refuse runs of different things as one side: their mean says nothing. Another seed is the
    same thing again."""
    configs = [read_plain(run.config) | {"name": ""} for run in side.runs]
    inside = [d.what for d in _apart("config", configs) if d.what != "train.seed"]
    if inside:
        raise ConfigError(
            f"the runs in {side.name} are not repeats of one run: {', '.join(inside[:8])} differ\n"
            "hint: name the runs one by one, or SWEEP_DIR:CELL"
        )


def compare_sides(sides: Sequence[Side], metric: Metric | None, margin: float) -> Comparison:
    """Compare all sides with the first, which is the baseline."""
    names = [side.name for side in sides]
    if len(sides) < 2 or len(set(names)) < len(names):
        raise ConfigError("compare needs two or more runs or groups, each named once")
    figures = [[measure_run(run) for run in side.runs] for side in sides]
    measured = [[each for each in found if each is not None] for found in figures]
    chosen = metric or _choose_metric(measured)
    values = [_values(found, chosen) for found in measured]
    if not values[0]:
        known = sorted({name for each in measured[0] for name in each.courses})
        raise DataError(
            f"{names[0]}, the baseline, has no run with {chosen} to measure, or none above 0"
            + (f"\nhint: its metrics are {', '.join(known)}" if not is_speed(chosen) else "")
        )
    standings = compare_groups(
        [Group(name, tuple(found)) for name, found in zip(names, values, strict=True)],
        baseline=names[0],
        lower_is_better=lower_is_better(chosen),
        margin=margin,
        is_speed=is_speed(chosen),
    )
    return Comparison(
        metric=chosen,
        margin=margin,
        differences=list(find_differences(sides)),
        notes=list(_notes(sides, measured, is_speed(chosen))),
        sides=[
            _figures(side, found, standings.of(side.name), standings)
            for side, found in zip(sides, measured, strict=True)
        ],
    )


def find_differences(sides: Sequence[Side]) -> Iterator[Apart]:
    """Yield what differs between the first runs of the sides; runs that differ inside a side are
    named in the notes."""
    firsts = [side.runs[0] for side in sides if side.runs]
    if len(firsts) < len(sides):
        return  # a side without a run that succeeded has nothing to be compared
    configs = [read_plain(run.config) | {"name": ""} for run in firsts]
    yield from _apart("config", configs)
    results = [Result.load(run.result) for run in firsts]
    for name in FINGERPRINTS:
        prints = [{name: getattr(result.fingerprints, name)} for result in results]
        yield from _apart(name, prints)  # type: ignore[arg-type]
    envs = [Env.load(run.env) for run in firsts]
    yield from _apart("env", [_env_facts(env) for env in envs])
    packages = list(_apart("env", [{"packages": env.packages} for env in envs]))
    yield from packages[:MAX_PACKAGES]
    if len(packages) > MAX_PACKAGES:
        more = f"{len(packages) - MAX_PACKAGES} more packages"
        yield Apart(kind="env", what=more, values=["..."] * len(sides))


def _apart(kind: Kind, trees: Sequence[dict[str, Any]]) -> Iterator[Apart]:
    """Yield every key on which any side differs from the first."""
    keys: dict[str, None] = {}
    for tree in trees[1:]:
        keys |= dict.fromkeys(difference.key for difference in differing(trees[0], tree))
    for key in sorted(keys):
        yield Apart(kind=kind, what=key, values=[_at(tree, key) for tree in trees])


def _at(tree: dict[str, Any], key: str) -> str:
    found = {d.key: d.after for d in differing({}, tree)}
    return str(found.get(key, "absent"))


def _env_facts(env: Env) -> dict[str, Any]:
    facts: dict[str, Any] = {name: getattr(env, name) for name in ENV_FACTS}
    facts["gpus"] = ", ".join(gpu.name for gpu in env.gpus) or "none"
    facts["git"] = env.git.commit[:12] + (" dirty" if env.git.dirty else "") if env.git else "none"
    return facts | {"variables": env.variables}


def _side(name: str, runs: Sequence[RunDir]) -> Side:
    good, failed = [], []
    for run in runs:
        if not run.result.is_file():
            failed.append(f"{run.root.name}: no result yet")
        elif (outcome := Result.load(run.result).outcome) is not Outcome.OK:
            failed.append(f"{run.root.name}: {outcome}")
        else:
            good.append(run)
    if not good:
        raise DataError(f"{name}: no run of it succeeded ({'; '.join(failed)})")
    return Side(name, good, failed)


def _cell(name: str, folder: SweepDir, cell: str) -> Side:
    found = find_cell(SweepRecord.load(folder.record).cells, cell).name
    own = [row for row in load_manifest(folder.manifest) if row["group"] == found]
    if not own:
        raise DataError(f"no run of {found} has ended in {folder.root}")
    good = [folder.run(row) for row in own if row["status"] == SUCCESS]
    failed = [
        f"repeat {row['repeat']}: {row['outcome']}" for row in own if row["status"] != SUCCESS
    ]
    if not good:
        raise DataError(f"{name}: no run of it succeeded ({'; '.join(failed)})")
    return Side(name, good, failed)


def _choose_metric(measured: Sequence[Sequence[RunFigures]]) -> Metric:
    every = [each for found in measured for each in found]
    has_tokens = bool(every) and all(each.tokens_per_s is not None for each in every)
    return "tokens_per_s" if has_tokens else "samples_per_s"


def _mean_metrics(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean over the runs of the last value of each metric that all of them have."""
    every = [_metrics_of(result) for result in results]
    names = [name for name in every[0] if all(name in found for found in every)] if every else []
    return {name: fmean(found[name] for found in every) for name in names}


def _metrics_of(result: Result) -> dict[str, float]:
    loss = {} if result.val_loss is None else {"val/loss": result.val_loss}
    return loss | result.metrics


def _values(figures: Sequence[RunFigures], metric: str) -> list[float]:
    found = [each.value(metric) for each in figures]
    return [value for value in found if value is not None]


def _notes(
    sides: Sequence[Side], measured: Sequence[Sequence[RunFigures]], by_speed: bool
) -> Iterator[str]:
    for side, figures in zip(sides, measured, strict=True):
        if len(figures) < len(side.runs):
            runs = count(len(side.runs) - len(figures), "run")
            yield f"{side.name}: {runs} without a step after warm-up"
    if any(len(figures) < 2 for figures in measured):
        yield "one run per side cannot tell a difference from chance: repeat it"
    if by_speed:  # else what was learned is the question
        yield from _loss_notes(sides, measured)
    sizes = {Result.load(run.result).world_size for side in sides for run in side.runs}
    if len(sizes) > 1:
        yield f"the sides ran on {' and '.join(map(str, sorted(sizes)))} ranks: rates are of all"


def _loss_notes(sides: Sequence[Side], measured: Sequence[Sequence[RunFigures]]) -> Iterator[str]:
    """Compare losses where a step takes as many samples and there are as many steps."""
    plans = [Plan.load(side.runs[0].plan) for side in sides]
    tails = [[each.tail_loss for each in figures if each.tail_loss] for figures in measured]
    for side, plan, tail in list(zip(sides, plans, tails, strict=True))[1:]:
        if not tail or not tails[0]:
            continue
        apart = abs(fmean(tail) / fmean(tails[0]) - 1)
        if (plan.batch.global_size, plan.steps) != (plans[0].batch.global_size, plans[0].steps):
            yield f"{side.name}: other samples per step, or other steps: its loss does not compare"
        elif apart > LOSS_TOLERANCE:
            yield f"{side.name}: its loss is {apart:.1%} from the baseline's: not the same training"


def _figures(
    side: Side, figures: Sequence[RunFigures], standing: Standing, against: Standings
) -> SideFigures:
    is_baseline = side.name == against.reference
    tails = [each.tail_loss for each in figures if each.tail_loss is not None]
    results = [Result.load(run.result) for run in side.runs]
    values = list(standing.group.values)
    rate = standing.rate or Interval(fmean(values) if values else 0.0, 0.0, 0.0)
    speedup = None if is_baseline or standing.speedup is None else list(standing.speedup)
    theirs = against.of(against.reference).group.values
    return SideFigures(
        name=side.name,
        num_runs=len(side.runs),
        failed=side.failed,
        values=values,
        value=rate.value if values else None,
        low=rate.low if standing.rate else None,
        high=rate.high if standing.rate else None,
        step_s_p50=median(each.step_s_p50 for each in figures) if figures else None,
        step_s_p90=median(each.step_s_p90 for each in figures) if figures else None,
        peak_bytes=max((r.peak_bytes for r in results if r.peak_bytes is not None), default=None),
        metrics=_mean_metrics(results),
        windows=[str(each.window) for each in figures],
        tail_loss=fmean(tails) if tails else None,
        ratio=None if is_baseline or not values else fmean(values) / fmean(theirs),
        speedup=speedup,
        verdict="baseline" if is_baseline else str(standing.verdict),
    )
