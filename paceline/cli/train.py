"""`paceline train`: one run, from config to report, or resumed where it stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.arguments import SOURCE, JsonFlag, OutOption, Overrides
from paceline.errors import ConfigError, StopAsked
from paceline.machine.process import ignore_stop_signals, signal_handlers

if TYPE_CHECKING:
    from paceline.cli.talk import ConsoleTalk
    from paceline.launch.base import Task
    from paceline.launch.rendezvous import Rendezvous
    from paceline.records import Result
    from paceline.trust import Code


def train(
    source: Annotated[str, SOURCE] = "",
    overrides: Overrides = None,
    out: OutOption = None,
    as_json: JsonFlag = False,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would run, and stop."),
    resume: Path | None = typer.Option(
        None, "--resume", help="Resume this run directory, from its newest sound checkpoint."
    ),
    allow_change: bool = typer.Option(
        False, "--allow-change", help="With --resume: accept settings that change the training."
    ),
    trust_code: bool = typer.Option(
        False,
        "--trust-code",
        help="With --resume: run the job's file even if it was never typed here.",
    ),
    from_env: bool = typer.Option(
        False, "--from-env", help="Read NSA_* variables as overrides: docs/nsa.md lists them."
    ),
) -> None:
    """Train a recipe, a YAML file, or a job of your own; write the run record and its report.

    Example: paceline train lm_tiny train.steps=200 launch.nproc=2

    Your own job: paceline train my_job.py:MyWorkload train.steps=50

    Resume a run that was stopped: paceline train --resume runs/latest
    """
    if resume is not None:
        words = [word for word in (source, *(overrides or [])) if word]
        go_on(resume, words, out, as_json, allow_change, trust_code)
    if not source:
        raise ConfigError("train needs a RECIPE, or --resume RUN_DIR\nhint: paceline recipes")
    if from_env:  # what is typed wins over variables
        overrides = [*_read_variables(), *(overrides or [])]
    if dry_run:
        from paceline.cli.plan import show_plan

        show_plan(source, overrides or [], as_json)
    finish(source, overrides or [], out, as_json)


def _read_variables() -> list[str]:
    """Return the overrides that variables ask for; say of the others why they change nothing, once
    where a launcher has started several of us."""
    from paceline.config.nsa_variables import read_variables
    from paceline.machine import resolve_topology

    asked = read_variables(os.environ)
    lines = (*asked.notes, f"from the environment: {' '.join(asked.words) or 'nothing'}")
    for line in lines if resolve_topology().rank == 0 else ():
        typer.echo(line, err=True)
    return asked.words


def finish(source: str, overrides: list[str], out: Path | None, as_json: bool) -> None:
    """Run a job to its report, say how it ended, and leave with its exit code."""
    from paceline.job import load_job, remember_asked
    from paceline.machine.fork_server import start_early
    from paceline.records.rundir import RunDir

    remember_asked(source, overrides)

    def run(talk: ConsoleTalk, rendezvous: Rendezvous | None) -> Result:
        RunDir.require_place(out)  # at once, and not after seconds of importing and planning
        if Path(source.partition(":")[0]).suffix == ".py":  # it will load torch, and who knows what
            start_early(_launcher_in(overrides))
        job = load_job(source, overrides)
        talk.say("checking the machine and planning")
        start_early(job.config.launch.launcher, job.workload.preloads)
        from paceline.run.flow import run_job  # imports torch: only once the config is right

        return run_job(job, out, talk, rendezvous)

    _to_the_end(run, as_json)


def _launcher_in(overrides: list[str]) -> str:
    asked = [word.partition("=")[2] for word in overrides if word.startswith("launch.launcher=")]
    return asked[-1] if asked else "auto"


def go_on(
    resume: Path,
    overrides: list[str],
    out: Path | None,
    as_json: bool,
    allow_change: bool,
    trust_code: bool,
) -> None:
    """Resume a run that was stopped, say how it ended, and leave with its exit code."""
    if out is not None:
        raise ConfigError("--resume continues in the run's own directory; it takes no --out")

    def run(talk: ConsoleTalk, rendezvous: Rendezvous | None) -> Result:
        from paceline.job import preloads_of
        from paceline.machine.fork_server import start_early

        start_early(preloads=preloads_of(resume))
        from paceline.run.flow import resume_job
        from paceline.run.resume import load_resumption

        approve = partial(approve_code, talk, trust_code)
        resumption = load_resumption(resume, overrides, allow_change, approve)
        talk.say("checking the machine and planning")
        return resume_job(resumption, talk, rendezvous)

    _to_the_end(run, as_json)


def approve_code(talk: ConsoleTalk, trust_code: bool, files: Sequence[Code]) -> bool:
    """Name files that nobody has typed here, and ask once, where there is somebody to ask."""
    is_asked = sys.stdin.isatty() and sys.stderr.isatty()
    if trust_code or is_asked:
        for code in files:
            talk.say(f"this run's code, never typed on this machine as it is now: {code}")
    return trust_code or (is_asked and typer.confirm("Run it?", err=True))


def _to_the_end(run: Callable[[ConsoleTalk, Rendezvous | None], Result], as_json: bool) -> None:
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout, say_result
    from paceline.cli.together import among_ranks
    from paceline.records.rundir import RunDir

    talk = ConsoleTalk()
    with among_ranks(_load_task) as rendezvous, refusals_on_stdout(as_json), stoppable():
        result = run(talk, rendezvous)
    ignore_stop_signals()  # all that is left is to say how it ended
    say_result(talk, result, RunDir(Path(result.run_dir)))
    if as_json:
        print_json(result.to_json())
    raise typer.Exit(result.exit_code)


def _load_task() -> Task:
    from paceline.run.rank import TRAIN

    return TRAIN


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal end planning and preparing as Ctrl-C does: before ranks exist there is
    nothing to save, and what was being written is cleaned up on the way out."""

    def stop(number: int, frame: Any) -> None:
        raise StopAsked(
            f"{signal.Signals(number).name}: stopped before any rank had started; data that was"
            " prepared stays\nhint: the same command continues from there"
        )

    with signal_handlers(stop, (signal.SIGTERM, signal.SIGUSR2)):
        yield
