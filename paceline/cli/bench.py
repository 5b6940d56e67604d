"""`paceline bench`: baseline against optimized, in pairs that do equal work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag

if TYPE_CHECKING:
    from paceline.bench.pairs import Pair
    from paceline.bench.profiles import ProfileKind
    from paceline.bench.records import BenchReport

STATUSES = ("ok", "failed", "skipped", "stopped")
TABLE_WIDTH = 1000  # more than a table takes: it is never cut off, and a terminal wraps it
app = typer.Typer(
    help="Baseline against optimized, in pairs of configs that do equal work.\n\n"
    "Example: paceline bench run zero3",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="all|TARGET... [KEY=VALUE]... [TARGET:KEY=VALUE]...",
        help="Overrides apply to both sides of every pair, or of the named one;"
        " bench.recipe=NAME|FILE trains your own job.",
    ),
]

Targets = Annotated[
    list[str] | None, typer.Argument(metavar="[TARGET...]", help="All, if none is named.")
]


@app.command("list")
def list_targets(targets: Targets = None, as_json: JsonFlag = False) -> None:
    """List the targets: what differs, what is equal, the goal, and whether it can run here.

    Example: paceline bench list labs/train_distributed
    """
    from paceline.bench.pairs import plan_pair  # imports torch
    from paceline.bench.target import ALL, find_names, load_targets
    from paceline.cli.talk import print_json
    from paceline.machine.facts import probe

    env = probe()
    names = dict.fromkeys(name for word in targets or [ALL] for name in find_names(word))
    pairs = [plan_pair(load_targets()[name], env) for name in names]
    if as_json:
        print_json(json.dumps([_describe(pair) for pair in pairs], indent=2))
        return
    for pair in pairs:
        _print_pair(pair)


@app.command("run")
def run_targets(
    words: Words,
    repeats: int = typer.Option(5, "--repeats", min=1, help="Runs per side."),
    steps: int = typer.Option(60, "--steps", min=1, help="Steps per run."),
    out: Path | None = typer.Option(
        None, "--out", help="The bench's directory; a bench that it already holds is resumed."
    ),
    margin: float = typer.Option(
        0.02, "--margin", min=0.0, max=0.99, help="Differences below this share do not matter."
    ),
    check: Path | None = typer.Option(
        None,
        "--check-expectations",
        metavar="PATH",
        help="Exit 1 if shown to be worse than the stored runs.",
    ),
    save: Path | None = typer.Option(
        None, "--save-expectations", metavar="PATH", help="Store these runs for this hardware."
    ),
    profile: str = typer.Option(
        "none", "--profile", metavar="none|minimal|full", help="Profile one more run per side."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Run pairs interleaved and say what differs, with intervals. Exit 1: a pair failed.

    Example: paceline bench run zero3 ddp_bucket --repeats 3 --steps 40
    """
    from paceline.bench.target import parse_words
    from paceline.cli.talk import print_json, refusals_on_stdout
    from paceline.cli.together import require_alone
    from paceline.records.words import typed

    with refusals_on_stdout(as_json):
        require_alone("bench")
        asked, kind = parse_words(words), _profile_kind(profile)
        from paceline.bench.runner import (  # these import torch
            BenchSettings,
            run_bench,
            through_sweeps,
        )
        from paceline.cli.sweep_talk import SweepConsole

        talk = SweepConsole()
        settings = BenchSettings(repeats, steps, margin, out, check, save, kind)
        with talk.live():
            report = run_bench(asked, settings, through_sweeps(talk), talk.say)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)
    if report.saved:
        talk.say(f"expectations: {typed(Path(report.saved))}")
    talk.say(f"summary: {typed(Path(report.out) / 'summary.md')}")
    raise typer.Exit(report.exit_code)


def _profile_kind(asked: str) -> "ProfileKind":
    from paceline.bench.profiles import OVERRIDES
    from paceline.errors import ConfigError
    from paceline.records.words import did_you_mean

    for kind in OVERRIDES:
        if kind == asked:
            return kind
    near = did_you_mean(asked, list(OVERRIDES))
    raise ConfigError(f"--profile {asked} is not known\nhint: {near}none, minimal or full")


def _print_report(report: "BenchReport") -> None:
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.words import COLUMNS, headline, profile_lines, rows_of
    from paceline.cli.talk import literal

    console = Console(highlight=False, soft_wrap=True, width=TABLE_WIDTH)
    for pair in report.pairs:
        console.print(literal(headline(pair)))
        table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, no_wrap=True)
        for row in rows_of(pair):
            table.add_row(*(literal(cell) for cell in row))
        if pair.arms:
            console.print(table)
        for told in profile_lines(pair):
            console.print(literal(told))
    for line in report.gate:
        console.print(literal(str(line)))
    counts = {word: sum(p.status == word for p in report.pairs) for word in STATUSES}
    ran = len(report.pairs) - counts["skipped"]
    others = ", ".join(
        f"{counts[word]} {word}" for word in STATUSES[1:] if counts[word] or word != "stopped"
    )
    console.print(f"{counts['ok']} of {ran} pairs ok, {others}, in {report.elapsed_s:.0f} s")


def _describe(pair: "Pair") -> dict[str, object]:
    target = pair.target
    return {
        "name": target.name,
        "aliases": [f"labs/train_distributed:{target.name}", *target.aliases],
        "title": target.title,
        "goal": target.goal,
        "arms": {arm.name: arm.overrides_on(pair.device) for arm in target.arms},
        "differs": target.differs,
        "equal": pair.facts if pair.arms else {},
        "loss_tolerance": _tolerance(pair),
        "loss_because": target.loss.because,
        "can_run": not pair.skipped,
        "because": pair.skipped,
        "left_out": pair.left_out,
    }


def _tolerance(pair: "Pair") -> float | None:
    """Return the loss tolerance on this device, or on the target's own device where it cannot
    run here."""
    target = pair.target
    return target.tolerance(pair.device if pair.device in target.work else next(iter(target.work)))


def _print_pair(pair: "Pair") -> None:
    from paceline.records.words import visible

    for line in _lines_of(pair):
        print(visible(line))


def _lines_of(pair: "Pair") -> Iterator[str]:
    target = pair.target
    yield f"{target.name}: {target.title}"
    arms = [f"{arm.name} ({' '.join(arm.overrides_on(pair.device))})" for arm in target.arms]
    yield f"    goal     {target.goal}"
    yield f"    arms     {', '.join(arms)}"
    for key, why in target.differs.items():
        yield f"    differs  {key}: {why}"
    if pair.arms:
        yield f"    equal    {', '.join(f'{name} {value}' for name, value in pair.facts.items())}"
    tolerance = _tolerance(pair)
    allowed = f"within {tolerance:g}" if tolerance is not None else "not compared"
    yield f"    losses   {allowed}: {target.loss.because}"
    yield f"    here     {f'skipped: {pair.skipped}' if pair.skipped else 'runs'}"
    for arm, why in pair.left_out.items():
        yield f"             without {arm}: {why}"
