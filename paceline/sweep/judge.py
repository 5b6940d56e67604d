"""Judges the runs of a sweep: standings of the cells, cells whose loss departs, the winner, and
whether the target was met (target.py)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from paceline.errors import DataError
from paceline.records import Result
from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.records.words import few
from paceline.stats.figures import Losses, RunFigures, is_speed, lower_is_better, measure_run
from paceline.stats.intervals import Interval
from paceline.stats.standings import Group, Standing, Standings, compare_groups
from paceline.sweep.folder import NOT_THERE, STOPPED, SUCCESS, Row, SweepDir, rows_of
from paceline.sweep.target import SPEEDUP, Target, TargetResult, hold

# Losses are compared as means over fifths of a run: single steps are noisy, and a mean over the
# whole run would hide a curve that departs late. In the first fifth all losses fall alike.
NUM_PARTS = 5


@dataclass(frozen=True)
class SweepJudgement:
    """What can be said now; a sweep that was stopped early is judged by what it has.

    `figures`: of successful runs that could be measured, by their run_dir in the manifest.
    `standings`: of the phase that decides; None while no cell has a figure. Cells whose loss
    departs come last, and no other cell is compared with them. `earlier`: of the phases before it.
    `others`: the same cells by the other metric, which may disagree.
    `flagged`: cells whose loss departs from that of cells with the same model and batch, and how.
    """

    figures: dict[str, RunFigures]
    standings: Standings | None
    others: Standings | None
    flagged: dict[str, str]
    winner: str | None
    target: TargetResult | None
    notes: list[str]
    earlier: tuple[Standings, ...] = field(default=())

    @property
    def rounds(self) -> list[Standings]:
        """Return the standings of all phases that have any, the last first."""
        return [*([self.standings] if self.standings else []), *reversed(self.earlier)]

    def in_order(self, record: SweepRecord) -> list[SweptCell]:
        """Return the cells of the standings, phase by phase, then the others as drawn."""
        placed = [row.group.name for standings in self.rounds for row in standings.rows]
        known = {cell.name: cell for cell in record.cells}
        rest = [cell for cell in record.cells if cell.name not in placed]
        return [*(known[name] for name in placed if name in known), *rest]

    def standing_of(self, name: str) -> Standing | None:
        """Return a cell's place in its own phase; None where it has no number."""
        rows = [row for standings in self.rounds for row in standings.rows]
        return next((row for row in rows if row.group.name == name and row.group.values), None)

    def is_winner(self, name: str) -> bool:
        """Tell whether a cell is one of those that cannot be told apart from the best in the last
        phase; never one whose loss departs."""
        leading = self.standings.winners if self.standings else []
        tied = {row.group.name for row in leading} - self.flagged.keys()
        return name in tied or name == self.winner


def judge_sweep(record: SweepRecord, folder: SweepDir, rows: Sequence[Row]) -> SweepJudgement:
    """Read the figures of every run from its files, and judge."""
    good = [row for row in rows if row["status"] == SUCCESS]
    found = {row["run_dir"]: measure_run(folder.run(row), record.tail_points) for row in good}
    figures = {place: figure for place, figure in found.items() if figure is not None}
    return judge_figures(record, rows, figures)


def judge_figures(
    record: SweepRecord, rows: Sequence[Row], figures: dict[str, RunFigures]
) -> SweepJudgement:
    """Judge the runs by figures that were read already."""
    judges = [_Judge(record, phase, list(rows), figures) for phase in record.phases]
    able = [judge for judge in judges if judge.standings is not None]
    if not able:
        target = _missed(record, "no cell has a figure") if record.target else None
        return SweepJudgement(figures, None, None, {}, None, target, [])
    # A phase that was stopped in its first runs must not overrule one that was finished.
    deciding = next((judge for judge in reversed(able) if judge.has_ended), able[0])
    begun = [judge.phase.name for judge in able[able.index(deciding) + 1 :]]
    notes = [f"phase {name} was begun, and is not in the answer" for name in begun]
    return SweepJudgement(
        figures=figures,
        standings=deciding.standings,
        others=deciding.compare(_other(record.metric), deciding.sound)
        if is_speed(record.metric)
        else None,
        flagged=deciding.flagged,
        winner=deciding.winner(),
        target=deciding.target() if record.target else None,
        notes=[*notes, *deciding.notes()],
        earlier=tuple(j.standings for j in able[: able.index(deciding)] if j.standings),
    )


def _other(metric: str) -> str:
    return "samples_per_s" if lower_is_better(metric) else "tail_mean_iter_p50_ms"


def _missed(record: SweepRecord, because: str) -> TargetResult:
    return TargetResult(record.target or "", "", None, "missed", because)


