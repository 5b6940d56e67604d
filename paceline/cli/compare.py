"""`paceline compare`: what differs between runs, and whether one is faster."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.compare import Comparison, SideFigures

TABLE_WIDTH = 1000  # more than a table takes: it is never cut off, and a terminal wraps it
Sides = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN_OR_GROUP...",
        help="Run directories, folders of repeats, or SWEEP_DIR:CELL. The first is the baseline.",
    ),
]


def compare(
    sides: Sides,
    metric: str | None = typer.Option(
        None,
        "--metric",
        help="samples_per_s, tokens_per_s, tail_mean_iter_p50_ms; or of the job: val/accuracy:max.",
    ),
    margin: float = typer.Option(
        0.02, "--margin", min=0.0, max=0.99, help="Differences below this share do not matter."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Say what differs between runs (config, code, data, hardware), then which is faster.

    Example: paceline compare runs/before runs/after
    """
    from paceline.cli.talk import print_json, refusals_on_stdout
    from paceline.compare import compare_sides, open_side
    from paceline.stats.figures import require_metric

    with refusals_on_stdout(as_json):
        try:
            chosen = None if metric is None else require_metric(metric)
        except ValueError as error:
            raise ConfigError(f"--metric: {error}") from error
        opened = [open_side(text) for text in sides]
        found = compare_sides(opened, chosen, margin)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _print(found: "Comparison") -> None:
    from rich.console import Console

    from paceline.cli.talk import literal

    console = Console(highlight=False, soft_wrap=True, width=TABLE_WIDTH)
    if not found.differences:
        console.print("nothing differs: config, code, data, hardware and environment are the same")
    for apart in found.differences:
        what = apart.what if apart.kind in ("config", "env") else "fingerprint"
        console.print(literal(f"{apart.kind}: {what}: {' | '.join(apart.values)}"))
    for note in found.notes:
        console.print(literal(f"note: {note}"))
    _print_table(console, found)
    for line in _basis(found):
        console.print(literal(line))
    console.print("last losses: mean over the last fifth of the steps")
    if any(side.metrics for side in found.sides):
        console.print("metrics: the last of each run, mean over the runs of a side")


def _basis(found: "Comparison") -> list[str]:
    """Say what the compared numbers were computed from."""
    from paceline.metrics import VAL
    from paceline.stats.figures import is_speed

    if not is_speed(found.metric):
        best = "the best evaluation" if found.metric.startswith(VAL) else "the last fifth"
        return [
            f"{found.metric}: {best} of each run, in brackets the least and the most; a ratio"
            " above 1 is better"
        ]
    windows = [(s.name, "; ".join(dict.fromkeys(s.windows)) or "no run") for s in found.sides]
    return [f"{name}: {found.metric} from {window}" for name, window in windows]


def _print_table(console: "Console", found: "Comparison") -> None:
    from rich.table import Table

    from paceline.cli.talk import literal

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = list(dict.fromkeys(name for side in found.sides for name in side.metrics))
    columns = (
        "",
        "runs",
        found.metric,
        "step p50/p90",
        "memory",
        "last losses",
        *names,
        "ratio",
        "verdict",
    )
    for column in columns:
        table.add_column(column, no_wrap=True)
    for side in found.sides:
        table.add_row(*(literal(cell) for cell in _cells(side, names)))
    console.print(table)


def _cells(side: "SideFigures", names: list[str]) -> list[str]:
    from paceline.records import words

    failed = f" ({len(side.failed)} failed)" if side.failed else ""
    rate = "" if side.value is None else words.number(side.value)
    if side.value is not None and side.low is not None and side.high is not None:
        rate = words.interval(side.value, side.low, side.high)
    steps = [side.step_s_p50, side.step_s_p90]
    times = " / ".join(words.duration(each) for each in steps if each is not None)
    ratio = "" if side.ratio is None else f"{side.ratio:.3f}, no interval"
    if side.speedup:
        ratio = words.ratio(*side.speedup)
    return [
        side.name,
        f"{side.num_runs}{failed}",
        rate,
        times,
        words.size(side.peak_bytes) if side.peak_bytes else "",
        "" if side.tail_loss is None else f"{side.tail_loss:.4f}",
        *(words.number(side.metrics[name]) if name in side.metrics else "" for name in names),
        ratio,
        side.verdict,
    ]
