"""Parquet rows of audio, and lists that name files: the same output as a folder of files."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import soundfile

from paceline.data.manifest import Utterance, read_manifest
from paceline.errors import ConfigError, DataError
from paceline.prepare.speech import Prepared, SpeechRequest, prepare
from paceline.prepare.speech_audio import Sound
from paceline.prepare.speech_tables import parse_columns, scan_tables
from tests.speech_signals import CORPUS, signal

FILES = sorted(CORPUS.rglob("114-*.flac")) + sorted(CORPUS.rglob("135-*.flac"))


def run(source: Path, out: Path, columns: str = "", **more: Any) -> Prepared:
    asked = SpeechRequest(source, out, Sound(trim=True), columns=parse_columns(columns), **more)
    return prepare(asked, lambda text: None, lambda progress: None)


def rows_of(out: Path) -> list[Utterance]:
    return read_manifest(out / "manifest.tsv", 16000)


def save_parquet(path: Path, rows: list[dict[str, Any]], group: int = 3) -> None:
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table(
        {
            "audio": pyarrow.array([row["audio"] for row in rows], kind),
            "text": [row.get("text", "") for row in rows],
            "speaker_id": [row.get("speaker_id", 0) for row in rows],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def audio(path: Path, named: str | None = None) -> dict[str, Any]:
    return {"bytes": path.read_bytes(), "path": path.name if named is None else named}


def test_parquet_gives_the_audio_that_files_give(tmp_path: Path) -> None:
    """Row groups of three, two processes: each row's audio with its own text."""
    rows = [{"audio": audio(path), "text": path.stem, "speaker_id": 7} for path in FILES]
    save_parquet(tmp_path / "in/data/train-00000-of-00002.parquet", rows[:6])
    save_parquet(tmp_path / "in/data/train-00001-of-00002.parquet", rows[6:])
    done = run(tmp_path / "in", tmp_path / "out", workers=2)
    found = rows_of(tmp_path / "out")
    assert {(row.split, row.speaker) for row in found} == {("train", "7")}
    assert sorted(row.transcript for row in found) == sorted(path.stem for path in FILES)
    (tmp_path / "files").mkdir()
    for path in FILES:
        shutil.copy(path, tmp_path / "files")
    prepare(
        SpeechRequest(tmp_path / "files", tmp_path / "same", Sound(trim=True)),
        print,
        lambda one: None,
    )
    sums = {row.rel_path: row.sha256 for row in rows_of(tmp_path / "same")}
    assert {f"{row.transcript}.flac": row.sha256 for row in found} == sums
    assert done.num_files == len(FILES)
    assert run(tmp_path / "in", tmp_path / "out").num_kept == len(FILES)


def test_rows_without_a_name_or_with_the_same_one(tmp_path: Path) -> None:
    rows = [{"audio": audio(FILES[n], name)} for n, name in enumerate(["a.wav", "a.wav", "", "b"])]
    save_parquet(tmp_path / "x.parquet", rows)
    run(tmp_path / "x.parquet", tmp_path / "out")
    names = [row.rel_path for row in rows_of(tmp_path / "out")]
    assert names == ["a-000000.flac", "a-000001.flac", "b.flac", "x-000002.flac"]


def test_a_row_is_confined_to_the_output_and_to_its_folder(tmp_path: Path) -> None:
    """Names inside are of another machine: their folders are dropped. A row without bytes names a
    file, and that must lie beside the table."""
    soundfile.write(tmp_path / "secret.wav", signal("all_loud"), 16000)
    rows = [
        {"audio": audio(FILES[0], "../../../../etc/a.flac")},
        {"audio": audio(FILES[1], "/root/.ssh/b.flac")},
        {"audio": {"bytes": None, "path": "../secret.wav"}},
        {"audio": {"bytes": None, "path": "here.wav"}},
        {"audio": {"bytes": None, "path": None}},
        {"audio": {"bytes": b"", "path": "empty.flac"}},
        {"audio": None},
    ]
    save_parquet(tmp_path / "in/x.parquet", rows, group=10)
    soundfile.write(tmp_path / "in/here.wav", signal("all_loud"), 16000)
    run(tmp_path / "in", tmp_path / "out", max_rejects=4)
    assert [row.rel_path for row in rows_of(tmp_path / "out")] == ["a.flac", "b.flac", "here.flac"]
    listed = (tmp_path / "out/rejected.tsv").read_text()
    assert "x.parquet:2\tno bytes, and '../secret.wav' leads out of its folder" in listed
    assert "x.parquet:5\tcannot be decoded" in listed and "x.parquet:6\tno bytes" in listed


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl"])
def test_lists_of_files(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "clips").mkdir(parents=True)
    for path in FILES[:4]:
        shutil.copy(path, root / "clips")
    said = 'a "quoted" text, with a comma'
    rows = [{"path": path.name, "sentence": said, "client_id": "x"} for path in FILES[:4]]
    file = root / f"train.{kind}"
    if kind in ("csv", "tsv"):
        stream = io.StringIO()
        if kind == "csv":
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            lines = [rows[0].keys(), *(row.values() for row in rows)]
            stream.write("\n".join("\t".join(line) for line in lines))
        file.write_text(stream.getvalue())
    elif kind == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (root, file):
        run(source, tmp_path / f"out_{source.name}")
        found = rows_of(tmp_path / f"out_{source.name}")
        assert [row.rel_path for row in found] == [f"clips/{path.name}" for path in FILES[:4]]
        assert {(row.transcript, row.speaker, row.split) for row in found} == {(said, "x", "train")}