class _Judge:
    """Judge one phase: its runs, their losses, its standings."""

    def __init__(
        self,
        record: SweepRecord,
        phase: SweptPhase,
        rows: Sequence[Row],
        figures: Mapping[str, RunFigures],
    ) -> None:
        self.record, self.phase, self.figures = record, phase, figures
        self.rows = rows_of(phase, rows)
        self.baseline = self._find_baseline()
        self.flagged = dict(self._departures())
        self.sound = [name for name in phase.cells if name not in self.flagged]
        self.standings = self._standings()

    @property
    def has_ended(self) -> bool:
        """Tell whether every run of the phase has ended, well or badly."""
        ended = [row for row in self.rows if row["outcome"] not in STOPPED]
        return len(ended) == len(self.phase.cells) * self.phase.repeats

    def compare(
        self, metric: str, names: Sequence[str], baseline: str | None = None
    ) -> Standings | None:
        """Compare the cells `names` by a metric; None where none of them has a figure."""
        groups = [self._group(name, metric) for name in names]
        filled = [group for group in groups if group.values]
        if not filled:
            return None
        wanted = baseline or self.baseline
        return compare_groups(
            filled,
            baseline=wanted if any(group.name == wanted for group in filled) else None,
            lower_is_better=lower_is_better(metric),
            margin=self.record.margin,
            is_speed=is_speed(metric),
        )

    def winner(self) -> str | None:
        """Return the first of the cells that cannot be told apart from the best."""
        return self.standings.winners[0].group.name if self.standings else None

    def target(self) -> TargetResult:
        winner = self.winner()
        assert winner is not None and self.record.target is not None
        target = Target.parse(self.record.target)
        if target.metric == SPEEDUP and not (self.standings and self.standings.is_baseline):
            return _missed(self.record, f"the baseline {self.record.baseline} has no figure")
        found = self._interval(winner, target.metric)
        state, because = hold(target, found)
        return TargetResult(self.record.target, winner, found, state, because)

    def notes(self) -> list[str]:
        notes = [
            f"{name}: none of its runs could be measured"
            for name in self.phase.cells
            if not self._of(name)
        ]
        notes += self._without_metric()
        if self.record.baseline and self.standings and not self.standings.is_baseline:
            notes.append(
                f"the baseline {self.record.baseline} has no figure: all are held against the best"
            )
        for what in ("code", "hardware", "data"):
            if len({row[f"{what}_fingerprint"] for row in self.rows}) > 1:
                notes.append(f"not all runs have the same {what}: a difference may come from that")
        alone = self._without_equals()
        if alone:
            notes.append(
                f"no other cell has the model and global batch of {', '.join(alone)}: a loss that"
                " departs would not be seen"
            )
        return notes

    def _without_metric(self) -> list[str]:
        """Name the cells with runs that lack the metric of the job that was asked for."""
        metric = self.record.metric
        runs = {name: [self.figures[row["run_dir"]] for row in self._of(name)]
                for name in self.phase.cells}  # fmt: skip
        short = [name for name, own in runs.items() if any(f.value(metric) is None for f in own)]
        if is_speed(metric) or not short:
            return []
        known = sorted({name for own in runs.values() for f in own for name in f.courses})
        return [
            f"{', '.join(short)}: a run without a value of {metric} above 0; there are"
            f" {', '.join(known)}"
        ]

    def _standings(self) -> Standings | None:
        """Compare the sound cells among themselves; then add the others, each held against the
        same reference, so that a cell that trains something else cannot change who wins."""
        sound = self.compare(self.record.metric, self.sound)
        if sound is None:
            return None
        return replace(sound, rows=(*sound.rows, *self._flagged_rows(sound.reference)))

    def _flagged_rows(self, reference: str) -> Iterator[Standing]:
        for name in self.flagged:
            beside = self.compare(self.record.metric, [*self.sound, name], reference)
            assert beside is not None, "there are sound cells"
            yield replace(beside.of(name), is_winner=False)

    def _departures(self) -> Iterator[tuple[str, str]]:
        """Yield the cells that have the model and the global batch of others, but not their
        losses. They are held against the baseline, or against the first of their kind in the
        matrix. Where cells are compared by what they learn, none departs: that is the question."""
        if not is_speed(self.record.metric):
            return
        references: dict[tuple[str, ...], str] = {}
        for name in sorted(self.phase.cells, key=lambda name: name != self.baseline):
            curve = self._curve(name)
            if curve and all(map(math.isfinite, curve)):
                references.setdefault(self._kind(name), name)
        for name in self.phase.cells:
            reference = references.get(self._kind(name)) if self._of(name) else None
            if reference in (None, name):
                continue
            assert reference is not None
            departure = _apart(self._curve(name), self._curve(reference))
            if not departure <= self.record.loss_tolerance:  # NaN departs too
                yield name, self._told(name, reference, departure)

    def _told(self, name: str, reference: str, departure: float) -> str:
        ours, theirs = ((self._curve(n) or [math.nan])[-1] for n in (name, reference))
        return (
            f"its loss ends at {ours:.4g}, that of {reference} with the same batch at {theirs:.4g};"
            f" they are up to {departure:.1%} apart, and {self.record.loss_tolerance:.1%} is"
            " allowed (sweep.loss_tolerance); --metric val/loss:min compares what is learned"
        )

    def _without_equals(self) -> list[str]:
        if not is_speed(self.record.metric):
            return []
        kinds = [self._kind(name) for name in self.phase.cells if self._of(name)]
        return [n for n in self.phase.cells if self._of(n) and kinds.count(self._kind(n)) == 1]

    def _interval(self, winner: str, metric: str) -> Interval | None:
        if metric == SPEEDUP:
            assert self.standings is not None
            return self.standings.of(winner).speedup
        group = self._group(winner, metric)
        return compare_groups([group]).rows[0].rate if group.values else None

    def _of(self, name: str) -> list[Row]:
        """Return the runs of a cell that could be measured."""
        return [r for r in self.rows if r["group"] == name and r["run_dir"] in self.figures]

    def _group(self, name: str, metric: str) -> Group:
        rows = self._of(name)
        found = [self.figures[row["run_dir"]].value(metric) for row in rows]
        peaks = [float(row["peak_bytes"]) for row in rows if row["peak_bytes"] != NOT_THERE]
        values = tuple(value for value in found if value is not None)
        return Group(name, values, max(peaks, default=None))

    def _kind(self, name: str) -> tuple[str, ...]:
        """Return what must be equal for losses to compare: samples per step, and the model."""
        settings = self.record.cell(name).settings.items()
        model = [f"{key}={text}" for key, text in settings if key.startswith("model.")]
        rows = self._of(name)
        return (rows[0]["global_batch"] if rows else "", *model)

    def _curve(self, name: str) -> list[float]:
        """Return the loss of a cell over time: the mean over its runs of each part but the first;
        nothing where a run has too few steps to be cut like the others."""
        curves = [_parts(self.figures[row["run_dir"]].losses) for row in self._of(name)]
        if len({len(curve) for curve in curves}) != 1:
            return []
        return [fmean(part) for part in zip(*curves, strict=True)]

    def _find_baseline(self) -> str | None:
        """Return the name of the baseline in this phase."""
        if self.record.baseline is None:
            return None
        return (
            f"{self.phase.name}:{self.record.baseline}" if self.phase.name else self.record.baseline
        )


