"""From the runs of a sweep to its answer: figures of every run, standings of the cells, the cells
whose loss departs, and whether the target was met."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from paceline.errors import ConfigError
from paceline.records.swept import SweepRecord, SweptPhase
from paceline.stats.figures import LOWER_IS_BETTER, METRICS, RunFigures, measure_run
from paceline.stats.intervals import Interval
from paceline.stats.standings import Group, Standings, compare_groups
from paceline.sweep.folder import SweepDir
from paceline.sweep.manifest import NOT_THERE, SUCCESS, Row

SPEEDUP = "speedup"


class Target(NamedTuple):
    """`speedup>=1.08`, `tokens_per_s>=39`, `tail_mean_iter_p50_ms<=12`."""

    metric: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        found = re.fullmatch(r"\s*(\w+)\s*(>=|<=)\s*([0-9.eE+-]+)\s*", text)
        known = [SPEEDUP, *METRICS]
        try:
            if found is None or found[1] not in known:
                raise ValueError
            limit = float(found[3])
        except ValueError as error:
            raise ConfigError(
                f"the target '{text}' is not one of {', '.join(known)} with >= or <= and a number\n"
                'hint: --target "speedup>=1.08" --baseline CELL, or --target "tokens_per_s>=39"'
            ) from error
        wanted = "<=" if found[1] in LOWER_IS_BETTER else ">="
        if found[2] != wanted:
            raise ConfigError(f"the target '{text}' asks to be worse\nhint: {found[1]}{wanted}...")
        return cls(found[1], found[2], limit)


@dataclass(frozen=True)
class TargetResult:
    """`state`: met, missed, or open: the interval holds the limit, so nobody can tell yet."""

    text: str
    group: str
    found: Interval | None
    state: Literal["met", "missed", "open"]
    because: str

    @property
    def is_met(self) -> bool:
        return self.state == "met"


@dataclass(frozen=True)
class SweepJudgement:
    """What can be said now; a sweep that was stopped early is judged by what it has.

    `figures`: by run_dir of the manifest, of successful runs that could be measured.
    `standings`: of the last phase that has any; None while no cell has a figure.
    `earlier`: of the phases before it. `others`: by the other metric, which may disagree.
    `flagged`: cells whose loss departs from that of their equals, and how. They are not winners.
    """

    figures: dict[str, RunFigures]
    standings: Standings | None
    others: Standings | None
    flagged: dict[str, str]
    winner: str | None
    target: TargetResult | None
    notes: list[str]
    earlier: tuple[Standings, ...] = field(default=())


def judge_sweep(record: SweepRecord, folder: SweepDir, rows: Sequence[Row]) -> SweepJudgement:
    good = [row for row in rows if row["status"] == SUCCESS]
    found = {row["run_dir"]: measure_run(folder.run(row)) for row in good}
    figures = {place: figure for place, figure in found.items() if figure is not None}
    judge = _Judge(record, [row for row in good if row["run_dir"] in figures], figures)
    by_phase = [judge.standings(phase, record.metric) for phase in record.phases]
    decided = [
        (phase, standings)
        for phase, standings in zip(record.phases, by_phase, strict=True)
        if standings is not None
    ]
    if not decided:
        return SweepJudgement(figures, None, None, {}, None, judge.target(None, None), [])
    phase, standings = decided[-1]
    flagged = judge.departures(phase)
    winner = judge.winner(phase, flagged)
    return SweepJudgement(
        figures=figures,
        standings=standings,
        others=judge.standings(phase, _other(record.metric)),
        flagged=flagged,
        winner=winner,
        target=judge.target(phase, winner),
        notes=judge.notes(phase),
        earlier=tuple(standings for _, standings in decided[:-1]),
    )


def _other(metric: str) -> str:
    return "samples_per_s" if metric in LOWER_IS_BETTER else "tail_mean_iter_p50_ms"


@dataclass(frozen=True)
class _Judge:
    record: SweepRecord
    rows: list[Row]
    figures: dict[str, RunFigures]

    def standings(
        self, phase: SweptPhase, metric: str, without: frozenset[str] = frozenset()
    ) -> Standings | None:
        groups = [self._group(name, metric) for name in phase.cells if name not in without]
        filled = [group for group in groups if group.values]
        if not filled:
            return None
        baseline = self._baseline(phase)
        return compare_groups(
            filled,
            baseline=baseline if any(group.name == baseline for group in filled) else None,
            lower_is_better=metric in LOWER_IS_BETTER,
            margin=self.record.margin,
        )

    def departures(self, phase: SweptPhase) -> dict[str, str]:
        """Cells with the global batch of others, but not with their loss. What they are held
        against is the baseline, or the first of them in the order of the matrix."""
        flagged = {}
        baseline, references = self._baseline(phase), dict[str, str]()
        for name in sorted(phase.cells, key=lambda name: name != baseline):
            if self._of(name):
                references.setdefault(self._batch(name), name)
        for name in phase.cells:
            reference = references.get(self._batch(name)) if self._of(name) else None
            if reference is None or reference == name:
                continue
            ours, theirs = self._loss(name), self._loss(reference)
            departure = abs(ours - theirs) / abs(theirs) if theirs else abs(ours)
            if not departure <= self.record.loss_tolerance:  # NaN departs too
                flagged[name] = (
                    f"its loss ends at {ours:.4g}, that of {reference} with the same batch at"
                    f" {theirs:.4g}: {departure:.1%} apart, and {self.record.loss_tolerance:.1%}"
                    " is allowed (sweep.loss_tolerance)"
                )
        return flagged

    def winner(self, phase: SweptPhase, flagged: dict[str, str]) -> str | None:
        """The first of those that cannot be told from the best, among cells with a sound loss.
        One that looks slower than the margin may be in that set only for want of repeats: it is
        shown there, and not chosen."""
        sound = self.standings(phase, self.record.metric, frozenset(flagged))
        if sound is None:
            return None
        groups = [row.group for row in sound.winners]
        best = fmean(sound.best.group.values)
        near = [g.name for g in groups if _ratio(fmean(g.values), best) <= 1 + self.record.margin]
        return near[0]

    def target(self, phase: SweptPhase | None, winner: str | None) -> TargetResult | None:
        if self.record.target is None:
            return None
        target = Target.parse(self.record.target)
        if phase is None or winner is None:
            because = "no cell has a figure"
            return TargetResult(self.record.target, "", None, "missed", because)
        found = self._interval(phase, winner, target.metric)
        state, because = _hold(target, found)
        return TargetResult(self.record.target, winner, found, state, because)

    def notes(self, phase: SweptPhase) -> list[str]:
        left = [name for name in phase.cells if not self._of(name)]
        notes = [f"{name}: no run of it could be measured" for name in left]
        for what in ("code", "hardware", "data"):
            if len({row[f"{what}_fingerprint"] for row in self.rows}) > 1:
                notes.append(f"not all runs have the same {what}: what differs may be that")
        return notes

    def _interval(self, phase: SweptPhase, winner: str, metric: str) -> Interval | None:
        if metric == SPEEDUP:
            standings = self.standings(phase, self.record.metric)
            assert standings is not None, "there is a winner"
            return standings.of(winner).speedup if standings.is_baseline else None
        alone = compare_groups(
            [self._group(winner, metric)], lower_is_better=metric in LOWER_IS_BETTER
        )
        return alone.rows[0].rate

    def _of(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["group"] == name]

    def _group(self, name: str, metric: str) -> Group:
        rows = self._of(name)
        found = [self.figures[row["run_dir"]].value(metric) for row in rows]
        peaks = [float(row["peak_bytes"]) for row in rows if row["peak_bytes"] != NOT_THERE]
        values = tuple(value for value in found if value is not None)
        return Group(name, values, max(peaks, default=None))

    def _batch(self, name: str) -> str:
        rows = self._of(name)
        return rows[0]["global_batch"] if rows else ""

    def _loss(self, name: str) -> float:
        found = [self.figures[row["run_dir"]].tail_loss for row in self._of(name)]
        known = [loss for loss in found if loss is not None]
        return fmean(known) if known else math.nan

    def _baseline(self, phase: SweptPhase) -> str | None:
        """A baseline stands in each phase under the phase's own name."""
        if self.record.baseline is None:
            return None
        return f"{phase.name}:{self.record.baseline}" if phase.name else self.record.baseline


def _ratio(one: float, other: float) -> float:
    """How far two values are apart, whichever is larger."""
    return max(one, other) / min(one, other)


def _hold(target: Target, found: Interval | None) -> tuple[Literal["met", "missed", "open"], str]:
    """Met only when the whole interval is on the right side of the limit."""
    if found is None:
        return "open", "there is no interval yet: it needs more repeats"
    sign = -1 if target.sign == "<=" else 1
    low, high = sorted((sign * found.low, sign * found.high))
    text = f"{target.metric} is {found.value:.4g} ({found.low:.4g} to {found.high:.4g})"
    if low >= sign * target.limit:
        return "met", text
    if high < sign * target.limit:
        return "missed", text
    side = "reached" if sign * found.value >= sign * target.limit else "not reached"
    return "open", f"{text}: {side}, but not shown; it needs more repeats"
