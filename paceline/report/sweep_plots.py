"""The drawings of a sweep's page: memory against throughput, intervals, and grids of cells."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from statistics import fmean

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
    line_chart,
    padded,
    scale_y,
    smooth_line,
    ticks,
)
from paceline.report.sweep_story import UNITS, CellLine, SweepStory
from paceline.stats.standings import Standings

MARKS = {"refused": "R", "failed": "F", "nothing to measure": "N", "not run": "–"}
WEAKEST, STRONGEST = 4, 48  # percent of the hue: text on it stays readable, light and dark
# Bars are cut at these shares of the least and the largest value, or one cell of two runs that
# disagree would push all others into one dot.
SHOWN_FROM, SHOWN_TO = 0.7, 1.3
NUM_COLOURS, MAX_CURVES = 6, 24
ALIKE = 1e-3  # losses this close look like one line
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
    """Draw throughput against memory, numbered as in the table of cells."""
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
        kind = _kind(line)
        spots.append(Spot(*point, str(place), title, kind, line.is_winner))
        if not line.flag:  # it may be faster, and cannot be chosen
            points.append(point)
    axes = Axes("GiB per rank at its peak", story.work_unit, from_zero=True)
    return scatter(spots, staircase(front(points)), axes)


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in memory (x, less is better) and throughput (y) at
    once."""
    kept: list[Point] = []
    for point in sorted(set(points), key=lambda p: (p[0], -p[1])):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept


def staircase(points: Sequence[Point]) -> list[Point]:
    """Return the line through the front: more memory than at one of its points gains nothing until
    the next one."""
    corners = [(after[0], before[1]) for before, after in zip(points, points[1:], strict=False)]
    mixed = [place for pair in zip(points, corners, strict=False) for place in pair]
    return [*mixed, *points[-1:]]


def scatter(spots: Sequence[Spot], front: Sequence[Point], axes: Axes) -> str:
    """Draw points with labels; `front` is a line through those that nothing beats."""
    shown = [spot for spot in spots if math.isfinite(spot.x) and math.isfinite(spot.y)]
    if not shown:
        return EMPTY
    x_scale = padded([spot.x for spot in shown], 0.08)
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
    """Return the middle of a label beside a point that is not on another label or point."""
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


def _kind(line: CellLine) -> str:
    """Return the colour of a cell: its loss departs, proven fastest, or one of many."""
    return "c2" if line.flag else "c3" if line.is_fastest else "c1"


def loss_curves(story: SweepStory) -> tuple[str, str]:
    """Draw the loss of each cell, the mean of its runs, and say how to read it: lines in one chart
    as long as there are colours, else small charts on one scale."""
    by_samples = len({line.global_batch for line in story.latest}) > 1
    curves = {line.name: _curve(line, by_samples) for line in story.latest}
    curves = _together({name: points for name, points in curves.items() if points})
    x_label = "samples" if by_samples else "step"
    note = f"mean over the runs of each cell, by {x_label}"
    if len(curves) <= NUM_COLOURS:
        lines = [
            smooth_line(Series(name, points, f"c{place}"))
            for place, (name, points) in enumerate(curves.items(), 1)
        ]
        is_smooth = any(list(line.points) != curves[line.name] for line in lines)
        note += ", smoothed" if is_smooth else ""
        return line_chart(lines, Axes(x_label, "loss", size="tall")), note
    shown = dict(list(curves.items())[:MAX_CURVES])
    if len(curves) > len(shown):
        note += f"; the first {len(shown)} of {len(curves)} in the order of the standings"
    ends = [y for points in shown.values() for _, y in points if math.isfinite(y)]
    axes = Axes(x_label, "loss", bottom=min(ends, default=0.0), top=max(ends, default=1.0),
                size="mini")  # fmt: skip
    small = "".join(
        f"<figure><figcaption>{breakable(name)}</figcaption>"
        f"{line_chart([Series(name, points, 'c1')], axes)}</figure>"
        for name, points in shown.items()
    )
    return f'<div class="minis">{small}</div>', f"{note}, all on one scale"


