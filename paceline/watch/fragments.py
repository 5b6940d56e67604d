"""A view as pieces of a page, by the id of the place where each belongs. They are drawn by the same
code as a report's charts; an open page is sent the pieces that have changed."""

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import median
from urllib.parse import quote

from paceline.metrics import TRAIN, VAL
from paceline.records.events import Event
from paceline.records.words import count, duration, elapsed, number, short, size, visible
from paceline.report import plots
from paceline.report.plots import MAX_BARS, Axes, line_chart, stacked_bars
from paceline.watch.series import Series
from paceline.watch.view import RankView, RunView

MAX_LINES_DRAWN, MAX_ROWS, MAX_SHOWN = 6, 16, 40
NOTHING = '<p class="empty">Nothing was recorded yet.</p>'
Pieces = dict[str, str]


def draw_run(view: RunView) -> Pieces:
    """Return all pieces of the page of one run."""
    return {
        "head": _head(view),
        "tiles": _tiles(view),
        "loss": _loss(view),
        "rate": _rate(view),
        "metrics": _metrics(view),
        "phases": _phases(view),
        "memory": _by_rank(view, "memory"),
        "gpus": _gpus(view),
        "ranks": _ranks(view),
        "all": _ranks(view, len(view.ranks)) if len(view.ranks) > MAX_ROWS else "",
        "events": _events(view),
        "findings": _findings(view),
    }


def draw_list(views: list[RunView], names: Mapping[Path, str], sweeps: list[str]) -> Pieces:
    """Return the list of all runs, each a link to its page, below how far sweeps are."""
    live = sum(not view.state.is_over for view in views)
    rows = "".join(_run_row(view, names.get(view.path, "")) for view in views)
    head = (
        "<tr><th>run</th><th>state</th><th>steps</th><th>loss</th><th>speed</th><th>what</th></tr>"
    )
    body = f'<div class="scroll"><table class="runs">{head}{rows}</table></div>' if views else ""
    said = f"{count(len(views), 'run')}, {live} live" if views else "no run here yet"
    told = "".join(f'<p class="soft">{escape(visible(text))}</p>' for text in sweeps)
    return {"count": escape(said), "runs": told + (body or NOTHING)}


def _run_row(view: RunView, name: str) -> str:
    kind = "bad" if view.state.is_bad else "ok" if view.state.kind in ("ok", "running") else ""
    loss = number(view.last["loss"]) if "loss" in view.last else ""
    rate = f"{number(view.rate)} {view.unit}" if view.rate is not None else ""
    steps = f"{view.step:,}" + (f" / {view.num_steps:,}" if view.num_steps else "")
    spark = _spark(view.series["loss"]) if "loss" in view.series else ""
    said = view.state.said or view.title
    link = quote(os.fsencode(name))  # its bytes: a name need not be UTF-8
    return (
        f'<tr><td><a href="run/{link}">{escape(visible(name or view.name))}</a></td>'
        f'<td><span class="badge {kind}">{view.state.kind}</span></td><td>{steps}</td>'
        f"<td>{loss} {spark}</td><td>{rate}</td><td>{escape(visible(said))}</td></tr>"
    )


def _spark(series: Series) -> str:
    """Return a line as wide as a word."""
    values = series.mean[-120:]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(
        f"{100 * n / max(1, len(values) - 1):.1f},{22 - 20 * (v - low) / span:.1f}"
        for n, v in enumerate(values)
    )
    line = f'<polyline class="line" points="{points}"/>'
    return f'<svg class="spark c1" viewBox="0 0 100 24" aria-hidden="true">{line}</svg>'


def _head(view: RunView) -> str:
    kind = "bad" if view.state.is_bad else "ok"
    said = f"{view.title}; {view.state.said}" if view.state.said else view.title
    return (
        f'<h1>{escape(visible(view.name))}</h1><span class="badge {kind}">{view.state.kind}</span>'
        f'<p class="soft">{escape(visible(said))}</p>'
    )


