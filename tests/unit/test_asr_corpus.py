"""Where a recogniser's speech comes from: tables, folders, manifests, and what is not taken."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.job import Job, load_job
from tests.asr import RECIPE, WHISPER

pytest.importorskip("transformers")
soundfile = pytest.importorskip("soundfile")
SECONDS = [0.3, 0.8, 1.0, 1.2, 1.4, 2.0, 7.0]
WORDS = ["too short", "one", "two gates", "three", "four", "five", "much too long"]


def wav(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    t = np.arange(int(seconds * rate))
    soundfile.write(file, (0.3 * np.sin(t * 0.2)).astype(np.float32), rate, format="WAV")
    return file.getvalue()


def parquet(path: Path, seconds: list[float], words: list[str], **bad: bytes) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    audio = [{"bytes": bad.get(f"row{n}", wav(s)), "path": f"{path.stem}-{n}.wav"}
             for n, s in enumerate(seconds)]  # fmt: skip
    library.write_table(pyarrow.table({"audio": audio, "sentence": words}), path)


def prepared(source: Path, *more: str) -> tuple[Job, list[str]]:
    cache = source.parent / "cache"
    settings = [f"data.source={source}", f"data.cache_dir={cache}", "data.max_duration_s=5", *more]
    job = load_job(RECIPE, [*WHISPER, *settings])
    said: list[str] = []
    job.workload.prepared = job.workload.prepare(job.config, said.append)
    return job, said


def texts(job: Job, split: Any) -> list[str]:
    data: Any = job.workload.build_data(job.config, split)
    return sorted(row.transcript for row in data.clips.utterances)


@pytest.mark.slow
def test_parquet_rows_are_limited_split_and_resampled(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    parquet(tables / "train-00000-of-00002.parquet", SECONDS, WORDS)
    parquet(tables / "train-00001-of-00002.parquet", [1.0], ["six"])
    job, said = prepared(tables, "data.val_fraction=0.2")
    assert "left out: 1 longer than 5 s" in "\n".join(said)
    assert "left out: 1 shorter than 0.5 s" in "\n".join(said)
    both = texts(job, "train") + texts(job, "val")
    assert sorted(both) == ["five", "four", "one", "six", "three", "two gates"]
    assert 1 <= len(texts(job, "val")) <= 2, "a fifth of the eight that there are"
    data: Any = job.workload.build_data(job.config, "train")
    assert data[0]["features"].shape == (20, 500), "5 s of 16 kHz"
    few, _ = prepared(tables, "data.max_files=1", "data.val_fraction=0.2")
    assert "six" not in texts(few, "train") + texts(few, "val")


@pytest.mark.slow
def test_lists_and_folders_are_read_alike(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "clips").mkdir(parents=True)
    for name, seconds in zip("abcd", (1.0, 1.1, 1.2, 0.2), strict=True):
        (files / f"clips/{name}.wav").write_bytes(wav(seconds))
    rows = [{"clip": f"clips/{n}.wav", "text": f"word {n}"} for n in "abcd"]
    with (files / "train.csv").open("w") as out:
        table = csv.DictWriter(out, ["clip", "text"])
        table.writeheader()
        table.writerows(rows)
    job, _ = prepared(files / "train.csv", "data.columns={audio: clip}", "train.eval_every=off",
                      "data.val_fraction=0")  # fmt: skip
    assert texts(job, "train") == ["word a", "word b", "word c"]
    (files / "list.json").write_text(json.dumps(rows))
    listed, _ = prepared(files / "list.json", "data.columns={audio: clip}")
    assert texts(listed, "train") + texts(listed, "val") != []
    for name in "abcd":
        (files / f"clips/{name}.txt").write_text(f"said {name}")
    shutil.copytree(files / "clips", tmp_path / "tree/train")
    tree, _ = prepared(tmp_path / "tree", "data.val_fraction=0", "data.max_files=2",
                       "train.eval_every=off")  # fmt: skip
    assert texts(tree, "train") == ["said a", "said b"]


def test_a_row_that_is_no_audio_is_named(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    parquet(tables / "train.parquet", [1.0, 1.0], ["one", "two"], row1=b"RIFF no audio")
    with pytest.raises(DataError, match=r"train\.parquet.*1"):
        prepared(tables)


def test_a_transcript_without_a_letter_is_named(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    parquet(tables / "train.parquet", [1.0, 1.0, 1.0], ["one", "... !", "7"])
    with pytest.raises(DataError, match=r"1 transcript without a letter: .*'\.\.\. !'"):
        prepared(tables)
