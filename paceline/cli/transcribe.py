"""`paceline transcribe`: turn speech into text, or score a model on a corpus."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import DeviceOption, JsonFlag
from paceline.errors import ConfigError, Outcome

if TYPE_CHECKING:
    from paceline.transcribe.flow import Heard, Score


def transcribe(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="What export wrote, or a folder of transformers.")
    ],
    audio: Annotated[
        list[Path] | None, typer.Argument(metavar="AUDIO...", help="WAV, FLAC, OGG or MP3 files.")
    ] = None,
    wer: Path | None = typer.Option(
        None, "--wer", help="A manifest: transcribe its files and score the model by its texts."
    ),
    root: Path | None = typer.Option(
        None, "--root", help="Where its paths begin; the folder of the manifest if not given."
    ),
    split: str = typer.Option("*", "--split", help="Score only this split; * matches anything."),
    language: str = typer.Option(
        "auto", "--language", help="Whisper: a name or a code, such as es."
    ),
    task: str = typer.Option("auto", "--task", help="Whisper: transcribe or translate."),
    times: str = typer.Option(
        "auto",
        "--times",
        help="Whisper's own times: on or off. auto: on if it was trained for them.",
    ),
    batch_size: int = typer.Option(8, "--batch-size", min=1, help="Pieces of audio per batch."),
    device: DeviceOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Transcribe audio files, or score a model on a corpus.

    Files may have any sample rate and length: a long one is cut where it is quiet, or at the times
    that Whisper writes. A file that cannot be read is named, the others are transcribed, and the
    exit code is 4.

    Example: paceline transcribe runs/latest/exported/safetensors interview.mp3
    """
    from paceline.cli.talk import ConsoleTalk, refusals_on_stdout

    _require_choices(device, times)
    if (wer is None) == (not audio):
        raise ConfigError("give audio files, or --wer MANIFEST, and not both")
    talk = ConsoleTalk()
    with refusals_on_stdout(as_json):
        from paceline.transcribe.flow import read_corpus, score  # imports torch
        from paceline.transcribe.flow import transcribe as hear
        from paceline.transcribe.model import Wanted, open_listener

        rows = [] if wer is None else read_corpus(wer, [split])
        # Libraries that transformers imports print what they think; stdout is for data.
        with redirect_stdout(sys.stderr):
            listener, says = open_listener(model, Wanted(language, task, times, device))
        talk.say(says)
        if wer is None:
            heard = _show(hear(listener, audio or [], batch_size), len(audio or []), as_json)
        else:
            place = root or wer.parent
            found = hear(listener, [place / row.rel_path for row in rows], batch_size)
            heard = list(found)
            _print_score(score(listener, rows, heard), heard, as_json)
    for each in heard:
        if each.error:
            talk.say(f"not transcribed: {each.error}")
        elif not each.text and wer is None:
            talk.say(f"{each.file}: the model heard no words")
    if any(each.error for each in heard):
        raise typer.Exit(Outcome.REFUSED_DATA.exit_code)


def _require_choices(device: str, times: str) -> None:
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is not auto, cpu or cuda")
    if times not in ("auto", "on", "off"):
        raise ConfigError(f"--times {times} is not auto, on or off")


def _show(found: Iterable[Heard], num_files: int, as_json: bool) -> list[Heard]:
    """Print each file's text as soon as it is there; as JSON all of them at the end."""
    from paceline.cli.talk import print_json
    from paceline.records.words import visible

    heard = []
    for each in found:
        heard.append(each)
        if as_json or each.error:
            continue
        if num_files > 1:
            print(f"{visible(each.file)}:")
        for said in each.segments:
            print(f"[{_clock(said.start_s)} -> {_clock(said.end_s)}] {visible(said.text)}")
        sys.stdout.flush()
    if as_json:
        print_json(json.dumps([each.model_dump() for each in heard], indent=2))
    return heard


def _clock(seconds: float) -> str:
    """Write a moment of a recording: `00:31.40`, `1:02:05.00`."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:' if hours else ''}{minutes:02}:{rest // 100:02}.{rest % 100:02}"


def _print_score(score: Score, heard: list[Heard], as_json: bool) -> None:
    from paceline.cli.talk import print_json
    from paceline.records.words import count, elapsed

    if as_json:
        body = {**score.model_dump(), "utterances": [each.model_dump() for each in heard]}
        print_json(json.dumps(body, indent=2))
        return
    if score.wer is None or score.cer is None:
        print("there is no word to score")
        return
    print(f"WER {score.wer:.2%}, CER {score.cer:.2%}")
    told = f"{count(score.num_utterances, 'utterance')}, {count(score.num_words, 'word')}"
    print(f"of {told}, {elapsed(score.audio_s)} of audio")
