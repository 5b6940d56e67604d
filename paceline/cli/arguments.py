"""Arguments that several verbs share, so that they read and behave the same everywhere."""

from pathlib import Path
from typing import Annotated

import typer

SOURCE = typer.Argument(
    metavar="RECIPE", help="A recipe's name, a YAML file, FILE.py:Class, or +experiment=NAME."
)
Source = Annotated[str, SOURCE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="a.b=c and ++a.b=c set, ~a.b drops, +a.b=c adds to an open map.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="The run directory; runs/NAME-UTC if not given."),
]
FinalistsOption = Annotated[
    int | None,
    typer.Option("--finalists", help="With --phases: how many of the pilot's best go on."),
]
TailLinesOption = Annotated[
    int | None,
    typer.Option("--tail-lines", help="Lines of a failed rank's log to show; default 12."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the record as JSON on stdout.")]
