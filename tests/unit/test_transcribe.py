"""Recordings of any kind as text: pieces, batches, times, errors and scores, without a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.transcribe.flow import read_audio, read_corpus, score, transcribe
from paceline.transcribe.listeners import Segment
from paceline.transcribe.pieces import Samples, cut_quietly

soundfile = pytest.importorskip("soundfile")
RATE = 16000


class Speller:
    is_english, library = True, None


class Counting:
    """Hears 2 s at once, and says how long each piece is."""

    def __init__(self) -> None:
        self.speller: Any = Speller()
        self.batches: list[int] = []

    def cut(self, samples: Samples) -> list[tuple[int, int]]:
        return cut_quietly(samples, 2 * RATE, RATE)

    def write(self, pieces: Sequence[Samples]) -> list[list[Segment]]:
        self.batches.append(len(pieces))
        return [[Segment(0.0, len(p) / RATE, f"{len(p) / RATE:.2f}")] for p in pieces]


def tone(seconds: float, rate: int = RATE) -> Samples:
    places = np.arange(round(seconds * rate)) / rate
    return np.sin(2 * np.pi * 220 * places).astype(np.float32) * 0.5


def test_a_recording_is_cut_in_its_pauses() -> None:
    samples = tone(70)
    for second in (25, 52):
        samples[second * RATE : round((second + 0.3) * RATE)] = 0
    places = cut_quietly(samples, 30 * RATE, RATE)
    assert places[0][0] == 0 and places[-1][1] == len(samples)
    assert [end for _, end in places[:-1]] == [start for start, _ in places[1:]]
    cuts = [end / RATE for _, end in places[:-1]]
    assert cuts == pytest.approx([25.15, 52.15], abs=0.15)
    assert cut_quietly(samples[: 30 * RATE], 30 * RATE, RATE) == [(0, 30 * RATE)]
    assert all(end - start <= 30 * RATE for start, end in cut_quietly(tone(95), 30 * RATE, RATE))


@pytest.mark.parametrize(
    ("name", "rate", "channels"),
    [("a.wav", 8000, 1), ("a.flac", 44100, 2), ("a.ogg", 48000, 1), ("a.mp3", 44100, 2),
     ("a.wav", RATE, 1)],
)  # fmt: skip
def test_files_of_any_kind_become_one(tmp_path: Path, name: str, rate: int, channels: int) -> None:
    wave = tone(2.5, rate)
    soundfile.write(tmp_path / name, np.stack([wave] * channels, axis=1), rate)
    found = read_audio(tmp_path / name)
    assert len(found) / RATE == pytest.approx(2.5, abs=0.06)
    middle = found[RATE // 2 : 2 * RATE]
    spectrum = np.abs(np.fft.rfft(middle))
    assert np.argmax(spectrum) * RATE / len(middle) == pytest.approx(220, abs=2)


def test_a_bad_file_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    for number, seconds in enumerate((5.0, 0.3, 1.0)):
        soundfile.write(tmp_path / f"{number}.wav", tone(seconds), RATE)
    (tmp_path / "bad.wav").write_bytes(b"RIFF and more")
    files = [tmp_path / name for name in ("0.wav", "bad.wav", "gone.wav", "1.wav", "2.wav")]
    listener = Counting()
    heard = list(transcribe(listener, files, 2))
    assert [each.file for each in heard] == [str(path) for path in files]
    assert [bool(each.error) for each in heard] == [False, True, True, False, False]
    assert "bad.wav: cannot be decoded" in heard[1].error
    assert "No such file" in heard[2].error
    assert sum(listener.batches) == len(heard[0].segments) + 2 and max(listener.batches) == 2
    assert heard[0].segments[-1].end_s == 5.0 and len(heard[0].segments) >= 3
    starts = [said.start_s for said in heard[0].segments]
    assert starts == sorted(starts) and starts[0] == 0.0


def test_a_score_is_what_jiwer_says(tmp_path: Path) -> None:
    jiwer = pytest.importorskip("jiwer")
    rules = pytest.importorskip("transformers.models.whisper.english_normalizer")
    normalise = rules.EnglishTextNormalizer({})
    said = {"0.wav": "Two dollars", "1.wav": "0.50!", "2.wav": ""}
    lines = ["rel_path\tnum_samples\tduration_sec\ttranscript"]
    for name, seconds in (("0.wav", 2.0), ("1.wav", 0.5), ("2.wav", 1.0)):
        soundfile.write(tmp_path / name, tone(seconds), RATE)
        lines.append(f"{name}\t{round(seconds * RATE)}\t{seconds}\t{said[name]}")
    (tmp_path / "manifest.tsv").write_text("\n".join(lines))
    rows = read_corpus(tmp_path / "manifest.tsv", ["*"])
    assert [row.rel_path for row in rows] == ["0.wav", "1.wav"], "what has no words is not scored"
    listener: Any = Counting()
    heard = list(transcribe(listener, [tmp_path / row.rel_path for row in rows], 8))
    found = score(listener, rows, heard)
    pairs = [(normalise(said["0.wav"]), normalise("2.00")), (normalise("0.50!"), normalise("0.50"))]
    wanted = jiwer.wer(*map(list, zip(*pairs, strict=True)))
    assert 0 < wanted < 1
    assert (found.wer, found.num_words, found.audio_s) == (wanted, 2, 2.5)
