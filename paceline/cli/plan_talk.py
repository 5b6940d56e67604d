"""What a person sees of a plan: its choices, its launch, its schedules side by side."""

import json
import shlex
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from paceline.cli.talk import literal, print_json
from paceline.plan.crew import count_ranks
from paceline.records import LaunchPlan, Plan, ScheduleComparison, ScheduleRow
from paceline.records.words import duration, shown, size

MAX_RANKS = 64
COLUMNS = (
    "schedule", "step", "vs best", "bubble", "formula", "fullest rank", "in flight", "status",
)  # fmt: skip


def print_plan(plan: Plan) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{literal(plan.name)}[/]: {plan.length} of {literal(plan.workload)}")
    batch, state = plan.batch, plan.state_bytes
    console.print(f"batch   {batch}")
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())
    console.print(f"ranks   {plan.world_size} ({mesh})")
    for line in _pipeline_lines(plan):
        console.print(line)
    frozen = f" and {plan.model.num_frozen:,} frozen" if plan.model.num_frozen else ""
    console.print(f"model   {plan.model.num_trainable:,} parameters{frozen}")
    console.print(
        f"state   {size(state.total)} per rank = weights {size(state.parameters)} + gradients"
        f" {size(state.gradients)} + optimizer {size(state.optimizer)}; activations come on top"
    )
    if state.peak > state.total:
        console.print(
            f"        and for a while {size(state.gathered)} of gathered weights,"
            f" {size(state.deferred)} of gradients that wait"
        )
    console.print(
        f"sends   {size(plan.exchange.sent)} of gradients per step: {plan.exchange.because}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in ("choice", "requested", "effective", "because"):
        table.add_column(column, overflow="fold")
    for name, choice in plan.choices().items():
        row = (name, shown(choice.requested), shown(choice.value), choice.because)
        table.add_row(*(literal(cell) for cell in row))
    console.print(table)
    if plan.engine_config:
        console.print(f"config of {plan.strategy.value}:")
        console.print(literal(json.dumps(plan.engine_config, indent=2)))
    for finding in plan.findings:
        if finding.severity != "error":
            console.print(f"{finding.severity}: {literal(str(finding))}")


def _pipeline_lines(plan: Plan) -> Iterator[str]:
    """Say which rank holds which part of the model."""
    if plan.pipeline is None:
        return
    made, micro = plan.pipeline, plan.batch.micro
    each = micro // made.num_microbatches
    yield f"pipe    {made.schedule}: {made.num_microbatches} microbatches of {each} per pass"
    for number, stage in enumerate(made.stages):
        ranks = ", ".join(str(rank) for rank in stage.ranks)
        yield (
            f"        stage {number}: blocks {stage.first_block} to {stage.end_block - 1},"
            f" {stage.num_parameters:,} parameters, {stage.cost:.0%} of the FLOPs, on rank {ranks}"
        )


def print_launch(launch: LaunchPlan, as_json: bool) -> None:
    if as_json:
        print_json(launch.to_json())
        return
    console = Console(highlight=False, soft_wrap=True)
    crew = launch.crew
    console.print(
        f"{count_ranks(crew.world_size)}: {crew.num_nodes} x {crew.per_node}, started by"
        f" {launch.launcher} ({literal(crew.launcher.because)})"
    )
    command = shlex.join(launch.argv) or "none: forked from a server that has torch loaded"
    console.print(f"command {literal(command)}")
    console.print(f"fabric  {launch.fabric.value}: {literal(launch.fabric.because)}")
    for name, value in launch.env.items():
        console.print(
            f"env     {literal(f'{name}={shlex.quote(value)}  # {launch.reasons[name]}')}"
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", "host", "local rank", "device"):
        table.add_column(column)
    for place in launch.ranks[:MAX_RANKS]:
        device = place.device if place.gpu is None else f"{place.device} (GPU {place.gpu})"
        table.add_row(str(place.rank), literal(place.host), str(place.local_rank), device)
    console.print(table)
    if len(launch.ranks) > MAX_RANKS:
        console.print(f"and {len(launch.ranks) - MAX_RANKS} more; --json lists all")
    for finding in launch.findings:
        console.print(f"{finding.severity}: {literal(str(finding))}")


def print_comparison(made: ScheduleComparison) -> None:
    console = Console(highlight=False, soft_wrap=True)
    pipelines = f", {made.num_pipelines} pipelines side by side" if made.num_pipelines > 1 else ""
    console.print(
        f"[bold]{literal(made.name)}[/]: {made.num_blocks} blocks on {made.num_ranks} ranks, "
        f"{made.num_microbatches} microbatches of {made.samples_per_microbatch:g}"
        f" sample{'s' if made.samples_per_microbatch != 1 else ''}{pipelines}"
    )
    label = ""
    for source in made.sources:
        shown = "" if source.what == label else source.what
        label = source.what
        console.print(f"{shown:<17} {source.kind:<9} {literal(source.because)}")
    _print_rows(console, made)
    if any(row.step_s is not None for row in made.schedules):
        console.print(
            "formula: = exact here, ~ a guide; in flight: microbatches that the fullest rank holds,"
            " each in a P-th of the model"
        )
    _print_needed(console, made)
    _print_drawing(console, made)
    for finding in made.findings:
        console.print(f"{finding.severity}: {literal(str(finding))}")


def _print_rows(console: Console, made: ScheduleComparison) -> None:
    """Print columns as wide as they need to be, whatever the terminal is; then why some
    schedules do not fit."""
    rows = [COLUMNS, *(_cells(row) for row in made.schedules)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(literal(line.rstrip()))
    for candidate in made.schedules:
        if candidate.status != "fits":
            reason = candidate.because.replace("\nhint: ", "; ").replace("\n", "; ")
            console.print(f"{candidate.name} is {candidate.status}: {literal(reason)}")


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
        console.print(f"{target}: not {', '.join(names)}: {literal(because)}")


def _print_drawing(console: Console, made: ScheduleComparison) -> None:
    if not made.drawing or made.best is None:
        return
    width = max(map(len, made.drawing.splitlines()))
    if console.is_terminal and console.width < width:
        console.print(f"{made.best.name} is drawn in a terminal of {width} columns, or a pipe")
        return
    console.print(f"the order of {made.best.name}, as if F = I = W and transfers were free:")
    console.print(literal(made.drawing), end="")
