"""`paceline plan --schedule`: the schedules side by side, for people, or as one record."""

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
from paceline.errors import ConfigError
from paceline.records import ScheduleComparison, ScheduleRow
from paceline.records.words import duration, size

COLUMNS = (
    "schedule", "step", "vs best", "bubble", "formula", "fullest rank", "in flight", "status",
)  # fmt: skip


def show_schedules(
    source: str,
    overrides: list[str],
    names: str,
    times: Path | None,
    bubble: float,
    as_json: bool,
) -> None:
    """Compare, print, and refuse where no schedule can run."""
    from paceline.job import load_job

    with refusals_on_stdout(as_json):
        job = load_job(source, overrides)
        from paceline.machine import resolve_topology
        from paceline.machine.facts import probe
        from paceline.plan.compare_schedules import (  # imports torch
            Question,
            compare_for,
            read_names,
        )

        question = Question(read_names(names), times, bubble)
        made = compare_for(job, probe(), resolve_topology(), question, ConsoleTalk().say)
    if as_json:
        print_json(made.to_json())
    else:
        print_comparison(made)
    if made.best is None:
        raise ConfigError(
            f"no schedule of those asked for can run on {made.num_ranks} ranks with"
            f" {made.num_microbatches} microbatches\nhint: the reasons stand above, each with the"
            " nearest value that will do"
        )
    raise typer.Exit(0)


def print_comparison(made: ScheduleComparison) -> None:
    console = Console(highlight=False, soft_wrap=True)
    pipelines = f", {made.num_pipelines} pipelines side by side" if made.num_pipelines > 1 else ""
    console.print(
        f"[bold]{escape(made.name)}[/]: {made.num_blocks} blocks on {made.num_ranks} ranks, "
        f"{made.num_microbatches} microbatches of {made.samples_per_microbatch:g}"
        f" sample{'s' if made.samples_per_microbatch != 1 else ''}{pipelines}"
    )
    label = ""
    for source in made.sources:
        shown = "" if source.what == label else source.what
        label = source.what
        console.print(f"{shown:<17} {source.kind:<9} {escape(source.because)}")
    _print_rows(console, made)
    if any(row.step_s is not None for row in made.schedules):
        console.print(
            "formula: = exact here, ~ a guide; in flight: microbatches that the fullest rank holds,"
            " each in a P-th of the model"
        )
    _print_needed(console, made)
    _print_drawing(console, made)
    for finding in made.findings:
        console.print(f"{finding.severity}: {escape(str(finding))}")


def _print_rows(console: Console, made: ScheduleComparison) -> None:
    """Columns as wide as they need to be, whatever the terminal is; then why some do not fit."""
    rows = [COLUMNS, *(_cells(row) for row in made.schedules)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(escape(line.rstrip()))
    for candidate in made.schedules:
        if candidate.status != "fits":
            reason = candidate.because.replace("\nhint: ", "; ").replace("\n", "; ")
            console.print(f"{candidate.name} is {candidate.status}: {escape(reason)}")


def _cells(row: ScheduleRow) -> tuple[str, ...]:
    if row.step_s is None:
        return (row.name, *[""] * 6, row.status)
    assert row.bubble is not None and row.formula_bubble is not None
    twice = "; parameters held twice" if row.parameter_copies > 1 else ""
    return (
        row.name,
        duration(row.step_s, digits=4),
        "" if row.against_best is None else f"{row.against_best:+.1%}",
        f"{row.bubble:.1%}",
        f"{'=' if row.is_exact else '~'} {row.formula_bubble:.1%} {row.formula}",
        size(row.peak_bytes or 0),
        f"{row.in_flight:g}",
        f"{row.status}{twice}",
    )


def _print_needed(console: Console, made: ScheduleComparison) -> None:
    target = f"for a bubble of at most {made.target_bubble * 100:g} %"
    able: list[str] = []
    unable: dict[str, list[str]] = {}
    for row in made.schedules:
        if row.needed is not None and row.needed.num_microbatches is not None:
            able.append(f"{row.name} needs M={row.needed.num_microbatches}")
        elif row.needed is not None:
            unable.setdefault(row.needed.because, []).append(row.name)
    if able:
        console.print(f"{target}: {', '.join(able)}")
    for because, names in unable.items():
        console.print(f"{target}: not {', '.join(names)}: {escape(because)}")


def _print_drawing(console: Console, made: ScheduleComparison) -> None:
    if not made.drawing or made.best is None:
        return
    width = max(map(len, made.drawing.splitlines()))
    if console.is_terminal and console.width < width:
        console.print(f"{made.best.name} is drawn in a terminal of {width} columns, or a pipe")
        return
    console.print(f"the order of {made.best.name}, as if F = I = W and transfers were free:")
    console.print(escape(made.drawing), end="")
