"""What the summary and the page of a sweep show: plain data (the cells in the order of the
standings, their runs), the answer as sentences, and remarks: what did not run, what cannot be
trusted, where metrics disagree, what the sweep was asked to compare."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.records.words import count, interval, number, ratio
from paceline.stats.figures import RunFigures
from paceline.stats.stability import GATES as RUN_GATES
from paceline.stats.stability import explain_drift, explain_spread
from paceline.stats.standings import Standing, Standings
from paceline.workloads.given import training

UNITS = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tail_mean_iter_p50_ms": "ms an iteration",
}
# Above these a run, or a cell, is called unsteady.
MAX_VARIATION = 0.05
GATES = f"{RUN_GATES}; of a cell: runs that vary by over {MAX_VARIATION:.0%}"
SIGNS = "★ the fastest, told apart from all others; ≈ not told apart from the best"
VERDICTS = (
    ("faster", "the whole interval of the speedup is above 1"),
    ("slower", "the whole interval of the speedup is below 1"),
    ("no difference seen", "the whole interval is inside the margin: nothing that matters"),
    ("not enough data", "the interval is too wide to tell; more repeats narrow it"),
)
# The same for cells that are compared by what they learn.
QUALITY = {"fastest": "best", "Fastest": "Best", "faster": "better", "slower": "worse",
           "speedup": "gain"}  # fmt: skip


def unit_of(metric: str) -> str:
    return UNITS.get(metric, metric.partition(":")[0])


def say_of(metric: str, text: str) -> str:
    """Return a text about speed in words for what a metric measures."""
    for speed, quality in QUALITY.items() if metric not in UNITS else ():
        text = text.replace(speed, quality)
    return text


@dataclass(frozen=True)
class RunLine:
    """One run. `href` is relative to the sweep; `problem` says why it is not compared."""

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
    `is_fastest`: told apart from every other; `is_tied`: not told apart from the best, as others
    are; one of the best is chosen, whether or not it is alone."""

    cell: SweptCell
    runs: Sequence[RunLine]
    standing: Standing | None
    throughput: float | None
    peak_bytes: float | None
    global_batch: str
    flag: str = ""
    is_fastest: bool = False
    is_tied: bool = False
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
    def is_winner(self) -> bool:
        return self.is_fastest or self.is_tied or self.is_chosen

    @property
    def sign(self) -> str:
        """Return a star only for a proven winner; nothing for a cell without a rival."""
        return "★" if self.is_fastest else "≈" if self.is_tied else ""

    @property
    def label(self) -> str:
        """Return its name with all its remarks, for a table."""
        taken = " (chosen)" if self.is_chosen and self.is_tied else ""
        return f"{self.name} {self.sign}".rstrip() + taken + (" (baseline)" * self.is_baseline)

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
        return unit_of(self.record.metric)

    @property
    def ends(self) -> str:
        """Return the text beside the value of a cell."""
        is_speed = self.record.metric in UNITS
        return "95% interval of each cell" if is_speed else "least and most of each cell's runs"

    def say(self, text: str) -> str:
        """Return a text about speed in words for what is compared here."""
        return say_of(self.record.metric, text)

    @property
    def work_unit(self) -> str:
        return UNITS["tokens_per_s" if self.record.metric == "tokens_per_s" else "samples_per_s"]

    @property
    def measured(self) -> list[CellLine]:
        return [line for line in self.cells if line.standing is not None]

    @property
    def latest(self) -> list[CellLine]:
        """Return every configuration once, with the result of the last phase that measured it."""
        kept: dict[tuple[str, ...], CellLine] = {}
        for line in self.measured:
            kept.setdefault(tuple(line.cell.overrides), line)
        return list(kept.values())

    def of_state(self, *states: str) -> list[CellLine]:
        return [line for line in self.cells if line.state in states]

    def line(self, name: str) -> CellLine:
        return next(line for line in self.cells if line.name == name)


def answer(story: SweepStory) -> list[str]:
    """Say the result in sentences, the most important first."""
    said = [story.say(_winner(story)), *_tied(story)]
    return [*said, *([story.target_text] if story.target_text else [])]


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


def words_of(record: SweepRecord, cell: SweptCell) -> list[str]:
    """Return what to type behind `paceline train RECIPE`: what all cells got and what this one
    got, but nothing of how the sweep ran it. Where a key is set twice, only the last one."""
    words = {word.partition("=")[0]: word for word in [*record.overrides, *cell.overrides]}
    return list(words.values())


def command(story: SweepStory) -> str:
    """Return the command, or the Python call, that trains the winner; empty if there is none."""
    if story.winner is None:
        return ""
    record = story.record
    return training(record.recipe, words_of(record, story.line(story.winner).cell))


def rate_text(standing: Standing, unit: str) -> str:
    if standing.rate is None:
        runs = count(len(standing.group.values), "run")
        return f"{number(standing.value)} {unit} (no interval from {runs})"
    low, high = number(standing.rate.low), number(standing.rate.high)
    what = "95% interval" if standing.verdict.is_speed else "its runs:"
    return f"{number(standing.rate.value)} {unit} ({what} {low} to {high})"


def reference(story: SweepStory) -> str:
    """Say what every speedup is relative to."""
    if story.standings is None:
        return "nothing yet"
    what = "the baseline" if story.standings.is_baseline else "the best cell"
    where = " of its phase" if len(story.rounds) > 1 else f", {story.standings.reference}"
    return what + where


