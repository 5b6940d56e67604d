"""`paceline prepare speech` and `parquet-audio`: a corpus into FLAC files and a manifest."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import JsonFlag
from paceline.cli.prepare import app

if TYPE_CHECKING:
    from paceline.prepare.speech import Prepared, Progress, SpeechRequest

LINE_EVERY_S = 5.0
Input = Annotated[Path, typer.Option("--input-root", help="A folder of audio files.")]
Tables = Annotated[
    Path, typer.Option("--input-root", help="A folder of tables or audio, or one table.")
]
Output = Annotated[Path, typer.Option("--output-root", help="The folder to make or to complete.")]
Rate = Annotated[int, typer.Option("--target-sr", min=2000, max=384_000, help="Hz of the output.")]
Trim = Annotated[bool, typer.Option("--trim", help="Cut silence off at both ends.")]
TopDb = Annotated[
    float,
    typer.Option(
        "--trim-top-db", min=0.1, help="What is this many dB below the loudest part is silence."
    ),
]
ManifestPath = Annotated[
    Path | None, typer.Option("--manifest-path", help="manifest.tsv in the output if not given.")
]
Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Processes; one per core if not given.")
]
LogEvery = Annotated[
    int | None, typer.Option("--log-every", min=1, help="A line every so many files, too.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Make every file again.")]
MaxRejects = Annotated[
    int,
    typer.Option("--max-rejects", min=0, help="With more rejected files: exit 4, and no manifest."),
]
MaxSeconds = Annotated[float, typer.Option("--max-seconds", min=0.1, help="Reject longer files.")]
ColumnNames = Annotated[
    str, typer.Option("--columns", help="audio=NAME,text=NAME,speaker=NAME,split=NAME")
]


@app.command("speech")
def speech(
    input_root: Input,
    output_root: Output,
    target_sr: Rate = 16000,
    trim: Trim = False,
    trim_top_db: TopDb = 60.0,
    manifest_path: ManifestPath = None,
    workers: Workers = None,
    log_every: LogEvery = None,
    overwrite: Overwrite = False,
    max_rejects: MaxRejects = 0,
    max_seconds: MaxSeconds = 3600.0,
    as_json: JsonFlag = False,
) -> None:
    """Turn a tree of FLAC, WAV, OGG or MP3 into mono FLAC of one rate, and list it in a manifest.

    Run it again to go on where it was killed: what is there and sound is kept.

    Example: paceline prepare speech --input-root LibriSpeech --output-root speech_16k --trim
    """
    from paceline.prepare.speech import SpeechRequest
    from paceline.prepare.speech_audio import Sound

    sound = Sound(target_sr, trim, trim_top_db, max_seconds)
    asked = SpeechRequest(
        input_root, output_root, sound, manifest_path, workers or _cores(), overwrite, max_rejects
    )
    _run(asked, as_json, log_every)


@app.command("parquet-audio")
def parquet_audio(
    input_root: Tables,
    output_root: Output,
    columns: ColumnNames = "",
    target_sr: Rate = 16000,
    trim: Trim = False,
    trim_top_db: TopDb = 60.0,
    manifest_path: ManifestPath = None,
    workers: Workers = None,
    log_every: LogEvery = None,
    overwrite: Overwrite = False,
    max_rejects: MaxRejects = 0,
    max_seconds: MaxSeconds = 3600.0,
    as_json: JsonFlag = False,
) -> None:
    """Do the same with parquet rows of audio and text, or with files that CSV or JSON lists name.

    Example: paceline prepare parquet-audio --input-root shards --output-root speech_16k --trim
    """
    from paceline.prepare.speech import SpeechRequest
    from paceline.prepare.speech_audio import Sound
    from paceline.prepare.speech_tables import parse_columns

    sound = Sound(target_sr, trim, trim_top_db, max_seconds)
    asked = SpeechRequest(
        input_root, output_root, sound, manifest_path, workers or _cores(), overwrite, max_rejects,
        parse_columns(columns),
    )  # fmt: skip
    _run(asked, as_json, log_every)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _run(asked: "SpeechRequest", as_json: bool, log_every: int | None) -> None:
    from paceline.cli.talk import ConsoleTalk, print_json, refusals_on_stdout
    from paceline.prepare.speech import prepare

    talk = ConsoleTalk()
    try:
        with refusals_on_stdout(as_json):
            prepared = prepare(asked, talk.say, _Teller(talk.say, log_every).tell)
    except KeyboardInterrupt:
        talk.say("interrupted: the same command goes on from here")
        raise
    if as_json:
        print_json(prepared.to_json())
    else:
        _print_totals(prepared)


class _Teller:
    """Says how far it is every few seconds, every so many files if asked, and at the end."""

    def __init__(self, say: Callable[[str], None], every: int | None = None) -> None:
        self._say, self._every, self._said_at = say, every, time.monotonic()

    def tell(self, progress: "Progress") -> None:
        now = time.monotonic()
        is_due = self._every is not None and progress.num_done % self._every == 0
        is_due |= now - self._said_at >= LINE_EVERY_S or progress.num_done == progress.num_files
        if is_due:
            self._said_at = now
            self._say(describe(progress))


def describe(progress: "Progress") -> str:
    """Say how far it is: `120/2,703 files  0.42 h of audio  0.013 h/s  about 2 min 5 s left`."""
    from paceline.records.words import elapsed, number

    rate = progress.hours / progress.elapsed_s
    left_s = progress.elapsed_s * (1 / progress.share - 1) if progress.share else 0.0
    left = f"  about {elapsed(left_s)} left" if left_s >= 1 else ""
    files = f"{progress.num_done:,}/{progress.num_files:,} files"
    hours = f"{number(progress.hours, 3)} h of audio  {number(rate, 2)} h/s"
    return f"{files}  {hours}{left}"


def _print_totals(prepared: "Prepared") -> None:
    from paceline.records.words import count, elapsed, number, table, visible

    columns = ("split", "files", "hours recorded", "hours prepared", "speakers", "no transcript")
    rows = [
        (visible(total.split) or "(none)", f"{total.num_files:,}", f"{total.source_hours:.3f}",
         f"{total.hours:.3f}", str(total.num_speakers), str(total.num_without_transcript))
        for total in prepared.splits
    ]  # fmt: skip
    print(table(columns, rows))
    kept = f"{prepared.num_kept:,} were there and sound" if prepared.num_kept else ""
    rejected = f"{prepared.num_rejected:,} rejected (rejected.tsv)" if prepared.num_rejected else ""
    parts = [count(prepared.num_files, "file"), *filter(None, (kept, rejected))]
    rate = number(prepared.audio_hours_per_s, 2)
    print(f"{', '.join(parts)}; {elapsed(prepared.elapsed_s)}, {rate} h of audio per second")
    print(f"manifest: {visible(prepared.manifest_path)}")
