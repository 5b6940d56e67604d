"""report.html: one self-contained page, light and dark, readable on a phone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from importlib import resources
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from paceline import __version__
from paceline.metrics import TRAIN, VAL
from paceline.records.columns import LOSS_COLUMNS, Table
from paceline.records.tables import TrainingRow
from paceline.records.words import count, shown, size, visible
from paceline.report.pipeline import Table as PipelineTable
from paceline.report.pipeline import (
    describe_source,
    draw_pipeline,
    explain_idle,
    rank_table,
    stage_table,
)
from paceline.report.plots import (
    EMPTY,
    MAX_BARS,
    Axes,
    Point,
    Series,
    draw_column,
    draw_values,
    line_chart,
    smooth,
    stacked_bars,
)
from paceline.report.story import Story, asked, basis, further, headline, last_samples, started

MAX_SAMPLE_IDS, MAX_SAMPLES = 64, 40
MAX_MINIS = 8  # small charts side by side; more ranks than these are drawn as a band


def render_html(story: Story, others: Mapping[str, Table[TrainingRow]] | None = None) -> str:
    """Return the page; every external name is escaped, by the template or by the drawing. `others`:
    rows of other runs by name, whose losses are drawn beside this one's."""
    pipeline = _pipeline(story)
    sheets = ["report.css", "gantt.css"] if pipeline else ["report.css"]
    style = "".join(
        (resources.files("paceline.report") / name).read_text(encoding="utf-8") for name in sheets
    )
    page = _template().render(
        story=story,
        figures=headline(story),
        further=further(story),
        basis=basis(story),
        hero=_hero(story, others or {}),
        asked=asked(story),
        started=started(story),
        charts=_charts(story),
        pipeline=pipeline,
        samples=last_samples(story),
        earlier=[s for s in story.samples if s not in last_samples(story)][-MAX_SAMPLES:],
        style=Markup(style),
        version=__version__,
        max_ids=MAX_SAMPLE_IDS,
    )
    return visible(page)


@cache
def environment() -> Environment:
    """Return the environment for the templates of all pages; it escapes all values."""
    made = Environment(
        loader=PackageLoader("paceline.report", "."), autoescape=True, undefined=StrictUndefined
    )
    made.filters.update(size=size, count=count, shown=shown)
    return made


def _template() -> Template:
    return environment().get_template("report.html.jinja")


@dataclass(frozen=True)
class Hero:
    """The chart above all others, and which of its switches do something."""

    drawing: Markup
    has_smooth: bool
    has_log: bool


class Chart:
    """A drawing with its title and how to read it."""

    def __init__(self, title: str, note: str, drawing: str) -> None:
        self.title, self.note, self.drawing = title, note, Markup(drawing)


@dataclass(frozen=True)
class PipelineSection:
    """What the page says about a run's pipeline."""

    source: str
    drawing: Markup
    sentences: list[str]
    tables: list[PipelineTable]


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


def _hero(story: Story, others: Mapping[str, Table[TrainingRow]]) -> Hero:
    """Draw the loss of each step, pale where a smoothed line lies above it, with validation."""
    training, validated = story.training, story.training.known("val_loss")
    smoothed, num_steps = smooth(training.column("loss"))
    mean = Series(f"training, mean of {num_steps} steps", (), "c1", layer="smooth")
    entropy = story.result.data_facts.get("unigram_entropy") if story.result else None
    axes = Axes(
        "step", "loss", log=True, size="tall",
        line_at=entropy, line_label="byte-unigram entropy",
    )  # fmt: skip
    lines = [
        draw_column(training, "loss", "training", "c1", layer="raw"),
        draw_values(training.column("step"), smoothed, mean),
        replace(draw_column(validated, "val_loss", "validation", "c2"), marked=True),
    ]
    for place, (name, rows) in enumerate(others.items()):
        line, _ = smooth(rows.column("loss"))
        beside = Series(name, (), f"c{place % 4 + 3}")
        values = line if len(line) else rows.column("loss")
        lines.append(draw_values(rows.column("step"), values, beside))
    drawing = line_chart(lines, axes)
    return Hero(Markup(drawing), len(smoothed) > 0, has_log='class="ys log"' in drawing)


def _charts(story: Story) -> list[Chart]:
    num_ranks = len(story.phases_s)
    some = f"; the {MAX_BARS // 2} slowest and fastest of {num_ranks}"
    return [
        Chart("Throughput", "work over the time of each step; grey: warm-up", _rate(story)),
        Chart(
            "Where a step's time goes",
            "median step of each rank; unaccounted: wall time that no phase saw"
            + (some if num_ranks > MAX_BARS else ""),
            stacked_bars({f"rank {rank}": phases for rank, phases in story.phases_s.items()}),
        ),
        *_metrics(story),
        _memory(story),
        Chart("Optimizer", "gradient norm over all ranks before clipping", _optimizer(story)),
    ]


