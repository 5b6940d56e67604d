"""`paceline diagnose` and `paceline import`: what went wrong in a run, from its files alone."""

import json
from pathlib import Path

import typer

from paceline.cli.arguments import JsonFlag


def diagnose(
    run_dir: Path = typer.Argument(
        Path("runs/latest"), help="A run directory, or an imported one."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Say what stands out in a run: how it ended, who is slow, why it waits, is it healthy.

    Works from files alone, on a run that crashed, stalled, lives or was imported. Exit 1: an error
    was found.

    Example: paceline diagnose runs/latest
    """
    from paceline.cli.talk import ConsoleTalk, print_json
    from paceline.diagnose.flow import diagnose as judge_files
    from paceline.errors import Outcome
    from paceline.records.words import visible

    found = judge_files(run_dir)
    state = f"{found.view.state.kind}: {found.view.state.said}".rstrip(": ")
    if as_json:
        body = {"run_dir": str(found.run.root), "state": found.view.state.kind}
        findings = [finding.model_dump(mode="json") for finding in found.findings]
        print_json(json.dumps({**body, "findings": findings}, indent=2))
    else:
        say = ConsoleTalk().say
        say(f"{found.view.name}: {state}, {found.view.progress()}")
        for note in found.notes:
            say(f"  {note}")
        for finding in found.findings:
            print(visible(str(finding)))
        if not found.findings:
            print("nothing stands out")
    if any(finding.severity == "error" for finding in found.findings):
        raise typer.Exit(Outcome.CHECK_FAILED.exit_code)


def import_files(
    paths: list[Path] = typer.Argument(..., metavar="FILE|FOLDER...", help="Logs, metrics, dumps."),
    out: Path | None = typer.Option(
        None, "--out", help="The run directory; runs/imported-UTC if not given."
    ),
    as_json: JsonFlag = False,
) -> None:
    """Make a run directory of files that another trainer has left.

    Logs of torchrun, DeepSpeed, Lightning and HF Trainer; metrics.csv, trainer_state.json; dumps of
    NCCL's flight recorder (never unpickled); chrome traces.

    Example: paceline import slurm-4711.out nccl_trace_rank_* --out runs/theirs
    """
    from paceline.cli.talk import ConsoleTalk, print_json
    from paceline.foreign.flow import import_run
    from paceline.records.words import count, typed

    run, imported = import_run(paths, out)
    if as_json:
        print_json(imported.to_json())
        return
    say = ConsoleTalk().say
    for file in imported.files:
        say(f"{file.kind}: {file.path}" + (f" ({file.said})" if file.said else ""))
    steps = count(imported.num_steps, "step")
    ranks = count(imported.num_ranks, "rank")
    say(f"{imported.trainer}: {steps} up to {imported.last_step}, {ranks}")
    say(f"next: paceline diagnose {typed(run.root)}")
    print(typed(run.root))
