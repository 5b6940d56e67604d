"""report.html of a sweep, one self-contained page, light and dark, readable on a phone; and its
summary.md: the answer first, then what it rests on."""

from collections.abc import Callable
from functools import cache
from importlib import resources

from jinja2 import Environment
from markupsafe import Markup

from paceline import __version__
from paceline.records.words import count, number, plain, size, table, visible
from paceline.report.html import environment
from paceline.report.story import Figure
from paceline.report.sweep_plots import breakable, grid_unit, grids, intervals, loss_curves, pareto
from paceline.report.sweep_story import (
    SIGNS,
    VERDICTS,
    CellLine,
    SweepStory,
    answer,
    asked,
    command,
    rate_cell,
    reference,
    remarks,
    speedup_cell,
    variation_cell,
    winners,
)

COLUMNS = ("speedup", "verdict", "memory a rank", "between runs", "runs")


def render_sweep_page(story: SweepStory) -> str:
    """Return the page; every external name is escaped, by the template or by the drawing."""
    styles = [resources.files("paceline.report") / name for name in ("report.css", "sweep.css")]
    page = (
        _environment()
        .get_template("sweep.html.jinja")
        .render(
            story=story,
            answer=answer(story),
            command=command(story),
            figures=_figures(story),
            pareto=Markup(pareto(story)),
            intervals=Markup(intervals(story)),
            ends=story.ends,
            grids=grids(story),
            grid_unit=grid_unit(story),
            reference=reference(story),
            remarks=remarks(story),
            signs=story.say(SIGNS),
            losses=_losses(story),
            asked=asked(story),
            style=Markup("".join(style.read_text(encoding="utf-8") for style in styles)),
            version=__version__,
        )
    )
    return visible(page)


@cache
def _environment() -> Environment:
    made = environment().overlay()
    own: dict[str, Callable[..., str]] = {
        "rate": lambda line: _kept_together(rate_cell(line)),
        "speedup": lambda line: _kept_together(speedup_cell(line)),
        "variation": variation_cell,
        "breakable": breakable,
    }
    made.filters = environment().filters | own
    return made


def _kept_together(text: str) -> str:
    """Return a text whose intervals do not break in their middle."""
    return text.replace(" to ", "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}")


def _losses(story: SweepStory) -> tuple[Markup, str]:
    """Return the drawing of the losses, and how to read it."""
    drawing, note = loss_curves(story)
    return Markup(drawing), note


def _figures(story: SweepStory) -> list[Figure]:
    runs = [run for line in story.cells for run in line.runs]
    left_out = sum(bool(run.problem) for run in runs)
    figures = _best_figures(story, story.line(story.winner)) if story.winner else []
    compared = len(story.standings.rows) if story.standings else 0
    return [
        *figures,
        Figure("cells that lead", str(len(winners(story))), beside=f"of {compared} compared"),
        Figure("runs", str(len(runs)), beside=f"{left_out} not in the comparison" * bool(left_out)),
    ]


def _best_figures(story: SweepStory, best: CellLine) -> list[Figure]:
    assert best.standing is not None, "a winner was measured"
    rate, speedup = best.standing.rate, best.standing.speedup
    has_baseline = story.standings is not None and story.standings.is_baseline
    beside = f"{number(rate.low)} to {number(rate.high)}" if rate else "no interval"
    label = story.say("fastest") if best.is_fastest else "chosen"
    others = len(winners(story)) - 1
    beside += f"; not told apart from {count(others, 'other')}" if best.is_tied else ""
    figures = [Figure(label, number(best.standing.value), story.unit, beside)]
    if speedup is not None and has_baseline and not best.is_baseline:
        said = f"{speedup.low:.3f} to {speedup.high:.3f}; over the baseline"
        figures.append(Figure(story.say("speedup"), f"{speedup.value:.3f}", beside=said))
    if best.peak_bytes:
        value, _, unit = size(best.peak_bytes).partition(" ")
        figures.append(Figure("its peak memory", value, unit, "a rank"))
    return figures


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
    return visible("\n\n".join(block for block in blocks if block) + "\n")


def _indented(text: str) -> str:
    """Return an indented code block, which no text can end as it could end a fence."""
    return "\n".join(f"    {line}" for line in text.split("\n")) if text else ""


def _standings(story: SweepStory) -> str:
    if not story.measured:
        return "No cell has a figure."
    rows = [_row(place, line) for place, line in enumerate(story.measured, 1)]
    ends = f"{SIGNS}. In brackets: {story.ends}, 95% interval of a speedup, which is against "
    said = story.say(ends) + plain(reference(story))
    columns = ("", "cell", story.unit, *map(story.say, COLUMNS))
    return f"{table(columns, rows)}\n\n{said}."


def _row(place: int, line: CellLine) -> tuple[str, ...]:
    return (
        str(place),
        line.label,
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
    lines = [story.say(f"- {kind}: {meaning}.") for kind, meaning in VERDICTS]
    margin = f"The margin is {story.record.margin:.3g}. How this is computed: docs/statistics.md."
    return "\n".join([*lines, "", margin])
