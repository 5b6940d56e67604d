"""Transcribes audio files with times, and scores a corpus by word and character error rates.

    for heard in transcribe(listener, sources, batch_size): ...      in the order of the sources
    score(listener, rows, heard)

Pieces of several files are heard together. A file that cannot be read is one `Heard` with an error,
and the others go on.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.logmel import RATE
from paceline.data.manifest import Utterance, read_manifest
from paceline.errors import DataError
from paceline.prepare.speech_audio import Unusable, hear
from paceline.records.base import Part
from paceline.records.files import open_regular
from paceline.transcribe.listeners import Listener, Segment
from paceline.transcribe.pieces import Samples
from paceline.workloads.asr.scores import error_rates, find_normaliser

MAX_S = 12 * 3600.0  # 2.6 GiB of samples


class Said(Part):
    start_s: float
    end_s: float
    text: str


class Heard(Part):
    """One file, and what is said in it; `error` says why nothing is."""

    file: str
    duration_s: float = 0.0
    text: str = ""
    segments: list[Said] = []
    error: str = ""


class Score(Part):
    """Error rates over all words, and all characters, of the utterances that were heard."""

    wer: float | None  # None: there was no word to compare
    cer: float | None
    num_utterances: int
    num_words: int
    audio_s: float
    left_out: list[str]


@dataclass
class _Recording:
    """A file whose pieces are being heard."""

    file: str
    duration_s: float
    error: str = ""
    num_left: int = 0
    segments: list[Segment] = field(default_factory=list)

    def told(self) -> Heard:
        rows = sorted(self.segments)
        said = [
            Said(start_s=round(row.start_s, 3), end_s=round(row.end_s, 3), text=row.text)
            for row in rows
        ]
        text = " ".join(row.text for row in said)
        return Heard(
            file=self.file,
            duration_s=round(self.duration_s, 3),
            text=text,
            segments=said,
            error=self.error,
        )


@dataclass(frozen=True)
class _Piece:
    of: _Recording
    start_s: float
    samples: Samples


def read_audio(path: Path) -> Samples:
    """Decode a WAV, FLAC, OGG or MP3 of any rate; all that can be wrong is a DataError."""
    try:
        with open_regular(path, follow=True) as file:
            return hear(file, RATE, MAX_S)
    except Unusable as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def transcribe(listener: Listener, files: Iterable[Path], batch_size: int) -> Iterator[Heard]:
    """Yield what is said in each file, in order."""
    recordings: list[_Recording] = []
    waiting: list[_Piece] = []
    for path in files:
        recording, pieces = _open(listener, path)
        recordings.append(recording)
        waiting += pieces
        while len(waiting) >= batch_size:
            _write(listener, waiting[:batch_size])
            del waiting[:batch_size]
        yield from _finished(recordings)
    for first in range(0, len(waiting), batch_size):
        _write(listener, waiting[first : first + batch_size])
        yield from _finished(recordings)
    assert not recordings, "every piece was heard"


def _open(listener: Listener, path: Path) -> tuple[_Recording, list[_Piece]]:
    try:
        samples = read_audio(path)
    except DataError as error:
        return _Recording(str(path), 0.0, str(error)), []
    recording = _Recording(str(path), len(samples) / RATE)
    places = listener.cut(samples)
    recording.num_left = len(places)
    return recording, [_Piece(recording, start / RATE, samples[start:end]) for start, end in places]


def _write(listener: Listener, pieces: Sequence[_Piece]) -> None:
    found = listener.write([piece.samples for piece in pieces])
    for piece, segments in zip(pieces, found, strict=True):
        piece.of.num_left -= 1
        for start_s, end_s, text in segments:
            piece.of.segments.append(Segment(piece.start_s + start_s, piece.start_s + end_s, text))


def _finished(recordings: list[_Recording]) -> Iterator[Heard]:
    while recordings and not recordings[0].num_left:
        yield recordings.pop(0).told()


def read_corpus(manifest: Path, splits: Sequence[str]) -> list[Utterance]:
    """Return the utterances of a manifest that have a transcript."""
    rows = [row for row in read_manifest(manifest, RATE, splits) if row.transcript]
    if not rows:
        raise DataError(
            f"no utterance in {manifest} has a transcript to be compared with\n"
            "hint: paceline prepare speech reads transcripts into the manifest"
        )
    return rows


def score(listener: Listener, rows: Sequence[Utterance], heard: Sequence[Heard]) -> Score:
    """Compare what was heard with the transcripts, both normalised as Whisper's authors do."""
    normalise = find_normaliser(listener.speller)
    kept = [(row, each) for row, each in zip(rows, heard, strict=True) if not each.error]
    pairs = [(normalise(row.transcript), normalise(each.text)) for row, each in kept]
    rates = {name: None if math.isnan(rate) else rate for name, rate in error_rates(pairs).items()}
    return Score(
        wer=rates["wer"],
        cer=rates["cer"],
        num_utterances=len(kept),
        num_words=sum(len(said.split()) for said, _ in pairs),
        audio_s=sum(each.duration_s for _, each in kept),
        left_out=[each.file for each in heard if each.error],
    )
