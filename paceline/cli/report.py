"""`paceline report`: summary.md and report.html of a run, from its files alone."""

from pathlib import Path

import typer

from paceline.cli.arguments import JsonFlag


def report(
    run_dir: Path = typer.Argument(Path("runs/latest"), help="A run directory."),
    as_json: JsonFlag = False,
) -> None:
    """Write summary.md and report.html of a finished, failed or still running run.

    Example: paceline report runs/latest
    """
    from paceline.cli.talk import print_json, shown
    from paceline.records import Result
    from paceline.records.rundir import RunDir
    from paceline.report import write_report

    run = RunDir.open(run_dir)
    write_report(run)
    if as_json and run.result.is_file():
        print_json(Result.load(run.result).to_json())
    elif not as_json:
        print(shown(run.report))
