"""`paceline report`: summary.md and report.html of a run, from its files alone."""

from pathlib import Path

import typer

from paceline.cli.arguments import JsonFlag


def report(
    run_dir: Path = typer.Argument(Path("runs/latest"), help="A run directory."),
    beside: list[Path] = typer.Option(
        [], "--with", metavar="RUN_DIR", help="Draw this run's loss into the page too."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Write summary.md and report.html of a finished, failed or still running run.

    Example: paceline report runs/latest --with runs/before
    """
    from paceline.cli.talk import print_json
    from paceline.records import Result
    from paceline.records.rundir import RunDir
    from paceline.records.words import typed
    from paceline.report import write_report

    run = RunDir.open(run_dir)
    write_report(run, [RunDir.open(path) for path in beside])
    if as_json and run.result.is_file():
        print_json(Result.load(run.result).to_json())
    elif not as_json:
        print(typed(run.report))
