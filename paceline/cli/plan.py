"""`paceline plan`: what would run, what it needs, what is wrong with it. No GPU needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from paceline.cli.arguments import JsonFlag, Overrides, Source

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.records import Plan


def plan(source: Source, overrides: Overrides = None, as_json: JsonFlag = False) -> None:
    """Show what a run would do: each choice with its reason, batch, memory, FLOPs, problems.

    Example: paceline plan lm_1b launch.nproc=64
    """
    from paceline.job import load_job

    show_plan(load_job(source, overrides or []), as_json)


def show_plan(job: Job, as_json: bool) -> None:
    """Print the plan; leave with the refusal's exit code when it has problems."""
    from paceline.cli.talk import print_json
    from paceline.flow import decide, require_feasible

    _, made = decide(job)
    if as_json:
        print_json(made.to_json())
    else:
        _print(made)
    require_feasible(made)
    raise typer.Exit(0)


def _print(plan: Plan) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{escape(plan.name)}[/]: {plan.steps} steps of {escape(plan.workload)}")
    batch, state = plan.batch, plan.state_bytes
    console.print(
        f"batch   {batch.global_size} samples a step = {batch.micro} micro x {batch.grad_accum}"
        f" accumulation x {batch.dp} dp"
    )
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())
    console.print(f"ranks   {plan.world_size} ({mesh})")
    console.print(f"model   {plan.num_parameters:,} parameters")
    console.print(
        f"state   {_gib(state.total)} a rank = weights {_gib(state.parameters)} + gradients"
        f" {_gib(state.gradients)} + optimizer {_gib(state.optimizer)}; activations come on top"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in ("choice", "requested", "effective", "because"):
        table.add_column(column, overflow="fold")
    for name, choice in plan.choices().items():
        value = f"{choice.value:.4g}" if isinstance(choice.value, float) else str(choice.value)
        table.add_row(name, str(choice.requested), value, escape(choice.because))
    console.print(table)
    for finding in plan.findings:
        if finding.severity != "error":
            console.print(f"{finding.severity}: {escape(str(finding))}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
