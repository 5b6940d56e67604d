"""`paceline plan`: what would run, what it needs, what is wrong with it. No GPU needed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.arguments import JsonFlag, Overrides, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.launch.base import LaunchOrder
    from paceline.records import Plan


def plan(
    source: Source,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    launch: bool = typer.Option(
        False, "--launch", help="Show the exact command, environment and place of every rank."
    ),
    sbatch: Path | None = typer.Option(
        None, "--sbatch", metavar="FILE", help="Write a SLURM batch script that trains this."
    ),
    schedule: str | None = typer.Option(
        None,
        "--schedule",
        metavar="all|NAME,NAME",
        help="Compare pipeline schedules for this model and link, simulated.",
    ),
    times: Path | None = typer.Option(
        None,
        "--times",
        metavar="FILE|RUN_DIR",
        help="With --schedule: times of blocks from a file, or measured in a run; else counted.",
    ),
    bubble: float = typer.Option(
        0.1, "--bubble", help="With --schedule: idle share to find a number of microbatches for."
    ),
) -> None:
    """Show what a run would do: each choice with its reason, batch, memory, FLOPs, problems.

    Example: paceline plan lm_1b launch.nproc=64 launch.overcommit=true

    Example: paceline plan lm_1b launch.nproc=4 --schedule all
    """
    if schedule is not None:
        from paceline.cli.schedules import show_schedules

        _require_alone(launch, sbatch)
        show_schedules(source, overrides or [], schedule, times, bubble, as_json)
    if times is not None:
        from paceline.errors import ConfigError

        raise ConfigError("--times is read with --schedule only\nhint: add --schedule all")
    show_plan(source, overrides or [], as_json, launch, sbatch)


def show_plan(
    source: str,
    overrides: list[str],
    as_json: bool,
    launch: bool = False,
    sbatch: Path | None = None,
) -> None:
    """Also what `paceline train --dry-run` does."""
    from paceline.cli.talk import print_json, refusals_on_stdout
    from paceline.job import load_job
    from paceline.machine import resolve_topology

    with refusals_on_stdout(as_json):
        if sbatch is not None:
            _require_new(sbatch)
        job = load_job(source, overrides)
        from paceline.run.flow import decide, order_for, require_feasible  # imports torch

        env, made = decide(job, resolve_topology())
    if launch:
        from paceline.cli.launchplan import print_launch
        from paceline.launch import find_launcher

        print_launch(
            find_launcher(made.crew.launcher.value).plan(order_for(job, env, made)), as_json
        )
    elif as_json:
        print_json(made.to_json())  # its problems are among its findings
    else:
        _print(made)
    require_feasible(made)
    if sbatch is not None:
        _write_batch(sbatch, made.name, order_for(job, env, made), job.asked)
    raise typer.Exit(0)


def _require_alone(launch: bool, sbatch: Path | None) -> None:
    from paceline.errors import ConfigError

    if launch or sbatch is not None:
        raise ConfigError(
            "--schedule compares and decides nothing that could be launched\n"
            "hint: choose one with strategy.schedule=NAME, then --launch or --sbatch"
        )


def _require_new(file: Path) -> None:
    """Refuse what cannot be written before the time of a plan is spent."""
    from paceline.errors import ConfigError

    if file.exists():
        raise ConfigError(f"{file} exists and is not overwritten\nhint: choose another name")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}\nhint: make it first")


def _write_batch(file: Path, name: str, order: "LaunchOrder", asked: "Sequence[str]") -> None:
    from paceline.launch.slurm import batch_script
    from paceline.records.files import write_atomic
    from paceline.records.rundir import slug

    write_atomic(file, batch_script(slug(name), str(file), order, asked))
    typer.echo(f"{file}: add what your site needs, then: sbatch {file}", err=True)


def _pipeline_lines(plan: "Plan") -> "Iterator[str]":
    """Who holds which part of the model."""
    if plan.pipeline is None:
        return
    made, micro = plan.pipeline, plan.batch.micro
    each = micro // made.num_microbatches
    yield f"pipe    {made.schedule}: {made.num_microbatches} microbatches of {each} a pass"
    for number, stage in enumerate(made.stages):
        ranks = ", ".join(str(rank) for rank in stage.ranks)
        yield (
            f"        stage {number}: blocks {stage.first_block} to {stage.end_block - 1},"
            f" {stage.num_parameters:,} parameters, {stage.cost:.0%} of the FLOPs, on rank {ranks}"
        )


def _print(plan: "Plan") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from paceline.records.words import shown, size

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(plan.name)}[/]: {plan.steps} steps of {escape(plan.workload)}")
    batch, state = plan.batch, plan.state_bytes
    console.print(
        f"batch   {batch.global_size} samples a step = {batch.micro} micro x {batch.grad_accum}"
        f" accumulation x {batch.dp} dp"
    )
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())
    console.print(f"ranks   {plan.world_size} ({mesh})")
    for line in _pipeline_lines(plan):
        console.print(line)
    frozen = f" and {plan.model.num_frozen:,} frozen" if plan.model.num_frozen else ""
    console.print(f"model   {plan.model.num_trainable:,} parameters{frozen}")
    console.print(
        f"state   {size(state.total)} a rank = weights {size(state.parameters)} + gradients"
        f" {size(state.gradients)} + optimizer {size(state.optimizer)}; activations come on top"
    )
    if state.peak > state.total:
        console.print(
            f"        and for a while {size(state.gathered)} of gathered weights,"
            f" {size(state.deferred)} of gradients that wait"
        )
    console.print(
        f"sends   {size(plan.exchange.sent)} of gradients a step: {plan.exchange.because}"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in ("choice", "requested", "effective", "because"):
        table.add_column(column, overflow="fold")
    for name, choice in plan.choices().items():
        table.add_row(name, shown(choice.requested), shown(choice.value), escape(choice.because))
    console.print(table)
    if plan.engine_config:
        console.print(f"config of {plan.strategy.value}:")
        console.print(escape(json.dumps(plan.engine_config, indent=2)))
    for finding in plan.findings:
        if finding.severity != "error":
            console.print(f"{finding.severity}: {escape(str(finding))}")
