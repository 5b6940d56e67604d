"""report.html: one self-contained page, light and dark, readable on a phone."""

from dataclasses import dataclass
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from paceline import __version__
from paceline.report.pipeline import (
    Table,
    describe_source,
    draw_pipeline,
    explain_idle,
    rank_table,
    stage_table,
)
from paceline.report.plots import Axes, Series, column_points, line_chart, stacked_bars
from paceline.report.story import Story, asked, duration, headline, shown, size, started

MAX_SAMPLE_IDS = 64


def render_html(story: Story) -> str:
    """The page; every name from outside is escaped by the template."""
    pipeline = _pipeline(story)
    sheets = ["report.css", "gantt.css"] if pipeline else ["report.css"]
    style = "".join((resources.files("paceline.report") / name).read_text() for name in sheets)
    return _template().render(
        story=story,
        figures=headline(story),
        asked=asked(story),
        started=started(story),
        charts=_charts(story),
        pipeline=pipeline,
        style=Markup(style),
        version=__version__,
        max_ids=MAX_SAMPLE_IDS,
    )


@cache
def environment() -> Environment:
    """Where the templates of all pages come from; it escapes whatever they are given."""
    made = Environment(
        loader=PackageLoader("paceline.report", "."), autoescape=True, undefined=StrictUndefined
    )
    made.filters.update(size=size, duration=duration, shown=shown)
    return made


def _template() -> Template:
    return environment().get_template("report.html.jinja")


@dataclass(frozen=True)
class PipelineSection:
    """What the page says of a run's pipeline."""

    source: str
    drawing: Markup
    sentences: list[str]
    tables: list[Table]


def _pipeline(story: Story) -> PipelineSection | None:
    facts = story.result.pipeline if story.result else None
    if facts is None or story.measured is None:
        return None
    return PipelineSection(
        source=describe_source(facts, story.plan.crew.num_nodes),
        drawing=Markup(draw_pipeline(story.measured, facts)),
        sentences=explain_idle(facts),
        tables=[rank_table(facts), stage_table(facts)],
    )


def _charts(story: Story) -> list[tuple[str, str, Markup]]:
    """Title, how to read it, and the drawing."""
    grad_norm = column_points(story.training, "step", "grad_norm")
    lr = column_points(story.training, "step", "lr")
    charts = [
        ("Loss", "mean over all ranks of each step, from training.csv", _loss(story)),
        (
            "Throughput",
            "work over the time of each step, evaluation apart, from training.csv; grey: warm-up,"
            " outside the figures above",
            _rate(story),
        ),
        (
            "Where a step's time goes",
            "median of the steps after warm-up, or of all if there are no others, from"
            " ranks/rank<r>/steps.csv; unaccounted: wall time that no phase saw",
            _phases(story),
        ),
        ("Memory", "over time, from telemetry.csv", _memory(story)),
        (
            "Gradient norm",
            "over all ranks, before clipping, from training.csv",
            line_chart([Series("gradient norm", grad_norm, "c3")], Axes("step", "norm")),
        ),
        (
            "Learning rate",
            "of each step, from training.csv",
            line_chart([Series("learning rate", lr, "c4")], Axes("step", "lr", from_zero=True)),
        ),
    ]
    return [(title, note, Markup(svg)) for title, note, svg in charts]


def _loss(story: Story) -> str:
    train = column_points(story.training, "step", "loss")
    val = column_points(story.training.known("val_loss"), "step", "val_loss")
    entropy = story.result.data_facts.get("unigram_entropy") if story.result else None
    axes = Axes("step", "loss", line_at=entropy, line_label="byte-unigram entropy")
    return line_chart(
        [Series("training", train, "c1"), Series("validation", val, "c2", True)], axes
    )


def _rate(story: Story) -> str:
    has_tokens = len(story.training.known("tokens_per_s")) > 0
    unit = "tokens/s" if has_tokens else "samples/s"
    points = column_points(story.training, "step", unit.replace("/", "_per_"))
    window = story.result.window if story.result else None
    axes = Axes("step", unit, from_zero=True, shaded_to=window.first_step - 1 if window else None)
    return line_chart([Series(unit, points, "c1")], axes)


def _phases(story: Story) -> str:
    rows = {f"rank {rank}": phases for rank, phases in story.phases_s.items()}
    used = [
        name
        for name in (next(iter(rows.values())) if rows else {})
        if any(phases[name] > 0 for phases in rows.values())
    ]
    kept = {rank: {name: phases[name] for name in used} for rank, phases in rows.items()}
    return stacked_bars(kept, "ms", 1000.0)


def _memory(story: Story) -> str:
    if not story.telemetry:
        return line_chart([], Axes("", ""))
    start, sources = story.telemetry[0].time, story.telemetry.column("source")
    series = []
    for number, source in enumerate(sorted(set(sources)), 1):
        name = "rss_bytes" if source == "host" else "memory_bytes"
        label = "rank 0 resident set" if source == "host" else f"{source} memory"
        rows = story.telemetry.pick(sources == source).known(name)
        points = [(x - start, y / 2**30) for x, y in column_points(rows, "time", name)]
        series.append(Series(label, points, f"c{min(number, 6)}"))
    return line_chart(series, Axes("seconds", "GiB", from_zero=True))
