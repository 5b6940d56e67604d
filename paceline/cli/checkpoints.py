"""`paceline checkpoints`: list, verify and convert the checkpoints of a run."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag
from paceline.errors import Outcome

if TYPE_CHECKING:
    from paceline.checkpoint.survey import Listed, Verified

TABLE_WIDTH = 1000  # more than a table takes: it is never cut off, and a terminal wraps it
COLUMNS = (
    "step", "saved (UTC)", "reason", "size", "state", "by", "precision", "best so far", "",
    "looks",
)  # fmt: skip
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")]
StepArgument = Annotated[str, typer.Argument(metavar="STEP", help="latest, best, or a number.")]
FolderOption = Annotated[
    Path | None,
    typer.Option("--out", help="The folder to make; RUN_DIR/converted/step_<n> if not given."),
]
AverageFlag = Annotated[
    bool, typer.Option("--ema", help="Write the average of the weights that optim.ema has kept.")
]
app = typer.Typer(
    help="List, verify and convert the checkpoints of a run.\n\n"
    "Example: paceline checkpoints list runs/latest",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("list")
def list_checkpoints(run_dir: RunArgument, as_json: JsonFlag = False) -> None:
    """List the checkpoints of a run, the newest first. Checks sizes, not contents.

    Example: paceline checkpoints list runs/latest
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.records.rundir import RunDir

    talk = ConsoleTalk()
    with refusals_on_stdout(as_json):
        from paceline.checkpoint.survey import open_checkpoints, remarks, survey  # imports torch

        folder = open_checkpoints(RunDir.open(run_dir))
        found = survey(folder)
    if as_json:
        print_json(json.dumps([listed.model_dump(mode="json") for listed in found], indent=2))
    elif found:
        _print_table(found)
    else:
        talk.say(f"there is no checkpoint in {folder.root}")
    for remark in remarks(folder, [listed.step for listed in found]):
        talk.say(f"note: {remark}")


@app.command()
def verify(run_dir: RunArgument, as_json: JsonFlag = False) -> None:
    """Read every byte of every checkpoint and compare checksums.

    Exit code 0: all are sound. 1: some are damaged, and the newest sound one is named. 9: none is.

    Example: paceline checkpoints verify runs/latest
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.errors import RestoreError
    from paceline.records.rundir import RunDir

    with refusals_on_stdout(as_json):
        from paceline.checkpoint.survey import open_checkpoints, verify_all  # imports torch

        folder = open_checkpoints(RunDir.open(run_dir))
        found = verify_all(folder, ConsoleTalk().say)
    sound = [verified.step for verified in found if verified.is_sound]
    if as_json:
        body = [verified.model_dump(mode="json") for verified in found]
        newest = sound[0] if sound else None
        print_json(json.dumps({"newest_sound": newest, "checkpoints": body}, indent=2))
    else:
        _print_verdicts(found)
    if not sound:
        raise RestoreError(f"no checkpoint in {folder.root} can be trusted")
    is_ok = len(sound) == len(found)
    raise typer.Exit((Outcome.OK if is_ok else Outcome.CHECK_FAILED).exit_code)


@app.command()
def convert(
    run_dir: RunArgument,
    step: StepArgument = "latest",
    out: FolderOption = None,
    ema: AverageFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint's model as model.safetensors and config.json, reload it and compare.

    Of a Hugging Face model the folder is what its from_pretrained takes.

    Example: paceline checkpoints convert runs/latest best --out my_model
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.records.rundir import RunDir
    from paceline.records.words import size, typed

    with refusals_on_stdout(as_json):
        run = RunDir.open(run_dir)
        from paceline.checkpoint.convert import convert as write  # imports torch

        # Libraries that transformers imports print what they think; stdout is for data.
        with redirect_stdout(sys.stderr):
            converted = write(run, step, out, ConsoleTalk().say, ema)
    if as_json:
        print_json(json.dumps(converted.model_dump(mode="json"), indent=2))
        return
    print(f"{typed(Path(converted.out))}: step {converted.step}, {converted.kind}")
    for name, num_bytes in converted.files.items():
        print(f"  {name:<24} {size(num_bytes)}")
    print(f"reloaded and compared: {converted.num_tensors} tensors equal")


def _print_table(found: list["Listed"]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.records.words import visible

    console = Console(highlight=False, soft_wrap=True, width=TABLE_WIDTH)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for listed in found:
        table.add_row(*(Text(visible(cell)) for cell in _cells(listed)))
    console.print(table)


def _cells(listed: "Listed") -> tuple[str, ...]:
    from paceline.records.words import size

    marks = ("latest",) * listed.is_latest + ("best",) * listed.is_best
    best = str(listed.best) if listed.best is not None else ""
    by = f"{listed.strategy} x {listed.world_size}" if listed.strategy is not None else ""
    return (
        str(listed.step),
        _moment(listed.saved_at),
        listed.reason or "",
        size(listed.num_bytes) if listed.num_bytes is not None else "",
        listed.state or "",
        by,
        listed.precision or "",
        best,
        ", ".join(marks),
        listed.looks,
    )


def _moment(saved_at: float | None) -> str:
    import time

    if saved_at is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(saved_at))
    except (OverflowError, ValueError, OSError):  # an edited file may say anything
        return "?"


def _print_verdicts(found: list["Verified"]) -> None:
    from paceline.records.words import size, visible

    for verified in found:
        name = f"step_{verified.step}"
        if verified.is_sound:
            files = f"{verified.num_files} files, {size(verified.num_bytes)}"
            print(f"{name:<14} sound: {files}")
        for problem in verified.problems:
            print(f"{name:<14} DAMAGED: {visible(problem)}")
    sound = [verified.step for verified in found if verified.is_sound]
    if sound:
        print(f"{len(sound)} of {len(found)} sound; the newest sound one is step_{sound[0]}")
