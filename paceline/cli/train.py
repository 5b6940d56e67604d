"""`paceline train`: one run, from config to report."""

import signal
from pathlib import Path

import typer

from paceline.cli.arguments import JsonFlag, OutOption, Overrides, Source


def train(
    source: Source,
    overrides: Overrides = None,
    out: OutOption = None,
    as_json: JsonFlag = False,
    dry_run: bool = typer.Option(False, "--dry-run", help="Plan, say what would run, and stop."),
) -> None:
    """Train a recipe, a YAML file, or a job of your own; write the run record and its report.

    Example: paceline train lm_tiny train.steps=200 launch.nproc=2

    Your own job: paceline train my_job.py:MyWorkload train.steps=50
    """
    if dry_run:
        from paceline.cli.plan import plan

        plan(source, overrides, as_json, launch=False, sbatch=None)
    finish(source, overrides or [], out, as_json)


def finish(source: str, overrides: list[str], out: Path | None, as_json: bool) -> None:
    """Run a job to its report, say how it ended, and leave with its exit code."""
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout, say_result
    from paceline.cli.together import among_ranks
    from paceline.job import load_job
    from paceline.rundir import RunDir

    talk = ConsoleTalk()
    with among_ranks() as call, refusals_on_stdout(as_json):
        job = load_job(source, overrides)
        talk.say("checking the machine and planning")
        from paceline.flow import run_job  # imports torch: only once the config is right

        result = run_job(job, out, talk, call)
    # All that is left is to say so: one more Ctrl-C must not replace the run's exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say_result(talk, result, RunDir(Path(result.run_dir)))
    if as_json:
        print_json(result.to_json())
    raise typer.Exit(result.exit_code)
