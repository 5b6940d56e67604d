"""Charts for the pages: inline SVG and a little HTML, no script, no network.

The drawing area of a line chart is stretched to whatever room it has, and its labels are HTML
beside it, so letters and lines have the same size on a phone as on a wide screen. Colours come
from the page's style sheet: `kind` is one of its classes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.records.columns import Table
from paceline.records.words import duration, short

SIDE = 1000  # of the drawing area, in its own units, both ways
MAX_POINTS = 400
MIN_TO_SMOOTH = 20
FEW_BARS, MAX_BARS = 6, 16
EMPTY = '<p class="empty">Nothing was recorded for this chart.</p>'
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line. `marked`: with a dot at each point. `layer`: a class by which the page's switches
    show and hide it. `band`: x, low and high of an area behind it."""

    name: str
    points: Sequence[Point]
    kind: str
    marked: bool = False
    layer: str = ""
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Axes:
    """`bottom`, `top`: values that the y axis includes at least. `log`: a second drawing on a log
    axis, for the page's switch."""

    x_label: str
    y_label: str
    from_zero: bool = False
    bottom: float | None = None
    top: float | None = None
    shaded_to: float | None = None
    line_at: float | None = None
    line_label: str = ""
    log: bool = False
    size: Literal["tall", "half", "mini"] = "half"


