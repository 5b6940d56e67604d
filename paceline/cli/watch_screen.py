"""What `paceline watch` draws on a terminal: one run, or the list of many."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paceline.records.words import count, duration, elapsed, number, size, visible
from paceline.watch.series import Series
from paceline.watch.view import RankView, RunView

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = {
    "data": "cyan", "forward": "blue", "backward": "green", "comm": "red", "optimizer": "magenta",
    "other": "white", "eval": "yellow", "waiting": "bright_black", "unaccounted": "bright_black",
}  # fmt: skip
LETTERS = {
    "data": "d", "forward": "F", "backward": "B", "comm": "x", "optimizer": "o", "other": "-",
    "eval": "e", "waiting": "~", "unaccounted": ".",
}  # fmt: skip
STYLES = {
    "running": "bold green", "ok": "bold green", "starting": "bold yellow", "silent": "bold red",
    "died": "bold red", "failed": "bold red", "stopped": "bold yellow", "foreign": "bold",
}  # fmt: skip
BAR = 30
NUM_EVENTS, NUM_LINES, FEWEST_RANKS = 6, 8, 4


def draw_run(view: RunView, width: int, height: int) -> RenderableType:
    """Return a run as a screen of the given size: what does not fit is counted."""
    events = _events(view)
    lines = list(view.lines)[-NUM_LINES:]
    room = height - 12 - len(events) - len(lines) - len(view.metrics)
    parts: list[RenderableType] = [
        _head(view),
        *_curves(view, max(20, min(100, width - 40))),
        *([Text(str(view.balance))] if view.on_gpu else []),
        _ranks(view, max(FEWEST_RANKS, room)),
    ]
    if events:
        parts.append(Panel(Group(*events), title="events", title_align="left"))
    if view.findings:
        parts.append(Text("\n".join(view.findings)))
    if lines:
        told = Text("\n".join(lines), no_wrap=True, overflow="ellipsis", style="dim")
        parts.append(Panel(told, title="log", title_align="left"))
    return Group(*parts)


def _head(view: RunView) -> Text:
    state = Text(view.state.kind, style=STYLES.get(view.state.kind, ""))
    said = f": {view.state.said}" if view.state.said else ""
    rate = f"  {number(view.rate)} {view.unit}" if view.rate is not None else ""
    step = f"  {duration(view.step_s)}/step" if view.step_s else ""
    first = Text.assemble((visible(view.name), "bold"), "  ", state, visible(said))
    second = f"{view.title}\n{view.progress()}{rate}{step}"
    return Text.assemble(first, "\n", visible(second))


def _curves(view: RunView, width: int) -> list[Text]:
    """Return loss, speed and metrics as lines of blocks, each with its last value."""
    names = ["loss", "val_loss", view.unit.replace("/", "_per_"), "grad_norm", *view.metrics]
    return [
        Text(f"{name[:18]:18} {number(view.last[name]):>10} {spark(view.series[name], width)}")
        for name in names
        if name in view.series and name in view.last
    ]


def spark(series: Series, width: int) -> str:
    """Return a series as a line of blocks of eight heights: the mean of each part of it."""
    values = series.mean
    per = max(1, -(-len(values) // width))
    means = [
        sum(values[i : i + per]) / len(values[i : i + per]) for i in range(0, len(values), per)
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / span))] for mean in means)


def _ranks(view: RunView, room: int) -> Table:
    """Return a table of ranks: those that one would look at first, where not all fit."""
    shown = view.ranks
    caption = None
    if len(shown) > room:
        by_worry = sorted(shown, key=lambda r: r.worry)
        shown = sorted(by_worry[-room:], key=lambda r: r.rank)
        caption = f"and {count(len(view.ranks) - room, 'rank')} more, no slower and no quieter"
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    columns = ["rank", "step", "in", "heard", "step time", "phases", "memory"]
    for name in [*columns, "GPU"] if view.on_gpu else columns:
        table.add_column(
            name, no_wrap=True, justify="right" if name in ("step", "rank") else "left"
        )
    longest = max((r.wall_s for r in view.ranks), default=0.0) or 1.0
    for rank in shown:
        table.add_row(*_rank_cells(rank, longest, view))
    return table


def _rank_cells(rank: RankView, longest: float, view: RunView) -> list[RenderableType]:
    heard = "" if rank.silent_s is None or view.state.is_over else f"{elapsed(rank.silent_s)} ago"
    cells: list[RenderableType] = [
        str(rank.rank),
        f"{rank.step:,}",
        rank.phase,
        heard,
        duration(rank.wall_s) if rank.wall_s else "",
        _bar(rank, longest),
        size(rank.memory_bytes) if rank.memory_bytes else "",
    ]
    if view.on_gpu:
        cells.append(f"{rank.gpu_percent:.0f}%" if rank.gpu_percent is not None else "")
    return cells


def _bar(rank: RankView, longest: float) -> Text:
    """Return a step as a bar of letters, as long as it is beside the slowest rank's. Readable
    without colour."""
    bar = Text()
    for phase, seconds in rank.phases_s.items():
        width = round(BAR * max(0.0, seconds) / longest)
        bar.append(LETTERS.get(phase, "?") * width, style=COLOURS.get(phase, ""))
    return bar


def _events(view: RunView) -> list[Text]:
    shown = list(view.events)[-NUM_EVENTS:]
    styles = {"error": "red", "warning": "yellow"}
    return [
        Text(visible(f"{event.kind}: {event}"), style=styles.get(event.severity, ""), no_wrap=True)
        for event in shown
    ]


def draw_list(
    views: list[RunView], names: Mapping[Path, str], sweeps: list[str], height: int
) -> RenderableType:
    """Return how far sweeps are, and all runs, the live and the newest first."""
    live = sum(not view.state.is_over for view in views)
    table = Table(box=None, pad_edge=False, title=f"{count(len(views), 'run')}, {live} live",
                  title_justify="left")  # fmt: skip
    widths = {"run": None, "state": 8, "steps": 9, "loss": 7, "speed": 14, "what": None}
    for name, width in widths.items():
        table.add_column(name, no_wrap=name != "what", overflow="ellipsis", min_width=width)
    for view in views[: max(5, height - 5 - len(sweeps))]:
        steps = f"{view.step:,}" + (f"/{view.num_steps:,}" if view.num_steps else "")
        rate = f"{number(view.rate)} {view.unit}" if view.rate is not None else ""
        state = Text(view.state.kind, style=STYLES.get(view.state.kind, ""))
        loss = number(view.last["loss"]) if "loss" in view.last else ""
        said = visible(view.state.said or view.title)
        table.add_row(visible(names.get(view.path, view.name)), state, steps, loss, rate, said)
    return Group(*(Text(visible(text)) for text in sweeps), table)
