"""Charts as inline SVG: no script, no network, colours from the page's style sheet."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from paceline.records.tables import Table

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 24, 38
MAX_POINTS = 400
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """`kind` picks the colour: one of the classes in report.css."""

    name: str
    points: Sequence[Point]
    kind: str
    dots: bool = False


@dataclass(frozen=True)
class Axes:
    x_label: str
    y_label: str
    from_zero: bool = False
    shaded_to: float | None = None
    line_at: float | None = None
    line_label: str = ""


@dataclass(frozen=True)
class Spot:
    """A point of a scatter chart: a short label beside it, all of it in its tooltip."""

    x: float
    y: float
    label: str
    title: str
    kind: str
    is_marked: bool = False


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Lines over a shared x axis; gaps where a value is not finite."""
    thinned = [Series(s.name, thin(s.points), s.kind, s.dots) for s in series if s.points]
    finite = [p for s in thinned for p in s.points if math.isfinite(p[1])]
    if not finite:
        return '<p class="empty">Nothing finite was recorded for this chart.</p>'
    x_scale = _x_scale(finite)
    y_scale = _y_scale(finite, axes)
    parts = [
        *_grid(x_scale, y_scale, axes),
        *(_draw(s, x_scale, y_scale) for s in thinned),
        *(_hover(s, x_scale, y_scale, axes) for s in thinned),
    ]
    legend = _legend([(s.name, s.kind) for s in thinned])
    return f"{_svg(axes.y_label, HEIGHT, parts)}{legend}"


def scatter(spots: Sequence[Spot], front: Sequence[Point], axes: Axes) -> str:
    """Points with labels; `front` is a line through those that nothing beats."""
    shown = [spot for spot in spots if math.isfinite(spot.x) and math.isfinite(spot.y)]
    if not shown:
        return '<p class="empty">Nothing was recorded for this chart.</p>'
    x_scale = _padded([spot.x for spot in shown], LEFT, WIDTH - RIGHT)
    y_scale = _padded([spot.y for spot in shown], HEIGHT - BOTTOM, TOP)
    parts = _grid(x_scale, y_scale, axes)
    if len(front) > 1:
        parts.append(_draw(Series("front", front, "front"), x_scale, y_scale))
    places = [(x_scale(spot.x), y_scale(spot.y)) for spot in shown]
    taken = list(places)
    for spot, (x, y) in zip(shown, places, strict=True):
        ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if spot.is_marked else ""
        parts.append(
            f'<g>{ring}<circle class="dot {spot.kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
            f"<title>{escape(spot.title)}</title></g>"
        )
        label_x, label_y = _free_place(x, y, taken)
        taken.append((label_x, label_y))
        parts.append(_text("tick spot", label_x, label_y + 5, spot.label))
    return _svg(f"{axes.y_label} against {axes.x_label}", HEIGHT, parts)


def _padded(values: Sequence[float], start: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * 0.08
    return _Scale(low - margin, high + margin, start, end)


def _free_place(x: float, y: float, taken: Sequence[Point]) -> Point:
    """The middle of a label beside (x, y) that is not on another label or point."""
    around = [(0, -18), (19, 0), (-19, 0), (0, 18), (19, -17), (-19, -17), (19, 17), (-19, 17)]
    places = [(x + right, y + down) for right, down in around if x + right > LEFT + 6]
    free = (p for p in places if all(abs(p[0] - a) > 15 or abs(p[1] - b) > 13 for a, b in taken))
    return next(free, places[0])


def stacked_bars(rows: dict[str, dict[str, float]], unit: str, scale: float) -> str:
    """One horizontal bar a row, split by phase; `scale` turns values into `unit`."""
    if not rows:
        return '<p class="empty">Nothing was recorded for this chart.</p>'
    names = list(next(iter(rows.values())))
    step, bar = 34, 20
    height = TOP + step * len(rows) + BOTTOM
    widest = max(sum(max(0.0, v) for v in phases.values()) for phases in rows.values()) or 1.0
    x_scale = _Scale(0.0, widest * scale, LEFT, WIDTH - RIGHT)
    bottom = height - BOTTOM
    parts = [_text("tick", x_scale(t), bottom + 16, _short(t)) for t in ticks(0.0, widest * scale)]
    for number, (name, phases) in enumerate(rows.items()):
        y = TOP + number * step + (step - bar) / 2
        parts.append(_text("label", LEFT - 8, y + bar * 0.7, name))
        x = 0.0
        for phase, value in phases.items():
            width = max(0.0, value) * scale
            left, right = x_scale(x), x_scale(x + width)
            parts.append(
                f'<rect class="bar {escape(phase)}" x="{left:.1f}" y="{y:.1f}"'
                f' width="{max(0.0, right - left - 1):.1f}" height="{bar}">'
                f"<title>{escape(name)}, {escape(phase)}: {width:.3g} {unit}</title></rect>"
            )
            x += width
    parts.append(_axis_label(height, f"{unit} a step"))
    legend = [(f"{name} {_middle(rows, name) * scale:.3g} {unit}", name) for name in names]
    return _svg("phases of a step by rank", height, parts) + _legend(legend)


def _middle(rows: dict[str, dict[str, float]], name: str) -> float:
    return statistics.median(phases[name] for phases in rows.values())


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: the mean of each bin, not finite where any of the bin is not."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / MAX_POINTS)
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], math.fsum(y for _, y in part) / len(part)) for part in bins]


