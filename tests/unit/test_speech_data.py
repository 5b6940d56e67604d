"""The manifest that training starts from, and the audio that it names."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from paceline.data.audio import Cut, SpeechClips, cut_text
from paceline.data.manifest import (
    AudioData,
    Utterance,
    find_manifest,
    read_manifest,
    save_manifest,
)
from paceline.errors import ConfigError, DataError
from tests.speech_signals import CORPUS, signal

ROWS = [
    Utterance("train-clean-100/1/2/1-2-0000.flac", 16000, 1.0, "A B", "1", "train-clean-100", "ab"),
    Utterance("dev-clean/3/4/3-4-0000.flac", 24001, 24001 / 16000, "-C", "3", "dev-clean", "cd"),
]


# The manifest


def test_a_manifest_is_read_as_it_was_saved_sorted(tmp_path: Path) -> None:
    save_manifest(tmp_path / "m.tsv", ROWS)
    assert (tmp_path / "m.tsv").read_text().splitlines()[1] == (
        "dev-clean/3/4/3-4-0000.flac\t24001\t1.500063\t-C\t3\tdev-clean\tcd"
    )
    found = read_manifest(tmp_path / "m.tsv", 16000)
    assert [row._replace(duration_s=0) for row in found] == [
        row._replace(duration_s=0) for row in reversed(ROWS)
    ]


def test_splits_are_chosen_by_column_or_by_folder(tmp_path: Path) -> None:
    save_manifest(tmp_path / "m.tsv", ROWS)
    bare = [f"{row.rel_path}\t{row.num_samples}\t{row.duration_s:.6f}" for row in ROWS]
    (tmp_path / "bare.tsv").write_text("\r\n".join(bare).replace("/", "\\"))
    for name in ("m.tsv", "bare.tsv"):
        (row,) = read_manifest(tmp_path / name, 16000, ["train*", "other"])
        assert row.rel_path == ROWS[0].rel_path
        with pytest.raises(DataError, match="no file of nope: it has dev-clean, train-clean-100"):
            read_manifest(tmp_path / name, 16000, ["nope"])


BAD = {
    "../../etc/passwd\t16000\t1.0": "leads out of its folder",
    "/etc/passwd\t16000\t1.0": "is an absolute path",
    "C:\\a.flac\t16000\t1.0": "is an absolute path",
    "\t16000\t1.0": "is not the path of a file",
    "a\x1b[2J.flac\t16000\t1.0": "has characters",
    "a.flac\t16000": "2 columns, and 3 are needed",
    "a.flac\tmany\t1.0": "invalid literal",
    "a.flac\t0\t1.0": "is not a length",
    "a.flac\t16000\tnan": "is not a length",
    "a.flac\t16000\t-1": "is not a length",
    "a.flac\t8000\t1.0": "8,000 Hz, not 16000",
    f"{'a' * 251}\t16000\t1.0": "more than 250 bytes",
    "good.flac\t16000\t1.0": "stands in an earlier row already",
}


def test_f43_every_bad_row_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    head = "rel_path\tnum_samples\tduration_sec\ngood.flac\t16000\t1.0\n"
    (tmp_path / "m.tsv").write_text(head + "\n".join(BAD) + "\n")
    with pytest.raises(DataError) as caught:
        read_manifest(tmp_path / "m.tsv", 16000)
    told = str(caught.value).splitlines()
    for line, (reason, said) in enumerate(zip(BAD.values(), told, strict=False), start=3):
        assert f"m.tsv:{line}: " in said and reason in said and "\x1b" not in said
    assert len(told) == len(BAD) + 1 and told[-1].startswith("hint")


def test_many_bad_rows_are_counted_and_other_files_are_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "m.tsv").write_text("../x\t1\t1\n" * 50)
    with pytest.raises(DataError, match="and 30 more rows"):
        read_manifest(tmp_path / "m.tsv", 16000)
    (tmp_path / "m.tsv").write_text("rel_path\tlength\n")
    with pytest.raises(DataError, match="the header has the columns rel_path, length"):
        read_manifest(tmp_path / "m.tsv", 16000)


def test_the_manifest_is_found_by_key_by_variable_or_beside_the_corpus(tmp_path: Path) -> None:
    for name in ("manifest.tsv", "by_key.tsv", "by_variable.tsv"):
        (tmp_path / name).touch()
    variable = {"LIBRISPEECH_MANIFEST_PATH": str(tmp_path / "by_variable.tsv")}
    data = AudioData(root_dir=str(tmp_path))
    by_key = AudioData(root_dir=str(tmp_path), manifest_path=str(tmp_path / "by_key.tsv"))
    assert find_manifest(data, {}).name == "manifest.tsv"
    assert find_manifest(data, variable).name == "by_variable.tsv"
    assert find_manifest(by_key, variable).name == "by_key.tsv"
    with pytest.raises(ConfigError, match="data.root_dir is not set"):
        find_manifest(AudioData(), variable)
    with pytest.raises(DataError, match="(?s)root_dir=/no.*LIBRISPEECH_MANIFEST_PATH=/no/m.tsv is"):
        find_manifest(AudioData(root_dir="/no"), {"LIBRISPEECH_MANIFEST_PATH": "/no/m.tsv"})


def test_to_start_reads_one_file_and_looks_at_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Utterance(f"train/{n}.flac", 16000, 1.0, f"text {n}") for n in range(1000)]
    save_manifest(tmp_path / "manifest.tsv", rows)
    touched: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            touched.append(str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "open", "scandir", "listdir"):
        note(name)
    data = SpeechClips(tmp_path, read_manifest(tmp_path / "manifest.tsv", 16000), 16000)
    assert len(data) == 1000 and data.lengths.sum() == 1000
    assert {Path(path).name for path in touched} == {"manifest.tsv"}, "the corpus is not there"


# The audio


@pytest.fixture
def clips(tmp_path: Path) -> list[Utterance]:
    """Three files of 0.5, 1.5 and 4 s whose samples say where they stand."""
    rows = []
    for name, seconds in (("a", 0.5), ("b", 1.5), ("c", 4.0)):
        ramp = np.arange(int(seconds * 8000), dtype=np.int16)
        soundfile.write(tmp_path / f"{name}.flac", ramp, 8000, subtype="PCM_16")
        text = "".join(itertools.islice(itertools.cycle("0123456789"), int(seconds * 20)))
        rows.append(Utterance(f"{name}.flac", len(ramp), seconds, text))
    return rows


def test_whole_utterances(clips: list[Utterance], tmp_path: Path) -> None:
    data = SpeechClips(tmp_path, clips, 8000)
    assert data.lengths.tolist() == [0.5, 1.5, 4.0]
    waveform, transcript = data[1]
    assert waveform.dtype == torch.float32 and transcript == clips[1].transcript
    assert torch.equal((waveform * 32768).int(), torch.arange(12000, dtype=torch.int32))
    batch = data.batch(np.array([2, 0]))
    assert batch["waveforms"].shape == (2, 32000) and batch["num_samples"].tolist() == [32000, 4000]
    assert not batch["waveforms"][1, 4000:].any() and batch["transcripts"][1] == "0123456789"


def test_a_cut_is_random_in_bounds_and_its_text_goes_along(
    clips: list[Utterance], tmp_path: Path
) -> None:
    data = SpeechClips(tmp_path, clips, 8000, Cut(1.0, 2.0))
    assert data.lengths.tolist() == [0.5, 1.5, 2.0]
    assert len(data[0].waveform) == 4000 and len(data[1].waveform) == 12000, "they are short"
    torch.manual_seed(0)
    drawn = [data[2] for _ in range(50)]
    sizes = [len(clip.waveform) for clip in drawn]
    starts = [round(float(clip.waveform[0]) * 32768) for clip in drawn]
    assert min(sizes) >= 8000 and max(sizes) <= 16000 and len(set(sizes)) > 40
    assert min(starts) < 4000 and max(starts) > 16000 and len(set(starts)) > 40
    for clip, start, length in zip(drawn, starts, sizes, strict=True):
        assert clip.transcript == cut_text(clips[2].transcript, start, length, 32000)
        assert abs(len(clip.transcript) - 20 * length / 8000) < 1
        assert clip.transcript[0] == str(start * 80 // 32000 % 10)
    torch.manual_seed(0)
    again = [data[2] for _ in range(50)]
    assert all(torch.equal(a.waveform, b.waveform) for a, b in zip(drawn, again, strict=True))


def test_a_fixed_slice_and_cuts_that_are_none(clips: list[Utterance], tmp_path: Path) -> None:
    data = SpeechClips(tmp_path, clips, 8000, Cut(0.5, 0.5))
    assert {len(data[n].waveform) for n in range(3) for _ in range(5)} == {4000}
    for bounds in ((2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ConfigError, match="is not one"):
            Cut(*bounds)


def test_text_is_cut_in_proportion_and_never_to_nothing() -> None:
    assert cut_text("0123456789", 0, 5, 10) == "01234"
    assert cut_text("0123456789", 5, 5, 10) == "56789"
    assert cut_text("0123456789", 999, 1, 1000) == "9"
    assert cut_text("ab", 1, 1, 1000) == "a" and cut_text("", 1, 1, 10) == ""


def test_only_the_part_is_decoded(
    tmp_path: Path, clips: list[Utterance], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = soundfile.SoundFile.read

    def counted(self: Any, frames: int = -1, **more: Any) -> Any:
        asked.append(frames)
        return read(self, frames, **more)

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    SpeechClips(tmp_path, clips, 8000, Cut(0.25, 0.25))[2]
    assert asked == [2000]


def test_f43_a_file_that_is_not_what_the_manifest_says_is_named(
    clips: list[Utterance], tmp_path: Path
) -> None:
    data = SpeechClips(tmp_path, clips, 8000)
    soundfile.write(tmp_path / "a.flac", signal("all_loud")[:4000], 16000)
    (tmp_path / "b.flac").write_bytes((tmp_path / "b.flac").read_bytes()[:-300])
    (tmp_path / "c.flac").unlink()
    for index, match in enumerate(
        ("(?s)a.flac has 4000 samples of 1 channels at 16000 Hz.*hint", "b.flac cannot be decoded",
         "c.flac cannot be decoded")
    ):  # fmt: skip
        with pytest.raises(DataError, match=match):
            data[index]


def test_the_fingerprint_changes_with_the_data(clips: list[Utterance], tmp_path: Path) -> None:
    variants = [
        SpeechClips(tmp_path, clips, 8000),
        SpeechClips(tmp_path, clips[:2], 8000),
        SpeechClips(tmp_path, clips, 8000, Cut(1, 2)),
        SpeechClips(tmp_path, [clips[0]._replace(transcript="x"), *clips[1:]], 8000),
    ]
    assert len({data.fingerprint for data in variants}) == 4


def test_the_fixture_is_small_and_is_what_its_maker_makes() -> None:
    files = list(CORPUS.rglob("*.flac"))
    assert len(files) == 32 and sum(path.stat().st_size for path in files) < 2e6
    assert {soundfile.info(path).samplerate for path in files} == {8000, 16000, 22050, 44100}