def _together(curves: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """Return cells that train alike, as when only speed differs, as one curve: drawn over each
    other, only the last would be visible."""
    found: list[tuple[str, list[Point]]] = []
    for name, points in curves.items():
        same = next((n for n, (_, other) in enumerate(found) if _alike(points, other)), None)
        if same is None:
            found.append((name, points))
        else:
            found[same] = (f"{found[same][0]}; {name}", found[same][1])
    return dict(found)


def _alike(ours: Sequence[Point], theirs: Sequence[Point]) -> bool:
    return len(ours) == len(theirs) and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=ALIKE)
        for a, b in zip(ours, theirs, strict=True)
    )


def _curve(line: CellLine, by_samples: bool) -> list[Point]:
    runs = [run.figures.losses for run in line.runs if run.figures is not None]
    if by_samples and not line.global_batch.isdigit():
        return []
    each = int(line.global_batch) if by_samples else 1
    steps = zip(*runs, strict=False) if runs else []
    return [(float(each * step), fmean(losses)) for step, losses in enumerate(steps, 1)]


@dataclass(frozen=True)
class _Ruler:
    """Map values to percents of the width."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1.0)
        return 2 + 96 * min(1.0, max(0.0, share))


def intervals(story: SweepStory) -> str:
    """Draw a dot and a bar per cell, and the reference as a line through all of them, phase by
    phase."""
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
    """Return the number of each cell in the table of the page."""
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
    kind = _kind(line)
    parts = [_upright("mark", ruler(reference), 0, 28)]
    said = f"{number(value)}, no interval"
    if rate is not None:
        said = interval(*rate)
        left, right = ruler(rate.low), ruler(rate.high)
        parts.append(
            f'<line class="span {kind}" x1="{left:.2f}%" x2="{right:.2f}%" y1="14" y2="14"/>'
        )
        # An arrow instead of an end where the bar continues beyond the picture.
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
    """Return a cell's name escaped, with a chance to break the line after each comma."""
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
    """Return the matrix: the first axis down, the second across, one grid per combination of the
    others."""
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
        columns = list(axes[column_key]) if column_key else [grid_unit(story)]
        found.append(Grid(where, row_key, column_key, columns, rows))
    return found


def _combinations(axes: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def grid_unit(story: SweepStory) -> str:
    """Return the unit in which cells are compared: work done, or what they learn."""
    return story.work_unit if story.record.metric in UNITS else story.unit


def _value(story: SweepStory, line: CellLine) -> float | None:
    if story.record.metric in UNITS:
        return line.throughput
    return line.standing.value if line.standing else None


def _grid_cell(story: SweepStory, settings: dict[str, str]) -> GridCell:
    # Cells are in the order of the phases, the last first.
    lines = [line for line in story.cells if line.cell.settings == settings]
    if not lines:
        return GridCell("", "", "no such cell")
    line = lines[0]
    value = _value(story, line)
    if value is None:
        return GridCell("", MARKS.get(line.state, "?"), f"{line.name}: {line.state}")
    mark = "!" if line.flag else line.sign or ("F" if line.failed else "")
    title = f"{line.name}: {value:.6g} {grid_unit(story)}; {line.verdict}"
    return GridCell(number(value), mark, title, _level(story, line))


def _level(story: SweepStory, line: CellLine) -> int:
    """Return the strength of the hue. Cells that cannot be told apart from the best are as strong
    as it; if that is true of all cells, none stands out."""
    known = [other for other in story.measured if _value(story, other) is not None]
    if all(other.is_winner for other in known):
        return WEAKEST
    if line.is_winner:
        return STRONGEST
    values = [_value(story, other) or 0.0 for other in known]
    worst, best, value = min(values), max(values), _value(story, line) or 0.0
    if story.record.metric.endswith(":min"):
        worst, best = best, worst
    share = (value - worst) / (best - worst) if best != worst and math.isfinite(value) else 0.0
    return round(WEAKEST + share * (STRONGEST - WEAKEST))
