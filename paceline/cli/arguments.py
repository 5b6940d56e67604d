"""Arguments that several verbs share, so that they read and behave the same everywhere."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
# Which weights of a run, on which device, and whether its code may run.
StepOption = Annotated[
    str,
    typer.Option("--step", help="best, latest or a number. auto: the best, else the latest."),
]
OwnWeightsFlag = Annotated[
    bool,
    typer.Option(
        "--own-weights", help="Use the weights themselves, even if the run kept an average."
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu or cuda. auto: cuda if there is a GPU.")
]
TrustCodeFlag = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the job's file even if it was never typed here."),
]

WORDS = "paceline.words"  # all that was typed, kept for a hint


class Verbs(TyperGroup):
    """The verbs. One that takes keys says how `--train.steps=20` is written here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, [_at_home(word) for word in args])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # click's, which newer typers bring along under another name
            command = getattr(getattr(error, "ctx", None), "command", None)
            if type(error).__name__ == "NoSuchOption" and _takes_keys(command):
                hint = hint_key(error.option_name, ctx.meta[WORDS])  # type: ignore[attr-defined]
                if hint:
                    error.message += f"\nhint: {hint}"  # type: ignore[attr-defined]
                    error.possibilities = None  # type: ignore[attr-defined]
            raise


def _at_home(word: str) -> str:
    """Return `--out=~/runs` with the home in it: no shell expands it there, as it does behind a
    space, and a folder called ~ would be made."""
    option, sign, value = word.partition("=")
    is_option = option.startswith("--") and value.startswith("~")
    return f"{option}{sign}{os.path.expanduser(value)}" if is_option else word


def _takes_keys(command: Any) -> bool:
    return any(param.name == "overrides" for param in getattr(command, "params", ()))


def hint_key(option: str, words: Sequence[str]) -> str:
    """Return how an option is written as a key, where there is such a key; else nothing."""
    from paceline.config.describe import iter_keys
    from paceline.config.schema import RunConfig

    asked = option.lstrip("-").replace("-", "_")
    found = [key.path for key in iter_keys(RunConfig) if f".{key.path}".endswith(f".{asked}")]
    if not found and "." in asked:  # a key of the job's own
        found = [asked]
    value = _value_of(option, words) if len(found) == 1 else "..."
    return f"keys have no dashes: {', '.join(f'{key}={value}' for key in found)}" if found else ""


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return what was typed for an option, behind its `=` or as the next word."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == option:
            is_value = not following.startswith("-") and "=" not in following
            return value or (following if is_value else "") or "..."
    return "..."