def test_a_folder_without_tables_is_taken_as_it_is(tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "dev-clean", tmp_path / "in/dev-clean")
    assert run(tmp_path / "in", tmp_path / "out").num_files == 5


def test_bad_rows_of_a_list_are_rejected_by_line(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    shutil.copy(FILES[0], root / "good.flac")
    shutil.copy(FILES[1], tmp_path / "outside.flac")
    (root / "link.flac").symlink_to(tmp_path / "outside.flac")
    paths = ["good.flac", "../outside.flac", str(FILES[0]), "absent.flac", "", "link.flac"]
    (root / "metadata.csv").write_text("file_name,text\n" + "".join(f"{p},hi\n" for p in paths))
    found = scan_tables(root, {})
    assert [clip.out for clip in found.clips] == ["good.flac"]
    assert [(origin, reason.split(" ", 1)[1]) for origin, reason in found.rejects] == [
        ("metadata.csv:3", "leads out of its folder"),
        ("metadata.csv:4", "is an absolute path"),
        ("metadata.csv:5", "is not a file"),
        ("metadata.csv:6", "is not the path of a file"),
        ("metadata.csv:7", "is a link that leads out of the input"),
    ]


def test_columns_are_named_or_guessed(tmp_path: Path) -> None:
    shutil.copy(FILES[0], tmp_path / "a.flac")
    (tmp_path / "list.csv").write_text("clip,words,when\na.flac,hello,now\n")
    with pytest.raises(DataError, match="(?s)no column of audio; it has clip, words, when.*hint"):
        scan_tables(tmp_path / "list.csv", {})
    with pytest.raises(DataError, match="no column nope"):
        scan_tables(tmp_path / "list.csv", parse_columns("audio=nope"))
    (clip,) = scan_tables(tmp_path / "list.csv", parse_columns("audio=clip, text=words")).clips
    assert clip.transcript == "hello" and clip.split == ""
    for wrong in ("txt=words", "text", "text="):
        with pytest.raises(ConfigError, match="is not MEANING=NAME"):
            parse_columns(wrong)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"[[1]]"), ("a.json", b'[{"path": '), ("a.jsonl", b"{}\n[1]\n"),
        ("a.csv", b""), ("a.parquet", b"PAR1 and so on"),
        ("a.tsv", b"\xff\xfe\n"), ("a.json", b"[" * 100_000),
    ],
)  # fmt: skip
def test_tables_that_are_none_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        scan_tables(tmp_path / name, {})


def test_a_parquet_column_that_is_not_audio_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"audio": ["a.wav"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column audio is string, not {bytes, path}"):
        scan_tables(tmp_path, {})


def test_a_damaged_page_costs_the_rows_behind_it(tmp_path: Path) -> None:
    """Zeros over the audio of the first row group of two: its rows are rejected, no others."""
    file = tmp_path / "in/x.parquet"
    save_parquet(file, [{"audio": audio(path)} for path in FILES[:4]], group=2)
    column = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0)
    assert column.path_in_schema == "audio.bytes"
    raw = bytearray(file.read_bytes())
    first = column.dictionary_page_offset or column.data_page_offset
    raw[first : first + 40] = bytes(40)
    file.write_bytes(raw)
    done = run(tmp_path / "in", tmp_path / "out", max_rejects=2)
    assert (done.num_files, done.num_rejected) == (2, 2)
    assert "this part of the table is damaged" in (tmp_path / "out/rejected.tsv").read_text()