def column_points(table: Table[Any], x: str, y: str) -> list[Point]:
    """Return one column over another, thinned as `thin` does, without a tuple for every row."""
    xs, ys = table.column(x), table.column(y)
    starts = np.arange(0, len(xs), max(1, math.ceil(len(xs) / MAX_POINTS)))
    if not len(starts):
        return []
    ends = np.append(starts[1:], len(xs))
    means = np.add.reduceat(ys, starts) / (ends - starts)
    return [(float(a), float(b)) for a, b in zip(xs[ends - 1], means, strict=True)]


def ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """About `wanted` round values inside [low, high]; only whole numbers if `whole`."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / wanted
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next((m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw), raw)
    step = max(1, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _x_scale(points: Sequence[Point]) -> _Scale:
    xs = [x for x, _ in points]
    return _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)


def _y_scale(points: Sequence[Point], axes: Axes) -> _Scale:
    ys = [y for _, y in points] + ([axes.line_at] if axes.line_at is not None else [])
    low, high = min(ys), max(ys)
    margin = (high - low or abs(high) or 1.0) * 0.06
    low = 0.0 if axes.from_zero else low - margin
    return _Scale(low, high + margin, HEIGHT - BOTTOM, TOP)


def _grid(x_scale: _Scale, y_scale: _Scale, axes: Axes) -> list[str]:
    parts = []
    bottom = HEIGHT - BOTTOM
    if axes.shaded_to is not None and axes.shaded_to > x_scale.low:
        right = x_scale(min(axes.shaded_to, x_scale.high))
        parts.append(
            f'<rect class="shade" x="{LEFT}" y="{TOP}" width="{right - LEFT:.1f}"'
            f' height="{bottom - TOP}"/>'
        )
    for value in ticks(y_scale.low, y_scale.high):
        y = y_scale(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text("label", LEFT - 8, y + 4, _short(value)))
    parts += [
        _text("tick", x_scale(value), bottom + 16, _short(value))
        for value in ticks(x_scale.low, x_scale.high, whole=axes.x_label == "step")
    ]
    parts.append(_axis_label(HEIGHT, axes.x_label))
    parts.append(_text("unit", 4, 14, axes.y_label))
    if axes.line_at is not None:
        y = y_scale(axes.line_at)
        parts.append(
            f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text("note", WIDTH - RIGHT - 4, y - 5, axes.line_label))
    return parts


def _draw(series: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    if series.dots:
        return "".join(
            f'<circle class="dot {series.kind}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="4"/>'
            for x, y in series.points
            if math.isfinite(y)
        )
    commands, pen_down = [], False
    for x, y in series.points:
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{x_scale(x):.1f} {y_scale(y):.1f}")
        pen_down = math.isfinite(y)
    return f'<path class="line {series.kind}" d="{"".join(commands)}"/>'


def _hover(series: Series, x_scale: _Scale, y_scale: _Scale, axes: Axes) -> str:
    """Invisible targets with the exact value as their tooltip."""
    return "".join(
        f'<circle class="target" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="7">'
        f"<title>{escape(axes.x_label)} {_short(x)}: {escape(series.name)} {y:.5g}</title></circle>"
        for x, y in series.points
        if math.isfinite(y)
    )


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _axis_label(height: float, text: str) -> str:
    return _text("tick", (LEFT + WIDTH - RIGHT) / 2, height - 4, text)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span class="key"><i class="swatch {escape(kind)}"></i>{escape(name)}</span>'
        for name, kind in entries
    )
    return f'<div class="legend">{items}</div>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _short(value: float) -> str:
    """1500 -> 1.5k: tick labels that fit."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"
