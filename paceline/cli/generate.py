"""`paceline generate`: text from a run's checkpoint or from a model's folder."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from typing import Annotated

import typer

from paceline.cli.arguments import (
    DeviceOption,
    JsonFlag,
    OwnWeightsFlag,
    StepOption,
    TrustCodeFlag,
)
from paceline.errors import ConfigError

STDIN = "-"


def generate(
    source: Annotated[
        str, typer.Argument(metavar="RUN_DIR|MODEL", help="A run, or a folder of transformers.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT...", help="Texts to continue; - reads stdin. Default: an empty one."
        ),
    ] = None,
    step: StepOption = "auto",
    max_new_tokens: int = typer.Option(
        128, "--max-new-tokens", min=1, help="Most tokens to write."
    ),
    temperature: float = typer.Option(
        0.8, "--temperature", min=0, help="0: always the likeliest token."
    ),
    top_k: int | None = typer.Option(
        None, "--top-k", min=1, help="Choose among this many likeliest tokens."
    ),
    top_p: float = typer.Option(
        1.0,
        "--top-p",
        min=0,
        max=1,
        help="Choose among the likeliest tokens with this total probability.",
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="The same seed gives the same text."),
    own_weights: OwnWeightsFlag = False,
    device: DeviceOption = "auto",
    trust_code: TrustCodeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Continue texts with the model of a run, or with a Hugging Face model (safetensors only).

    The text of a single prompt is written to stdout as it is generated. Several prompts are
    continued together, each with its own random numbers, and written one after the other.

    Example: paceline generate runs/latest "def main(" --temperature 0.6
    """
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.cli.train import approve_code

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is not auto, cpu or cuda")
    talk = ConsoleTalk()
    texts = [sys.stdin.read() if text == STDIN else text for text in prompts or [""]]
    streams = len(texts) == 1 and not as_json
    with refusals_on_stdout(as_json):
        from paceline.generate.flow import open_author, write  # imports torch
        from paceline.run.trained import Which
        from paceline.workloads.generation import Sampling

        # Libraries that transformers imports print what they think; stdout is for data.
        with redirect_stdout(sys.stderr):
            approve = partial(approve_code, talk, trust_code)
            which = Which(step, not own_weights)
            author = open_author(source, which, talk.say, approve, device)
        talk.say(author.says)
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
        if streams:
            _show(texts[0])
        found = write(author, texts, sampling, lambda _, text: _show(text) if streams else None)
    if as_json:
        print_json(json.dumps([each.model_dump() for each in found], indent=2))
        return
    if streams:
        _show("\n")
    for number, each in enumerate(found if not streams else []):
        _show(("\n" if number else "") + f"{each.prompt}{each.text}\n")
    if found[0].num_tokens < max_new_tokens and not any(each.ended for each in found):
        talk.say(f"stopped after {found[0].num_tokens} tokens: the model's context is full")


def _show(text: str) -> None:
    """Write what a model says as it comes. It may say anything: nothing of it steers a terminal."""
    from paceline.records.words import visible

    sys.stdout.write(visible(text))
    sys.stdout.flush()
