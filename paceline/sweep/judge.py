"""From the runs of a sweep to its answer: figures of every run, standings of the cells, the cells
whose loss departs, and whether the target was met."""

from dataclasses import dataclass

from paceline.stats.figures import RunFigures
from paceline.stats.standings import Interval, Standings


@dataclass(frozen=True)
class TargetResult:
    """`state`: met, missed, or open: the interval holds the limit, so nobody can tell yet."""

    text: str
    group: str
    found: Interval | None
    state: str
    because: str

    @property
    def is_met(self) -> bool:
        return self.state == "met"


@dataclass(frozen=True)
class SweepJudgement:
    """What can be said now; a sweep that was stopped early is judged by what it has.

    `figures`: by run_dir of the manifest, of successful runs that could be measured.
    `standings`: None while no cell has a figure. `others`: by the other metric, which may disagree.
    `flagged`: cells whose loss departs from that of their equals, and how. They are not winners.
    """

    figures: dict[str, RunFigures]
    standings: Standings | None
    others: Standings | None
    flagged: dict[str, str]
    winner: str | None
    target: TargetResult | None
    notes: list[str]