def _tiles(view: RunView) -> str:
    tiles = [
        ("step", f"{view.step:,}", "", "; ".join(filter(None, [_of_steps(view), _left(view)])))
    ]
    if "loss" in view.last:
        val = view.last.get("val_loss")
        beside = f"validation {number(val)}" if val is not None else ""
        tiles.append(("loss", number(view.last["loss"]), "", beside))
    if view.rate is not None:
        step = f"{duration(view.step_s)} a step" if view.step_s else ""
        rate = short(view.rate) if view.rate >= 1e5 else number(view.rate)
        tiles.append(("throughput", rate, view.unit, step))
    held = [r.memory_bytes for r in view.ranks if r.memory_bytes]
    if held:
        value, _, unit = size(max(held)).partition(" ")
        where = "fullest GPU" if view.on_gpu else "largest rank"
        tiles.append(("memory now", value, unit, f"{where}; {size(min(held))} on the least"))
    if view.on_gpu and view.balance.num_rounds:
        least = f"least {view.balance.least:.0f}% (rank {view.balance.least_rank})"
        tiles.append(("GPUs busy", f"{view.balance.mean:.0f}", "%", least))
    return "".join(
        f'<div class="tile"><p class="soft">{label}</p><p class="value">{value}'
        f'{f" <span>{unit}</span>" if unit else ""}</p><p class="soft">{escape(beside)}</p></div>'
        for label, value, unit, beside in tiles
    )


def _of_steps(view: RunView) -> str:
    return f"of {view.num_steps:,}" if view.num_steps else ""


def _left(view: RunView) -> str:
    if view.state.is_over or not view.left_s or view.left_s < 1:
        return ""
    return f"about {elapsed(view.left_s)} left"


def _line(series: Series | None, name: str, kind: str, marked: bool = False) -> plots.Series:
    if series is None:
        return plots.Series(name, (), kind)
    return plots.Series(name, series.points, kind, marked=marked, band=series.band)


def _loss(view: RunView) -> str:
    lines = [
        _line(view.series.get("loss"), "training", "c1"),
        _line(view.series.get("val_loss"), "validation", "c2", marked=True),
    ]
    return line_chart(lines, Axes("step", "loss", size="tall"))


def _phases(view: RunView) -> str:
    """Draw the step of each rank; of many, those with the most and the least work of their own,
    since with waiting all take equally long for a step."""
    ranks = [rank for rank in view.ranks if rank.phases_s]
    note = ""
    if len(ranks) > MAX_BARS:
        ranks.sort(key=lambda rank: -rank.own_s)
        half = MAX_BARS // 2
        said = f"the {half} ranks of {len(ranks)} with most own work, and those with least"
        note = f'<p class="soft">{said}</p>'
        ranks = ranks[:half] + ranks[-half:]
    return note + stacked_bars({f"rank {rank.rank}": rank.phases_s for rank in ranks})


def _rate(view: RunView) -> str:
    series = view.series.get(view.unit.replace("/", "_per_"))
    return line_chart([_line(series, view.unit, "c1")], Axes("step", view.unit, from_zero=True))


def _metrics(view: RunView) -> str:
    drawn = {}
    for bare in dict.fromkeys(name.partition("/")[2] for name in view.metrics):
        pairs = ((f"{TRAIN}{bare}", "c1", False), (f"{VAL}{bare}", "c2", True))
        lines = [_line(view.series.get(name), name, kind, dots) for name, kind, dots in pairs]
        drawn[bare] = line_chart(lines, Axes("step", bare, size="mini"))
    for name, label in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
        line = _line(view.series.get(name), label, "c4")
        drawn[label] = line_chart([line], Axes("step", label, size="mini"))
    figures = (
        f"<figure><figcaption>{escape(name)}</figcaption>{chart}</figure>"
        for name, chart in drawn.items()
    )
    return f'<div class="minis">{"".join(figures)}</div>'


