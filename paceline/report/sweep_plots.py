"""The drawings of a sweep's page: memory against throughput, intervals, and grids of cells."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import product

from markupsafe import Markup

from paceline.records.words import interval, number, size
from paceline.report.plots import (
    EMPTY,
    SIDE,
    Axes,
    Point,
    Series,
    draw_line,
    frame,
    grid_marks,
    padded,
    scale_y,
    ticks,
)
from paceline.report.sweep_story import CellLine, SweepStory
from paceline.stats.standings import Standings

MARKS = {"refused": "R", "failed": "F", "nothing to measure": "N", "not run": "–"}
STRONGEST = 48  # percent of the hue: text on it stays readable, light and dark
# Bars are cut at these shares of the least and the largest value, or one cell of two runs that
# disagree would push all others into one dot.
SHOWN_FROM, SHOWN_TO = 0.7, 1.3
WIDTH, HEIGHT = 440, 190  # pixels that the scatter has, about: to keep its labels apart


@dataclass(frozen=True)
class Spot:
    """A point of a scatter chart: a short label beside it, all of it in its tooltip."""

    x: float
    y: float
    label: str
    title: str
    kind: str
    is_marked: bool = False


def pareto(story: SweepStory) -> str:
    """Throughput against memory, numbered as in the table of cells."""
    spots, points = [], []
    places = _places(story)
    for line in story.latest:
        if line.throughput is None or line.peak_bytes is None:
            continue
        place = places[line.name]
        point = (line.peak_bytes / 2**30, line.throughput)
        title = (
            f"{place}: {line.name}, {number(line.throughput)} {story.work_unit},"
            f" {size(line.peak_bytes)}"
        )
        kind = "c2" if line.flag else "c6" if line.is_winner else "c1"
        spots.append(Spot(*point, str(place), title, kind, line.is_winner))
        if not line.flag:  # it may be faster, and is no choice
            points.append(point)
    axes = Axes("GiB a rank at its peak", story.work_unit)
    return scatter(spots, staircase(front(points)), axes)


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in memory (x, less is better) and throughput (y) at once."""
    kept: list[Point] = []
    for point in sorted(set(points), key=lambda p: (p[0], -p[1])):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept


def staircase(points: Sequence[Point]) -> list[Point]:
    """More memory than a point of the front has buys nothing until the next one."""
    corners = [(after[0], before[1]) for before, after in zip(points, points[1:], strict=False)]
    mixed = [place for pair in zip(points, corners, strict=False) for place in pair]
    return [*mixed, *points[-1:]]


def scatter(spots: Sequence[Spot], front: Sequence[Point], axes: Axes) -> str:
    """Draw points with labels; `front` is a line through those that nothing beats."""
    shown = [spot for spot in spots if math.isfinite(spot.x) and math.isfinite(spot.y)]
    if not shown:
        return EMPTY
    xs = [spot.x for spot in shown]
    x_scale = replace(padded(xs, 0.08), low=0.0 if axes.from_zero else padded(xs, 0.08).low)
    y_scale = scale_y([Series("", [(spot.x, spot.y) for spot in shown], "")], axes)
    parts = list(grid_marks(x_scale, y_scale, axes))
    if len(front) > 1:
        parts.append(draw_line(Series("front", front, "front"), x_scale, y_scale))
    places = [(x_scale(spot.x), y_scale(spot.y)) for spot in shown]
    taken, marks = list(places), []
    for spot, place in zip(shown, places, strict=True):
        ring = " ringed" if spot.is_marked else ""
        marks.append(
            f'<i class="dot {spot.kind}{ring}" style="{_at(*place)}"'
            f' title="{escape(spot.title)}"></i>'
        )
        beside = _free_place(place, taken)
        taken.append(beside)
        marks.append(f'<b class="spot" style="{_at(*beside)}">{escape(spot.label)}</b>')
    said = "; ".join(spot.title for spot in shown)
    return frame(axes, x_scale, {"linear": y_scale}, {"linear": parts}, said, "".join(marks))


def _free_place(point: Point, taken: Sequence[Point]) -> Point:
    """The middle of a label beside a point that is not on another label or point."""
    across, down = SIDE / WIDTH, SIDE / HEIGHT
    around = [(0, -15), (16, 0), (-16, 0), (0, 15), (16, -14), (-16, -14), (16, 14), (-16, 14)]
    places = [(point[0] + x * across, point[1] + y * down) for x, y in around]
    places = [(x, y) for x, y in places if 0 < x < SIDE and 0 < y < SIDE] or places
    free = (
        p
        for p in places
        if all(abs(p[0] - a) > 13 * across or abs(p[1] - b) > 12 * down for a, b in taken)
    )
    return next(free, places[0])


def _at(x: float, y: float) -> str:
    return f"left: {x / 10:.2f}%; top: {y / 10:.2f}%"