def _metrics(story: Story) -> Iterator[Chart]:
    """Draw each metric of the job, training and validation on one scale."""
    names = [name for name in story.training.metrics if name not in LOSS_COLUMNS]
    for bare in dict.fromkeys(name.partition("/")[2] for name in names):
        lines = []
        for name in (f"{TRAIN}{bare}", f"{VAL}{bare}"):
            if name in names:
                steps, values = story.training.metric(name)
                is_val = name.startswith(VAL)
                line = Series(name, (), "c2" if is_val else "c1", marked=is_val)
                lines.append(draw_values(steps, values, line))
        yield Chart(bare, "as the job measures it", line_chart(lines, Axes("step", bare)))


def _optimizer(story: Story) -> str:
    norm = draw_column(story.training, "grad_norm", "gradient norm", "c4")
    lr = draw_column(story.training, "lr", "learning rate", "c3")
    drawn = {
        "gradient norm": line_chart([norm], Axes("step", "norm", size="mini")),
        "learning rate": line_chart([lr], Axes("step", "lr", from_zero=True, size="mini")),
    }
    return _minis({name: ("", drawing) for name, drawing in drawn.items()})


def _minis(drawn: dict[str, tuple[str, str]]) -> str:
    """Draw small charts side by side, by name, each with the text at its right."""
    figures = "".join(
        f"<figure><figcaption>{escape(name)}<span>{escape(said)}</span></figcaption>{chart}</figure>"
        for name, (said, chart) in drawn.items()
    )
    return f'<div class="minis">{figures}</div>'


def _rate(story: Story) -> str:
    has_tokens = len(story.training.known("tokens_per_s")) > 0
    unit = "tokens/s" if has_tokens else "samples/s"
    line = draw_column(story.training, unit.replace("/", "_per_"), unit, "c1")
    window = story.window
    axes = Axes("step", unit, from_zero=True, shaded_to=window.first_step - 1 if window else None)
    return line_chart([line], axes)


def _memory(story: Story) -> Chart:
    """Draw each rank, or each GPU and how busy it was, over time."""
    on_gpu = story.plan.on_gpu
    if not on_gpu:
        drawing = _over_time(_sampled(story, "rss_bytes", on_gpu))
        return Chart("Memory of each rank", "resident set, on one scale", drawing)
    memory = _over_time(_sampled(story, "memory_bytes", on_gpu))
    busy = _sampled(story, "utilisation_percent", on_gpu)
    axes = Axes("seconds", "busy, %", from_zero=True, top=100.0)
    lines = [Series(name, points, f"c{n % 6 + 1}") for n, (name, points) in enumerate(busy.items())]
    drawn = _band(busy, axes) if len(busy) > MAX_MINIS else line_chart(lines, axes)
    return Chart("GPUs", "memory in use; share of time in which a kernel ran", memory + drawn)


def _over_time(sampled: dict[str, list[Point]]) -> str:
    """Draw bytes as small charts on one scale; where there are more than MAX_MINIS, the least,
    the median and the most."""
    most = max((y for points in sampled.values() for _, y in points), default=0.0)
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    lines = {name: [(x, y / scale) for x, y in points] for name, points in sampled.items()}
    if len(lines) > MAX_MINIS:
        return _band(lines, Axes("seconds", unit, from_zero=True))
    axes = Axes("seconds", unit, from_zero=True, top=most / scale, size="mini")
    drawn = {
        name: (
            f"at most {size(max(y for _, y in sampled[name]))}",
            line_chart([Series(name, points, "c1")], axes),
        )
        for name, points in lines.items()
    }
    return _minis(drawn) if drawn else EMPTY


def _sampled(story: Story, name: str, on_gpu: bool) -> dict[str, list[Point]]:
    """Return points (seconds since the first sample, value) by rank, or by GPU and machine."""
    rows = [row for found in story.telemetry.values() for row in found]
    start = min((row.time for row in rows), default=0.0)
    machines = sum(any(r.source == "host" for r in found) for found in story.telemetry.values())
    sampled: dict[str, list[Point]] = {}
    for rank, found in story.telemetry.items():
        for row in found:
            if name not in row.values or on_gpu != row.source.startswith("gpu"):
                continue
            where = f" beside rank {rank}" if machines > 1 else ""
            label = f"{row.source}{where}" if on_gpu else f"rank {rank}"
            sampled.setdefault(label, []).append((row.time - start, row.values[name]))
    return sampled


def _band(lines: dict[str, list[Point]], axes: Axes) -> str:
    """Merge all lines into one, sample by sample, as they have about the same times."""
    rounds = list(zip(*lines.values(), strict=False))
    values = [(points[0][0], sorted(y for _, y in points)) for points in rounds]
    middle = [(x, median(ys)) for x, ys in values]
    band = [(x, ys[0], ys[-1]) for x, ys in values]
    name = f"median of {len(lines)}, between the least and the most"
    return line_chart([Series(name, middle, "c1", band=band)], axes)
