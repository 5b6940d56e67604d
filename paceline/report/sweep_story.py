"""What the summary and the page of a sweep tell, as plain data: the cells in the order of the
standings, their runs, and the answer in words."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.records.swept import SweepRecord, SweptCell
from paceline.records.words import count, interval, number, ratio
from paceline.stats.figures import RunFigures
from paceline.stats.standings import Standing, Standings

UNITS = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tail_mean_iter_p50_ms": "ms an iteration",
}


@dataclass(frozen=True)
class RunLine:
    """One run. `href` is relative to the sweep; `problem` says why it is not in the comparison."""

    repeat: str
    outcome: str
    exit_code: str
    last_step: str
    href: str
    figures: RunFigures | None
    problem: str = ""
    detail: str = ""

    @property
    def label(self) -> str:
        return f"r{self.repeat}"


@dataclass(frozen=True)
class CellLine:
    """One cell. `throughput` is in the sweep's unit of work, whatever metric it is compared by.
    `is_winner`: not told apart from the best; one of those is chosen."""

    cell: SweptCell
    runs: Sequence[RunLine]
    standing: Standing | None
    throughput: float | None
    peak_bytes: float | None
    global_batch: str
    flag: str = ""
    is_winner: bool = False
    is_chosen: bool = False
    is_baseline: bool = False

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def state(self) -> str:
        if self.cell.refusal:
            return "refused"
        if self.standing is not None:
            return "measured"
        if not self.runs:
            return "not run"
        return "failed" if any(run.outcome != "ok" for run in self.runs) else "nothing to measure"

    @property
    def failed(self) -> list[RunLine]:
        return [run for run in self.runs if run.problem]

    @property
    def sign(self) -> str:
        return "★" if self.is_chosen else "☆" if self.is_winner else ""

    @property
    def verdict(self) -> str:
        return str(self.standing.verdict) if self.standing else self.state


@dataclass(frozen=True)
class SweepStory:
    """`rounds`: the standings of each phase that has any, the last phase first. `cells`: in the
    order of the rounds, then those without a figure. `target`: met, missed or open."""

    name: str
    record: SweepRecord
    cells: Sequence[CellLine]
    rounds: Sequence[Standings]
    others: Standings | None
    winner: str | None
    target: str
    target_text: str
    notes: Sequence[str]

    @property
    def standings(self) -> Standings | None:
        return self.rounds[0] if self.rounds else None

    @property
    def unit(self) -> str:
        return UNITS[self.record.metric]

    @property
    def work_unit(self) -> str:
        return UNITS["tokens_per_s" if self.record.metric == "tokens_per_s" else "samples_per_s"]

    @property
    def measured(self) -> list[CellLine]:
        return [line for line in self.cells if line.standing is not None]

    @property
    def latest(self) -> list[CellLine]:
        """Every configuration once: as the last phase that measured it has found it."""
        kept: dict[tuple[str, ...], CellLine] = {}
        for line in self.measured:
            kept.setdefault(tuple(line.cell.overrides), line)
        return list(kept.values())

    def of_state(self, *states: str) -> list[CellLine]:
        return [line for line in self.cells if line.state in states]

    def line(self, name: str) -> CellLine:
        return next(line for line in self.cells if line.name == name)


def answer(story: SweepStory) -> list[str]:
    """The result in sentences, the most important first."""
    return [_winner(story), *_tied(story), *([story.target_text] if story.target_text else [])]


def _winner(story: SweepStory) -> str:
    if story.standings is None:
        return _nothing(story)
    if story.winner is None:
        return "No cell can be named the fastest: every cell that leads has a loss that departs."
    line = story.line(story.winner)
    assert line.standing is not None, "a winner was measured"
    found = f"{line.name}: {rate_text(line.standing, story.unit)}"
    beside = _against_baseline(story, line.standing)
    if len(winners(story)) > 1:
        return f"Chosen among cells that cannot be told apart is {found}{beside}."
    num_flagged = sum(bool(other.flag) for other in story.measured)
    if len(story.standings.rows) == 1 + num_flagged:
        aside = f" ({num_flagged} put aside for the loss)" if num_flagged else ""
        return f"Only one cell is left to compare{aside}, so nothing is: {found}."
    aside = f" of those with a sound loss ({num_flagged} put aside)" if num_flagged else ""
    return f"Fastest{aside} is {found}{beside}."


def _nothing(story: SweepStory) -> str:
    counts = [
        (len([run for line in story.cells for run in line.failed]), "failed or unmeasured runs"),
        (len(story.of_state("refused")), "cells refused by the plan"),
        (len(story.of_state("not run")), "cells not run"),
    ]
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"There is no answer: nothing was measured ({said or 'no cells'})."


def _against_baseline(story: SweepStory, standing: Standing) -> str:
    assert story.standings is not None
    if not story.standings.is_baseline or standing.speedup is None:
        return ""
    if standing.group.name == story.standings.reference:
        return ", which is the baseline"
    return f", {ratio(*standing.speedup)} times the baseline {story.standings.reference}"


def _tied(story: SweepStory) -> list[str]:
    names = [line.name for line in winners(story)]
    if len(names) < 2:
        return []
    return [
        f"{len(names)} cells cannot be told apart from the best: {'; '.join(names)}. First"
        " those whose mean is within the margin of the best, by lower memory, then by lower"
        " variance; chosen is the first. More repeats may tell them apart."
    ]


def winners(story: SweepStory) -> list[CellLine]:
    return [line for line in story.cells if line.is_winner]


def value_of(standing: Standing) -> float:
    return standing.rate.value if standing.rate else fmean(standing.group.values)


def pasteable(record: SweepRecord, cell: SweptCell) -> str:
    """What to type behind `paceline train RECIPE`: what all cells got and what this one got, but
    nothing of how the sweep ran it. Of a key that is set twice the last one."""
    words = {word.partition("=")[0]: word for word in [*record.overrides, *cell.overrides]}
    return shlex.join(words.values())


def command(story: SweepStory) -> str:
    """How to train what won; empty where nothing did."""
    if story.winner is None:
        return ""
    recipe, cell = shlex.quote(story.record.recipe), story.line(story.winner).cell
    return f"paceline train {recipe} {pasteable(story.record, cell)}".rstrip()


def rate_text(standing: Standing, unit: str) -> str:
    if standing.rate is None:
        runs = count(len(standing.group.values), "run")
        return f"{number(value_of(standing))} {unit} (no interval from {runs})"
    low, high = number(standing.rate.low), number(standing.rate.high)
    return f"{number(standing.rate.value)} {unit} (95% interval {low} to {high})"


def reference(story: SweepStory) -> str:
    """What every speedup is against, in words."""
    if story.standings is None:
        return "nothing yet"
    what = "the baseline" if story.standings.is_baseline else "the best cell"
    where = " of its phase" if len(story.rounds) > 1 else f", {story.standings.reference}"
    return what + where


def rate_cell(line: CellLine) -> str:
    """`123.4 (120 to 126)`."""
    if line.standing is None:
        return ""
    rate = line.standing.rate
    return interval(*rate) if rate else number(value_of(line.standing))


def speedup_cell(line: CellLine) -> str:
    speedup = line.standing.speedup if line.standing else None
    return ratio(*speedup) if speedup else ""


def variation_cell(line: CellLine) -> str:
    variation = line.standing.variation if line.standing else None
    return f"{variation:.2%}" if variation is not None else ""