def _by_rank(view: RunView, what: str) -> str:
    """Draw a line for each of a few ranks; of many, the least, the median and the most."""
    known: list[tuple[str, Series]] = [
        (f"rank {r.rank}", getattr(r, what)) for r in view.ranks if getattr(r, what).x
    ]
    if not known:
        return NOTHING
    scale, unit = (2**30, "GiB") if what == "memory" else (1.0, "busy, %")
    axes = Axes("seconds", unit, from_zero=True, top=100.0 if what != "memory" else None)
    if len(known) <= MAX_LINES_DRAWN:
        lines = [
            plots.Series(name, [(x, y / scale) for x, y in series.points], f"c{n % 6 + 1}")
            for n, (name, series) in enumerate(known)
        ]
        return line_chart(lines, axes)
    rounds = zip(*(zip(series.x, series.mean, strict=True) for _, series in known), strict=False)
    spread = [(points[0][0], sorted(y / scale for _, y in points)) for points in rounds]
    line = plots.Series(
        f"median of {len(known)} ranks, between the least and the most",
        [(x, median(ys)) for x, ys in spread],
        "c1",
        band=[(x, ys[0], ys[-1]) for x, ys in spread],
    )
    return line_chart([line], axes)


def _gpus(view: RunView) -> str:
    if not view.on_gpu:
        return '<p class="empty">The ranks are on CPU.</p>'
    cells = "".join(
        f'<span class="heat" style="--level: {r.gpu_percent or 0:.0f}" title="rank {r.rank}:'
        f' {r.gpu_percent or 0:.0f}%">{r.rank}</span>'
        for r in view.ranks
        if r.gpu_percent is not None
    )
    return (
        f'<p class="soft">{escape(str(view.balance))}</p><div class="heats">{cells}</div>'
        + _by_rank(view, "gpu_busy")
    )


def _ranks(view: RunView, most: int = MAX_ROWS) -> str:
    """Return a table of ranks; of many, those that need attention first."""
    shown = sorted(view.ranks, key=lambda r: r.worry, reverse=True)[:most]
    shown.sort(key=lambda r: r.rank)
    names = ("rank", "host", "step", "in", "heard", "step time", "own work", "memory")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(_rank_row(r, view.state.is_over) for r in shown)
    more = len(view.ranks) - len(shown)
    rest = (
        f'<p class="soft">and {more} ranks more, no slower and no quieter</p>' if more > 0 else ""
    )
    return f'<div class="scroll"><table class="labelled"><tr>{head}</tr>{rows}</table></div>{rest}'


def _rank_row(rank: RankView, is_over: bool) -> str:
    heard = "" if rank.silent_s is None or is_over else f"{elapsed(rank.silent_s)} ago"
    cells = {
        "host": rank.host,
        "step": f"{rank.step:,}",
        "in": rank.phase,
        "heard": heard,
        "step time": duration(rank.wall_s) if rank.wall_s else "",
        "own work": duration(rank.own_s) if rank.own_s else "",
        "memory": size(rank.memory_bytes) if rank.memory_bytes else "",
    }
    told = "".join(f'<td data-label="{k}">{escape(visible(v))}</td>' for k, v in cells.items())
    return f"<tr><td>{rank.rank}</td>{told}</tr>"


def _events(view: RunView) -> str:
    if not view.events:
        return '<p class="empty">Nothing was noticed.</p>'
    shown = list(view.events)[-MAX_SHOWN:][::-1]
    return f'<ul class="events">{"".join(_event(event) for event in shown)}</ul>'


def _event(event: Event) -> str:
    where = f"rank {event.rank}, " if event.rank is not None else ""
    return (
        f'<li class="{event.severity}"><b>{escape(visible(event.kind))}</b>'
        f" <span>{escape(where)}{escape(visible(str(event)))}</span></li>"
    )


def _findings(view: RunView) -> str:
    texts = (text.split("\n") for text in view.findings)
    return "".join(f"<p>{'<br>'.join(escape(visible(line)) for line in t)}</p>" for t in texts)
