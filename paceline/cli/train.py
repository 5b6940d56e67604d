"""`paceline train`: one run, from config to report."""

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
    from paceline.cli.plan import show_plan
    from paceline.cli.talk import ConsoleTalk, print_json, refusal_json, say_result
    from paceline.errors import PacelineError

    talk = ConsoleTalk()
    try:
        from paceline.job import load_job

        job = load_job(source, overrides or [])
        if dry_run:
            show_plan(job, as_json)
            return
        from paceline.flow import run_job
        from paceline.rundir import RunDir

        talk.say("checking the machine and planning")
        result = run_job(job, out, talk)
    except PacelineError as error:
        if as_json:
            print_json(refusal_json(error))
        raise
    run = RunDir(Path(result.run_dir))
    say_result(talk, result, run)
    if as_json:
        print_json(result.to_json())
    raise typer.Exit(result.exit_code)