@dataclass(frozen=True)
class _Ruler:
    """Values to percents of the width."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1.0)
        return 2 + 96 * min(1.0, max(0.0, share))


def intervals(story: SweepStory) -> str:
    """A dot and a bar a cell, and the reference as a line through all of them, phase by phase."""
    if not story.rounds:
        return '<p class="empty">Nothing was measured.</p>'
    return "".join(_round(story, standings) for standings in story.rounds)


def _round(story: SweepStory, standings: Standings) -> str:
    names = {row.group.name for row in standings.rows}
    lines = [line for line in story.measured if line.name in names]
    ruler = _ruler(lines)
    at = standings.of(standings.reference).value
    places = _places(story)
    rows = [_strip(line, places[line.name], ruler, at) for line in lines]
    marks = "".join(
        f'<text class="tick" x="{ruler(value):.2f}%" y="15">{escape(number(value))}</text>'
        for value in ticks(ruler.low, ruler.high, wanted=4)
        if ruler(value) < 95  # room for its digits
    )
    axis = f'<svg class="strip" aria-hidden="true">{marks}</svg><p class="soft">{story.unit}</p>'
    return f'<div class="strips">{"".join(rows)}<div class="row"><p></p>{axis}</div></div>'


def _places(story: SweepStory) -> dict[str, int]:
    """The number of each cell in the table of the page."""
    return {line.name: place for place, line in enumerate(story.cells, 1)}


def _ruler(lines: Sequence[CellLine]) -> _Ruler:
    standings = [line.standing for line in lines if line.standing is not None]
    values = [standing.value for standing in standings]
    rates = [standing.rate for standing in standings if standing.rate is not None]
    low = max(min([*values, *(rate.low for rate in rates)]), SHOWN_FROM * min(values))
    high = min(max([*values, *(rate.high for rate in rates)]), SHOWN_TO * max(values))
    margin = (high - low or abs(high) or 1.0) * 0.03
    return _Ruler(low - margin, high + margin)


def _strip(line: CellLine, place: int, ruler: _Ruler, reference: float) -> str:
    assert line.standing is not None, "only cells with figures have a strip"
    value, rate = line.standing.value, line.standing.rate
    kind = "c2" if line.flag else "c6" if line.is_winner else "c1"
    parts = [_upright("mark", ruler(reference), 0, 28)]
    said = f"{number(value)}, no interval"
    if rate is not None:
        said = interval(*rate)
        left, right = ruler(rate.low), ruler(rate.high)
        parts.append(
            f'<line class="span {kind}" x1="{left:.2f}%" x2="{right:.2f}%" y1="14" y2="14"/>'
        )
        # An arrow instead of an end where the bar goes on beyond the picture.
        inside = rate.low >= ruler.low, rate.high <= ruler.high
        for is_inside, at, arrow in zip(inside, (left, right), "◂▸", strict=True):
            edge = f'<text class="tick" x="{min(max(at, 1), 99):.2f}%" y="18">{arrow}</text>'
            parts.append(_upright(f"end {kind}", at, 9, 19) if is_inside else edge)
    parts.append(f'<circle class="dot {kind}" cx="{ruler(value):.2f}%" cy="14" r="5"/>')
    name = f"{place} {breakable(line.name)} {line.sign}".rstrip()
    return (
        f'<div class="row"><p>{name}</p>'
        f'<svg class="strip" role="img" aria-label="{escape(said)}">{"".join(parts)}</svg>'
        f'<p class="soft">{said}</p></div>'
    )


def breakable(text: str) -> Markup:
    """Escaped, and free to go on in a new line after each comma of a cell's name."""
    return Markup(escape(text).replace(",", ",<wbr>"))


def _upright(kind: str, x: float, top: int, bottom: int) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{bottom}"/>'


@dataclass(frozen=True)
class GridCell:
    """`level` is the share of the hue in percent; `mark` is a letter or a sign, so that nothing
    depends on colour alone."""

    text: str
    mark: str
    title: str
    level: int = 0


@dataclass(frozen=True)
class Grid:
    """Two axes; `fixed` says where on the others it lies."""

    fixed: str
    row_key: str
    column_key: str
    columns: list[str]
    rows: list[tuple[str, list[GridCell]]]


def grids(story: SweepStory) -> list[Grid]:
    """The matrix: the first axis down, the second across, one grid a combination of the others."""
    axes = story.record.axes
    if not axes:
        return []
    row_key, *more = axes
    column_key = more[0] if more else ""
    found = []
    for fixed in _combinations({key: axes[key] for key in more[1:]}):
        rows = []
        for row in axes[row_key]:
            spots = [{row_key: row}]
            if column_key:
                spots = [{row_key: row, column_key: column} for column in axes[column_key]]
            rows.append((row, [_grid_cell(story, fixed | spot) for spot in spots]))
        where = ", ".join(f"{key}={value}" for key, value in fixed.items())
        columns = list(axes[column_key]) if column_key else [story.work_unit]
        found.append(Grid(where, row_key, column_key, columns, rows))
    return found


def _combinations(axes: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _grid_cell(story: SweepStory, settings: dict[str, str]) -> GridCell:
    # Cells are in the order of the phases, the last first.
    lines = [line for line in story.cells if line.cell.settings == settings]
    if not lines:
        return GridCell("", "", "no such cell")
    line = lines[0]
    if line.throughput is None:
        return GridCell("", MARKS.get(line.state, "?"), f"{line.name}: {line.state}")
    mark = "!" if line.flag else line.sign or ("F" if line.failed else "")
    title = f"{line.name}: {line.throughput:.6g} {story.work_unit}; {line.verdict}"
    return GridCell(number(line.throughput), mark, title, _level(story, line.throughput))


def _level(story: SweepStory, value: float) -> int:
    known = [line.throughput for line in story.cells if line.throughput is not None]
    low, high = min(known), max(known)
    share = (value - low) / (high - low) if high > low and math.isfinite(value) else 0.0
    return round(4 + share * (STRONGEST - 4))
