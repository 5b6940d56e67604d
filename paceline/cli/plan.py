"""`paceline plan`: what would run, what it needs, what is wrong with it. No GPU needed."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.arguments import JsonFlag, Overrides, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.launch.base import LaunchOrder


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
        help="With --schedule: block times from a file or a run; else estimated by counting.",
    ),
    bubble: float = typer.Option(
        0.1, "--bubble", help="With --schedule: find the microbatches for this idle share."
    ),
) -> None:
    """Show what a run would do: each choice with its reason, batch, memory, FLOPs, problems.

    Example: paceline plan lm_1b launch.nproc=64 launch.overcommit=true

    Example: paceline plan lm_1b launch.nproc=4 --schedule all
    """
    if schedule is not None:
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
    """Plan and print; `paceline train --dry-run` does the same."""
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
        from paceline.cli.plan_talk import print_launch
        from paceline.launch import find_launcher

        print_launch(
            find_launcher(made.crew.launcher.value).plan(order_for(job, env, made)), as_json
        )
    elif as_json:
        print_json(made.to_json())  # its problems are among its findings
    else:
        from paceline.cli.plan_talk import print_plan

        print_plan(made)
    require_feasible(made)
    if sbatch is not None:
        _write_batch(sbatch, made.name, order_for(job, env, made), job.asked)
    raise typer.Exit(0)


def show_schedules(
    source: str,
    overrides: list[str],
    names: str,
    times: Path | None,
    bubble: float,
    as_json: bool,
) -> None:
    """Compare schedules and print them; refuse where none of them can run."""
    from paceline.cli.plan_talk import print_comparison
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.errors import ConfigError
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
            f" {made.num_microbatches} microbatches\nhint: the reasons are above, each with the"
            " nearest value that will do"
        )
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
