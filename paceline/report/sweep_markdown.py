"""summary.md of a sweep: the answer first, then what it rests on."""

from paceline.records.words import plain, size, table
from paceline.report.sweep_remarks import VERDICTS, asked, remarks
from paceline.report.sweep_story import (
    CellLine,
    SweepStory,
    answer,
    command,
    rate_cell,
    reference,
    speedup_cell,
    variation_cell,
)

COLUMNS = ("speedup", "verdict", "memory a rank", "between runs", "runs")


def render_sweep_summary(story: SweepStory) -> str:
    blocks = [
        f"# {plain(story.name)}: {story.record.mode} of {plain(story.record.recipe)}",
        "## Answer",
        *(plain(sentence) for sentence in answer(story)),
        _indented(command(story)),
        "## Standings",
        _standings(story),
        *_remarks(story),
        "## What was asked",
        table(("", ""), asked(story)),
        "## What the verdicts mean",
        _verdicts(story),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _indented(text: str) -> str:
    """A code block that no text can end, as a fence could be."""
    return "\n".join(f"    {line}" for line in text.split("\n")) if text else ""


def _standings(story: SweepStory) -> str:
    if not story.measured:
        return "No cell has a figure."
    rows = [_row(place, line) for place, line in enumerate(story.measured, 1)]
    said = "★ chosen, ☆ not told apart from the best. Intervals are 95%. A speedup is against "
    columns = ("", "cell", story.unit, *COLUMNS)
    return f"{table(columns, rows)}\n\n{said}{plain(reference(story))}."


def _row(place: int, line: CellLine) -> tuple[str, ...]:
    star = f" {line.sign}" if line.sign else ""
    baseline = " (baseline)" if line.is_baseline else ""
    return (
        str(place),
        f"{line.name}{star}{baseline}",
        rate_cell(line),
        speedup_cell(line),
        f"{line.verdict}; its loss departs" if line.flag else line.verdict,
        size(line.peak_bytes) if line.peak_bytes else "n/a",
        variation_cell(line),
        f"{len(line.runs) - len(line.failed)} of {len(line.runs)}",
    )


def _remarks(story: SweepStory) -> list[str]:
    blocks = []
    for title, lines in remarks(story):
        blocks += [f"## {title}", "\n".join(f"- {plain(line)}" for line in lines)]
    return blocks


def _verdicts(story: SweepStory) -> str:
    lines = [f"- {kind}: {meaning}." for kind, meaning in VERDICTS]
    margin = f"The margin is {story.record.margin:.3g}. How this is computed: docs/statistics.md."
    return "\n".join([*lines, "", margin])
