"""Pipelines drawn: a row per rank, a bar per action, charts on one scale. Inline SVG.

A bar has its kind and microbatch inside where they fit, and everything in its tooltip. The lighter
bars are a rank's later stages, or DualPipe's second direction; a frame is around overlapped pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from paceline.records.words import duration, short, time_unit
from paceline.report.plots import ticks
from paceline.schedules.actions import Action
from paceline.schedules.timeline import Interval, RankTimeline, Timeline

WIDTH, LEFT, RIGHT = 1000, 62, 56
HEADING, ROW, BAR, AXIS = 26, 26, 22, 36
DIGITS = 4  # of a time: the times of neighbouring bars differ only in the last ones
LETTER = 6.4  # px of a letter inside a bar
LEGEND = (
    ("F forward", "F"),
    ("B whole backward", "B"),
    ("I its half for inputs", "I"),
    ("W its half for weights", "W"),
)


@dataclass(frozen=True)
class Chart:
    """A pipeline's step under a heading: simulated, or measured."""

    title: str
    timeline: Timeline


def gantt(charts: Sequence[Chart]) -> str:
    """Draw all charts on the scale of the longest, so that lengths compare from one to the next."""
    longest_s = max((chart.timeline.total_s for chart in charts), default=0.0)
    if not longest_s:
        return '<p class="empty">Nothing was recorded for this chart.</p>'
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    parts: list[str] = []
    top = 0.0
    for chart in charts:
        parts += _draw(chart, top, scale)
        top += HEADING + ROW * len(chart.timeline.ranks) + 8
    parts += _axis(top, longest_s, scale)
    names = ", ".join(chart.title for chart in charts)
    drawn = (
        f'<svg viewBox="0 0 {WIDTH} {top + AXIS:.0f}" role="img" aria-label="{escape(names)}">'
        + "".join(parts)
        + "</svg>"
    )
    return f'<div class="gantt">{drawn}{_legend(charts)}</div>'


def _draw(chart: Chart, top: float, scale: float) -> Iterator[str]:
    timeline = chart.timeline
    total = f"{duration(timeline.total_s, DIGITS)}, idle {timeline.bubble:.1%}"
    yield _text("heading", LEFT, top + 18, f"{chart.title}: {total}")
    for rank in timeline.ranks:
        y = top + HEADING + ROW * rank.rank
        yield _text("label", LEFT - 8, y + BAR * 0.72, f"rank {rank.rank}")
        yield (
            f'<rect class="lane" x="{LEFT}" y="{y:.1f}" height="{BAR}"'
            f' width="{timeline.total_s * scale:.1f}"/>'
        )
        busy = f"{timeline.utilisation(rank.rank):.0%}"
        yield _text("figure", WIDTH - 8, y + BAR * 0.72, busy)
        places = _places(rank, y)
        for interval in rank.intervals:
            place = places.get(interval.action, (y, BAR))
            yield _bar(interval, place, scale, _is_second(timeline, interval))
        yield from _frames(rank, y, scale)


def _pairs(rank: RankTimeline) -> list[tuple[Interval, Interval]]:
    """Return each forward with the backward that it overlaps, which is next in the rank's order."""
    paired = [interval for interval in rank.intervals if interval.is_paired]
    return list(zip(paired[::2], paired[1::2], strict=False))


def _places(rank: RankTimeline, y: float) -> dict[Action, tuple[float, float]]:
    """Return top and height of bars that share a row: a forward and a backward that overlap."""
    places = {}
    for forward, backward in _pairs(rank):
        if forward.started_s == backward.started_s:
            places[forward.action] = (y, BAR / 2)
            places[backward.action] = (y + BAR / 2, BAR / 2)
    return places


def _bar(interval: Interval, place: tuple[float, float], scale: float, is_second: bool) -> str:
    action = interval.action
    x, width = LEFT + interval.started_s * scale, (interval.ended_s - interval.started_s) * scale
    y, height = place
    kind = f"pass {action.kind}" + (" second" if is_second else "")
    title = (
        f"{action}: stage {action.stage}, microbatch {action.microbatch},"
        f" {duration(interval.started_s, DIGITS)} to {duration(interval.ended_s, DIGITS)}"
    )
    # A gap of half a pixel between bars, unless the bar would vanish.
    shown = max(width - 1, min(width, 0.8))
    bar = (
        f'<rect class="{kind}" x="{x + 0.5:.2f}" y="{y:.1f}" width="{shown:.2f}"'
        f' height="{height:.1f}"><title>{escape(title)}</title></rect>'
    )
    label = _label(action.kind, action.microbatch, width)
    inside = "inside second" if is_second else "inside"
    return bar + (_text(inside, x + width / 2, y + height / 2 + 4, label) if label else "")


def _label(kind: str, microbatch: int, width: float) -> str:
    """Return what fits into a bar: kind and microbatch, the microbatch alone, or nothing."""
    with_kind = f"{kind}{microbatch}"
    if len(with_kind) * LETTER + 5 <= width:
        return with_kind
    return str(microbatch) if len(str(microbatch)) * LETTER + 1 <= width else ""


def _frames(rank: RankTimeline, y: float, scale: float) -> Iterator[str]:
    for first, second in _pairs(rank):
        width = (second.ended_s - first.started_s) * scale
        if width > 4:
            yield (
                f'<rect class="pair" x="{LEFT + first.started_s * scale:.2f}" y="{y - 0.5:.1f}"'
                f' width="{width:.2f}" height="{BAR + 1}"/>'
            )


def _is_second(timeline: Timeline, interval: Interval) -> bool:
    action = interval.action
    return action.direction == 1 or action.stage >= timeline.schedule.num_ranks


def _axis(top: float, longest_s: float, scale: float) -> Iterator[str]:
    unit, unit_s = time_unit(longest_s)
    for value in ticks(0.0, longest_s / unit_s, wanted=8):
        yield _text("tick", LEFT + value * unit_s * scale, top + 12, short(value))
    yield _text("tick", (LEFT + WIDTH - RIGHT) / 2, top + 30, f"{unit} since the step began")
    yield _text("figure", WIDTH - 8, top + 12, "busy")


def _legend(charts: Sequence[Chart]) -> str:
    shown = {i.action.kind for c in charts for rank in c.timeline.ranks for i in rank.intervals}
    entries = [(name, kind) for name, kind in LEGEND if kind in shown]
    if any(c.timeline.schedule.num_copies > 1 for c in charts):
        entries.append(("second direction", "F second"))
    if any(c.timeline.schedule.num_stages > c.timeline.schedule.num_ranks for c in charts):
        entries.append(("a rank's later stages", "F second"))
    keys = "".join(
        f'<span class="key"><i class="swatch {kind}"></i>{escape(name)}</span>'
        for name, kind in entries
    )
    return f'<div class="legend">{keys}</div>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