def _parts(losses: Losses) -> list[float]:
    """Cut a loss curve into NUM_PARTS and return the mean of each but the first."""
    edges = [round(len(losses) * n / NUM_PARTS) for n in range(NUM_PARTS + 1)]
    parts = [losses[a:b] for a, b in zip(edges[1:], edges[2:], strict=False)]
    return [float(np.mean(part)) for part in parts if len(part)]


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative distance between two curves; NaN if either has one, or has fewer
    parts than the other: what cannot be compared is not found equal."""
    if len(ours) != len(theirs):
        return math.nan
    gaps = [
        abs(a - b) / abs(b) if b else abs(a - b) for a, b in zip(ours, theirs, strict=True)
    ]  # fmt: skip
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def peak_bytes(standing: Standing | None, rows: list[Row]) -> float | None:
    """Return the memory that the standings order by; where a cell has none, the most that one of
    its runs took."""
    if standing is not None and standing.group.memory_bytes is not None:
        return standing.group.memory_bytes
    known = [float(row["peak_bytes"]) for row in rows if row["peak_bytes"] not in ("", NOT_THERE)]
    return max(known, default=None)


NO_METRIC = "no_metric"  # a run that ended well, without the number that cells are compared by


def problem_of(folder: SweepDir, record: SweepRecord, row: Row, judgement: SweepJudgement) -> str:
    """Say why a run is not in the comparison, as skipped_runs.tsv has it; empty where it is."""
    if row["status"] != SUCCESS:
        return "run_failed"
    figures = judgement.figures.get(row["run_dir"])
    if figures is not None and figures.value(record.metric) is not None:
        return ""
    if figures is not None and not is_speed(record.metric):
        return NO_METRIC
    has_log = folder.run(row).train_log.is_file()
    return "no_timing_points" if has_log else "train_log_missing"


def cause_of(folder: SweepDir, row: Row, problem: str) -> str:
    """Return the root cause that the run's own record names, in one line; where the metric was not
    there, what was."""
    try:
        result = Result.load(folder.run(row).result)
    except DataError:
        return "it left no result"
    if problem == NO_METRIC:
        return f"its metrics are {few(result.metrics) or 'none'}"
    failure = result.failure
    if failure is None:
        return ""
    return f"rank {failure.rank} on {failure.host}: {' '.join(failure.message.split())}"