@dataclass(frozen=True)
class Scale:
    """Map values to places between 0 and SIDE; `is_up` for a y axis."""

    low: float
    high: float
    is_up: bool = False
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        share = (at - low) / (high - low or 1.0)
        return SIDE * (1 - share if self.is_up else share)

    def ticks(self, wanted: int, whole: bool = False) -> list[float]:
        if not self.is_log:
            return ticks(self.low, self.high, wanted, whole)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            found = [digit * 10.0**decade for decade in decades for digit in digits]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 3:
                return found
        return ticks(self.low, self.high, wanted)


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draw lines over a shared x axis, with gaps where a value is not finite."""
    drawn = [thin(each) for each in series if each.points]
    finite = [p for each in drawn for p in each.points if math.isfinite(p[1])]
    if not finite:
        return EMPTY
    x_scale = Scale(min(x for x, _ in finite), max(x for x, _ in finite))
    layers = {"linear": scale_y(drawn, axes)}
    if axes.log and (log := _log_scale(drawn, axes)) is not None:
        layers["log"] = log
    parts = {
        name: [*grid_marks(x_scale, y, axes), *(draw_line(each, x_scale, y) for each in drawn)]
        for name, y in layers.items()
    }
    needs_legend = len(drawn) > 1 or any(each.band for each in series)
    legend = _legend([(s.name, s.kind, s.layer) for s in drawn]) if needs_legend else ""
    seen = f'<svg class="seen" {_BOX} aria-hidden="true">{"".join(_slices(drawn, x_scale, axes))}'
    return frame(axes, x_scale, layers, parts, _describe(drawn, axes), f"{seen}</svg>") + legend


def stacked_bars(rows: dict[str, dict[str, float]]) -> str:
    """Draw one horizontal bar per row, split by phase; values are seconds per step. Where there
    are more rows than MAX_BARS, only the longest and the shortest are drawn, sorted."""
    if not rows:
        return EMPTY
    total = {name: sum(max(0.0, v) for v in phases.values()) for name, phases in rows.items()}
    names = list(rows)
    if len(names) > MAX_BARS:
        by_length = sorted(names, key=lambda name: -total[name])
        names = [*by_length[: MAX_BARS // 2], *by_length[-MAX_BARS // 2 :]]
    kinds = {phase: phase for phase in next(iter(rows.values()))}  # a class of the style sheet
    kinds |= {phase: phase for phase in ("other", "unaccounted") if phase in kinds}
    longest = max(total.values()) or 1.0
    bars = "".join(_bar_row(name, rows[name], kinds, longest) for name in names)
    middle = {phase: median(phases[phase] for phases in rows.values()) for phase in kinds}
    whole = sum(max(0.0, value) for value in middle.values()) or 1.0
    parts = "".join(
        f'<i class="swatch {kinds[phase]}"></i><span>{escape(phase)}</span>'
        f"<span>{duration(value)}</span><span>{value / whole:.1%}</span>"
        for phase, value in middle.items()
        if any(phases[phase] > 0 for phases in rows.values())
    )
    size = "bars many" if len(names) > FEW_BARS else "bars"
    return f'<div class="{size}">{bars}</div><div class="parts">{parts}</div>'


def _bar_row(name: str, phases: dict[str, float], kinds: dict[str, str], longest: float) -> str:
    x, parts = 0.0, []
    for phase, value in phases.items():
        width = 100 * max(0.0, value) / longest
        if width > 0:
            parts.append(
                f'<rect class="bar {kinds[phase]}" x="{x:.2f}%" width="{width:.2f}%" height="100%">'
                f"<title>{escape(f'{name}, {phase}: {duration(value)}')}</title></rect>"
            )
        x += width
    said = ", ".join(f"{phase} {duration(value)}" for phase, value in phases.items() if value > 0)
    whole = duration(sum(max(0.0, value) for value in phases.values()))
    label = escape(f"{name}: {said}")
    return (
        f'<span>{escape(name)}</span><svg role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<span>{whole}</span>"
    )


def thin(series: Series) -> Series:
    """Return at most MAX_POINTS points: the mean of each bin, not finite if any value of the bin is
    not, with the range of the bin as a band behind it."""
    if len(series.points) <= MAX_POINTS:
        return series
    xs, ys = np.array(series.points).T
    return draw_values(xs, ys, series)


def smooth(ys: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Return the mean of the steps around each one (fewer near the ends) and how many they are:
    a hundredth of all, at least 7. There is no line where steps are too few or one is not
    finite."""
    if len(ys) < MIN_TO_SMOOTH or not np.isfinite(ys).all():
        return ys[:0], 0
    reach = max(3, len(ys) // 200)
    sums, places = np.concatenate([[0.0], np.cumsum(ys)]), np.arange(len(ys))
    start, end = np.maximum(0, places - reach), np.minimum(len(ys), places + reach + 1)
    return (sums[end] - sums[start]) / (end - start), 2 * reach + 1


def smooth_line(line: Series) -> Series:
    """Return the line smoothed, or as it is if that is not possible."""
    xs, ys = np.array(line.points).T
    found, _ = smooth(ys)
    return draw_values(xs, found, line) if len(found) else line


def draw_column(table: Table[Any], y: str, name: str, kind: str, layer: str = "") -> Series:
    """Return a column over the steps as a line, thinned as `thin` does without a tuple per row."""
    return draw_values(table.column("step"), table.column(y), Series(name, (), kind, layer=layer))


def draw_values(xs: NDArray[Any], ys: NDArray[np.float64], line: Series) -> Series:
    """Return `line` with points of two arrays, thinned as `thin` does."""
    if len(ys) <= MAX_POINTS:
        points = list(zip(xs[: len(ys)].astype(float).tolist(), ys.tolist(), strict=True))
        return replace(line, points=points)
    starts = np.arange(0, len(ys), math.ceil(len(ys) / MAX_POINTS))
    ends = np.append(starts[1:], len(ys))
    at = xs[ends - 1].astype(float).tolist()
    means = (np.add.reduceat(ys, starts) / (ends - starts)).tolist()
    low, high = (f.reduceat(ys, starts).tolist() for f in (np.minimum, np.maximum))
    band = list(zip(at, low, high, strict=True))
    return replace(line, points=list(zip(at, means, strict=True)), band=line.band or band)


def ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """Return about `wanted` round values inside [low, high]; only whole numbers if `whole`."""
    span = high - low
    if not 0 < span < math.inf:  # the difference of two finite numbers may be too large for a float
        return [low]
    raw = span / wanted
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next((m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw), raw)
    step = max(1, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def scale_y(series: Sequence[Series], axes: Axes) -> Scale:
    wanted = (axes.line_at, axes.bottom, axes.top)
    values = [*_values(series), *(value for value in wanted if value is not None)]
    found = replace(padded(values, 0.06), is_up=True)
    return replace(found, low=0.0) if axes.from_zero else found


def _log_scale(series: Sequence[Series], axes: Axes) -> Scale | None:
    """Return a log scale; None if a value has no logarithm."""
    values = [*_values(series), *([axes.line_at] if axes.line_at is not None else [])]
    if min(values) <= 0:
        return None
    margin = (max(values) / min(values)) ** 0.06 if max(values) > min(values) else 1.1
    return Scale(min(values) / margin, max(values) * margin, is_up=True, is_log=True)


def _values(series: Sequence[Series]) -> list[float]:
    """Return all y values that will be drawn, those of bands too."""
    found = [y for each in series for _, y in each.points]
    found += [edge for each in series for _, *edges in each.band for edge in edges]
    return [y for y in found if math.isfinite(y)]


def padded(values: Sequence[float], share: float) -> Scale:
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * share
    return Scale(low - margin, high + margin)


_BOX = f'viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none"'


def frame(
    axes: Axes, x_scale: Scale, layers: dict[str, Scale], parts: dict[str, list[str]],
    description: str, above: str,
) -> str:  # fmt: skip
    """Put the drawings of all layers on top of each other, their labels around them."""
    title = f"{axes.y_label} against {axes.x_label}"
    whole = axes.x_label == "step"
    num_y, num_x = (3, 4) if axes.size == "mini" else (5, 8 if axes.size == "tall" else 5)
    body = ""
    for name, y_scale in layers.items():
        labels = "".join(
            f'<span style="top: {y_scale(v) / 10:.2f}%">{short(v)}</span>'
            for v in y_scale.ticks(num_y)
        )
        note = ""
        if axes.line_at is not None:
            top = f"top: {y_scale(axes.line_at) / 10:.2f}%"
            note = f'<span class="note" style="{top}">{escape(axes.line_label)}</span>'
        body += (
            f'<div class="ys {name}">{labels}</div>'
            f'<svg class="{name}" {_BOX} role="img" aria-label="{escape(title)}">'
            f"<desc>{escape(description)}</desc>{''.join(parts[name])}</svg>"
            f'<div class="notes {name}">{note}</div>'
        )
    marks = "".join(
        f'<span style="left: {x_scale(v) / 10:.2f}%">{short(v)}</span>'
        for v in x_scale.ticks(num_x, whole)
    )
    return (
        f'<div class="plot {axes.size}"><div class="unit">{escape(axes.y_label)}</div>{body}'
        f'<div class="above">{above}</div><div class="xs">{marks}</div>'
        f'<div class="unit x">{escape(axes.x_label)}</div></div>'
    )


def grid_marks(x_scale: Scale, y_scale: Scale, axes: Axes) -> Iterator[str]:
    """Draw the warm-up's shade, the grid, and the line of something to compare with."""
    if axes.shaded_to is not None and axes.shaded_to > x_scale.low:
        right = x_scale(min(axes.shaded_to, x_scale.high))
        yield f'<rect class="shade" width="{right:.1f}" height="{SIDE}"/>'
    for value in y_scale.ticks(3 if axes.size == "mini" else 5):
        yield f'<path class="grid" d="M0 {y_scale(value):.1f}H{SIDE}"/>'
    if axes.line_at is not None:
        yield f'<path class="mark" d="M0 {y_scale(axes.line_at):.1f}H{SIDE}"/>'


def draw_line(series: Series, x_scale: Scale, y_scale: Scale) -> str:
    commands, pen_down = [], False
    for x, y in series.points:
        if math.isfinite(y):
            commands.append(f"{'L' if pen_down else 'M'}{x_scale(x):.1f} {y_scale(y):.1f}")
        pen_down = math.isfinite(y)
    line = f'<path class="line {series.kind}" d="{"".join(commands)}"/>'
    dots = ""
    if series.marked:  # a line without length has round ends: a dot that nothing stretches
        at = (f"M{x_scale(x):.1f} {y_scale(y):.1f}h0" for x, y in series.points if math.isfinite(y))
        dots = f'<path class="dots {series.kind}" d="{"".join(at)}"/>'
    return f'<g class="{series.layer}">{_area(series, x_scale, y_scale)}{line}{dots}</g>'


def _area(series: Series, x_scale: Scale, y_scale: Scale) -> str:
    band = [(x, low, high) for x, low, high in series.band if math.isfinite(high - low)]
    if not band:
        return ""
    there = [f"{x_scale(x):.1f} {y_scale(high):.1f}" for x, _, high in band]
    back = [f"{x_scale(x):.1f} {y_scale(low):.1f}" for x, low, _ in reversed(band)]
    return f'<path class="band {series.kind}" d="M{"L".join([*there, *back])}Z"/>'


def _slices(series: Sequence[Series], x_scale: Scale, axes: Axes) -> Iterator[str]:
    """Return invisible columns, each with the exact values above it as its tooltip."""
    values: dict[float, list[str]] = {}
    for each in series:
        for x, y in each.points:
            if math.isfinite(y):
                values.setdefault(x, []).append(f"{each.name} {y:.5g}")
    xs = sorted(values)
    edges = [x_scale.low, *(fmean(pair) for pair in pairwise(xs)), x_scale.high]
    for x, left, right in zip(xs, edges, edges[1:], strict=False):
        said = ", ".join(values[x])
        yield (
            f'<rect x="{x_scale(left):.1f}" width="{x_scale(right) - x_scale(left):.1f}"'
            f' height="{SIDE}"><title>{escape(axes.x_label)} {short(x)}: {escape(said)}</title>'
            "</rect>"
        )


def _describe(series: Sequence[Series], axes: Axes) -> str:
    """Say in words what the lines show, for readers who cannot see them."""
    lines = []
    for each in series:
        points = [p for p in each.points if math.isfinite(p[1])]
        if points:
            (x0, y0), (x1, y1) = points[0], points[-1]
            least, most = min(y for _, y in points), max(y for _, y in points)
            lines.append(
                f"{each.name}: from {y0:.4g} at {axes.x_label} {short(x0)} to {y1:.4g} at"
                f" {short(x1)}, between {least:.4g} and {most:.4g}"
            )
    return "; ".join(lines)


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<span class="key {layer}"><i class="swatch {escape(kind)}"></i>{escape(name)}</span>'
        for name, kind, layer in entries
    )
    return f'<div class="legend">{items}</div>'