def rate_cell(line: CellLine) -> str:
    """Write a rate with its interval: `123.4 (120 to 126)`."""
    if line.standing is None:
        return ""
    rate = line.standing.rate
    return interval(*rate) if rate else number(line.standing.value)


def speedup_cell(line: CellLine) -> str:
    speedup = line.standing.speedup if line.standing else None
    return ratio(*speedup) if speedup else ""


def variation_cell(line: CellLine) -> str:
    variation = line.standing.variation if line.standing else None
    return f"{variation:.2%}" if variation is not None else ""


def remarks(story: SweepStory) -> list[tuple[str, list[str]]]:
    """Return titles and lines, for both the summary and the page; a title without lines is left
    out."""
    disagreed = disagreement(story)
    found = [
        ("Where the two metrics disagree", [disagreed] if disagreed else []),
        ("Flagged: the loss departs", [f"{c.name}: {c.flag}" for c in story.cells if c.flag]),
        ("Runs that are not in the comparison", _left_out(story)),
        ("Refused by the plan", [f"{c.name}: {c.cell.refusal}" for c in story.of_state("refused")]),
        ("Not run", [line.name for line in story.of_state("not run")]),
        (f"Unsteady: {GATES}", instabilities(story)),
        ("Notes", list(story.notes)),
    ]
    return [(title, lines) for title, lines in found if lines]


def asked(story: SweepStory) -> list[tuple[str, str]]:
    """Return the sweep's question as rows of a table."""
    record = story.record
    counts = [f"{len(story.measured)} measured"]
    for state in ("failed", "nothing to measure", "refused", "not run"):
        if count := len(story.of_state(state)):
            counts.append(f"{count} {state}")
    rows = [
        ("recipe", " ".join([record.recipe, *record.overrides])),
        *((f"axis {key}", ", ".join(values)) for key, values in record.axes.items()),
        ("cells", f"{len(story.cells)}: {', '.join(counts)}"),
        *((_phase_label(phase.name), _phase(phase)) for phase in record.phases),
        ("compared by", record.metric),
        ("baseline", record.baseline or "none: cells are held against the best one"),
        ("margin", f"{record.margin:.3g}: a difference below this share does not matter"),
        ("target", record.target or "none"),
        ("order of runs", f"repeat by repeat over all cells, shuffled by seed {record.seed}"),
        ("directory", story.name),
    ]
    return rows


def _phase_label(name: str) -> str:
    return f"phase {name}" if name else "schedule"


def _phase(phase: SweptPhase) -> str:
    cells = f"{len(phase.cells)} cells" if phase.cells else "cells not yet decided"
    return f"{cells}, {phase.repeats} repeats, {phase.steps} steps"


def _left_out(story: SweepStory) -> list[str]:
    return [
        f"{line.name}, {run.label}: {run.problem}, outcome {run.outcome}, exit code"
        f" {run.exit_code}, last step {run.last_step}{': ' + run.detail if run.detail else ''}"
        for line in story.cells
        for run in line.failed
    ]


def instabilities(story: SweepStory) -> list[str]:
    """Return the cells whose figures deserve less trust, and why; none if they are not compared by
    speed."""
    if story.record.metric not in UNITS:
        return []
    found = {line.name: _unrest(line) for line in story.measured}
    return [f"{name}: {'; '.join(why)}" for name, why in found.items() if why]


def _unrest(line: CellLine) -> list[str]:
    """Return what is unsteady in a cell: runs that differ, rare slow steps, a speed that changes
    while it is measured."""
    runs = [(run.label, run.figures) for run in line.runs if run.figures is not None]
    spread = {label: item.spread for label, item in runs if explain_spread(item.spread)}
    drift = {label: item.drift for label, item in runs if explain_drift(item.drift)}
    leaks = [f"{g} ({label})" for label, item in runs for g in item.growth if g.is_leak]
    variation = line.standing.variation if line.standing else None
    found = []
    if variation is not None and variation > MAX_VARIATION:
        found.append(f"its runs vary by {variation:.1%}")
    if spread:
        most = max(spread.values())
        found.append(f"step time p90/p50 up to {most:.2f} ({', '.join(spread)})")
    if drift:
        most = max(drift.values(), key=abs)
        found.append(f"up to {explain_drift(most)} ({', '.join(drift)})")
    if leaks:
        found.append(f"memory grows: {', '.join(leaks)}")
    return found


def disagreement(story: SweepStory) -> str:
    """Say why the other metric would have chosen another cell; empty if it would not."""
    if story.standings is None or story.others is None or story.winner is None:
        return ""
    if any(standing.group.name == story.winner for standing in story.others.winners):
        return ""
    ours, theirs = story.line(story.winner), story.line(story.others.best.group.name)
    said = (
        f"By {story.record.metric} the best is {ours.name}, by {_other_metric(story)} it is"
        f" {theirs.name}."
    )
    if ours.global_batch != theirs.global_batch:
        return (
            f"{said} They do unequal work in a step ({ours.global_batch} samples against"
            f" {theirs.global_batch}), and the time of an iteration does not count the work: by"
            " it the smallest batch wins. Trust it only among cells of equal batch."
        )
    return (
        f"{said} Their batches are equal, so the difference is in what is counted: the rate is"
        " work over all time of the steady window, the iteration time is a mean of medians over"
        " the last windows, which leaves slow steps out."
    )


def _other_metric(story: SweepStory) -> str:
    is_time = story.record.metric == "tail_mean_iter_p50_ms"
    return "samples_per_s" if is_time else "tail_mean_iter_p50_ms"
