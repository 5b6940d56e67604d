"""What the summary and the page of a sweep say beside the standings: what did not run, what is not
to be trusted, where the metrics disagree, what was asked."""

from paceline.records.swept import SweptPhase
from paceline.report.sweep_story import CellLine, SweepStory
from paceline.stats.figures import RunFigures

# Above these a run, or a cell, is called unsteady.
MAX_SPREAD, MAX_DRIFT, MAX_VARIATION = 1.5, 0.10, 0.05
GATES = f"p90/p50 over {MAX_SPREAD}, drift over {MAX_DRIFT:.0%}, runs over {MAX_VARIATION:.0%}"
VERDICTS = (
    ("faster", "the whole interval of the speedup is above 1"),
    ("slower", "the whole interval of the speedup is below 1"),
    ("no difference seen", "the whole interval is inside the margin: nothing that matters"),
    ("not enough data", "the interval is too wide to tell; more repeats narrow it"),
)


def remarks(story: SweepStory) -> list[tuple[str, list[str]]]:
    """Titles and lines, for both the summary and the page; a title without lines is left out."""
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
    """The question, as rows of a table."""
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
    """Cells whose figures deserve less trust, and why."""
    found = {line.name: _unrest(line) for line in story.measured}
    return [f"{name}: {'; '.join(why)}" for name, why in found.items() if why]


def _unrest(line: CellLine) -> list[str]:
    """Runs that differ, rare slow steps, and a speed that changes while it is measured."""
    runs = [(run.label, run.figures) for run in line.runs if run.figures is not None]
    spread = {label: spread_of(item) for label, item in runs if spread_of(item) > MAX_SPREAD}
    drift = {label: item.drift for label, item in runs if abs(item.drift) > MAX_DRIFT}
    variation = line.standing.variation if line.standing else None
    found = []
    if variation is not None and variation > MAX_VARIATION:
        found.append(f"its runs vary by {variation:.1%}")
    if spread:
        most = max(spread.values())
        found.append(f"step time p90/p50 up to {most:.2f} ({', '.join(spread)})")
    if drift:
        most = max(drift.values(), key=abs)
        way = "slower" if most > 0 else "faster"
        found.append(
            f"up to {abs(most):.0%} {way} at the end of the window than at its begin"
            f" ({', '.join(drift)})"
        )
    return found


def disagreement(story: SweepStory) -> str:
    """Why the other metric would have crowned another cell; empty where it would not."""
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


def spread_of(figures: RunFigures) -> float:
    return figures.step_s_p90 / figures.step_s_p50 if figures.step_s_p50 else 1.0
