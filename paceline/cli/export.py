"""`paceline export`: write a run's model for other programs, load it again and compare."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag, OwnWeightsFlag, StepOption, TrustCodeFlag

if TYPE_CHECKING:
    from paceline.export.records import ExportReport


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    format: str = typer.Option("safetensors", "--format", help="safetensors, pytorch or onnx."),
    merge: bool = typer.Option(False, "--merge", help="Make adapters (LoRA) part of the weights."),
    step: StepOption = "auto",
    own_weights: OwnWeightsFlag = False,
    dtype: str = typer.Option(
        "float32", "--dtype", help="float32, bfloat16 or float16; onnx is float32."
    ),
    output: Path | None = typer.Option(
        None, "--output", help="The folder to make; RUN_DIR/exported/FORMAT if not given."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier export."),
    trust_code: TrustCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run's model for other programs: weights, config, tokenizer, card and hashes.

    The files are loaded again by the library that they are for, and compared with the trained
    model on real samples; only then does the folder get its name.

    Example: paceline export runs/latest --format onnx --merge
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.cli.train import approve_code
    from paceline.machine import resolve_topology
    from paceline.records.rundir import RunDir

    talk, topology = ConsoleTalk(), resolve_topology()
    if topology.rank > 0:
        return  # under a launcher: one process writes
    with refusals_on_stdout(as_json):
        run = RunDir.open(run_dir)
        from paceline.export.flow import ExportOptions  # imports torch
        from paceline.export.flow import export as write
        from paceline.run.trained import Which

        asked = ExportOptions(format, merge, Which(step, not own_weights), dtype, output, overwrite)
        # Libraries that transformers imports print what they think; stdout is for data.
        with redirect_stdout(sys.stderr):
            report = write(run, asked, talk.say, partial(approve_code, talk, trust_code))
    for remark in report.remarks:
        talk.say(f"note: {remark}")
    if as_json:
        print_json(json.dumps(report.model_dump(mode="json"), indent=2))
    else:
        _print(report)


def _print(report: ExportReport) -> None:
    from paceline.records.words import count, size, typed

    files = count(report.num_files, "file")
    print(f"{typed(Path(report.out))}: {files}, {size(report.num_bytes)}, step {report.step}")
    if report.num_tensors:
        print(f"loaded again: {report.num_tensors} tensors equal")
    print(f"compared on {report.inputs}:")
    for row in report.compared:
        print(f"  {row.output:<32} {row.by:<24} differs by {row.error:.1e} of {row.limit:.0e}")
    print("ok")
