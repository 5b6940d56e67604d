"""Sources of text: tables, the layouts of real data sets, the hub; validation apart by document."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.data import documents, hub
from paceline.data.base import TextData
from paceline.data.documents import find_source, iter_documents, iter_file
from paceline.data.text import open_tokens, prepare_tokens
from paceline.data.tokenizer import BYTE_END
from paceline.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settings(source: Path | str, tmp_path: Path, **more: Any) -> TextData:
    given: dict[str, Any] = {"source": str(source), "cache_dir": str(tmp_path / "cache")}
    return TextData.model_validate(given | {"seq_len": 4} | more)


def quiet(text: str) -> None:
    del text


def write_table(path: Path, texts: list[Any], column: str = "text") -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": range(len(texts)), column: pyarrow.array(texts)})
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    return path


def stories(first: int, last: int) -> list[str]:
    return [f"story {n} of a fox" for n in range(first, last)]


def tiny_stories(folder: Path) -> Path:
    """The layout of roneneldan/TinyStories, with the files that lie beside its tables."""
    write_table(folder / "data/train-00000-of-00002-2d5a.parquet", stories(0, 10))
    write_table(folder / "data/train-00001-of-00002-5f1f.parquet", stories(10, 20))
    write_table(folder / "data/validation-00000-of-00001-869c.parquet", stories(18, 24))
    (folder / "README.md").write_text("about it")
    (folder / "TinyStories-train.txt").write_text("the same again")
    return folder


def read(data: TextData, split: str) -> list[str]:
    """The documents of a split, as its shards have them."""
    home, _ = prepare_tokens(data, quiet)
    found = open_tokens(home, data, split)
    assert found is not None
    tokens = np.concatenate(found.parts)
    parts = np.split(tokens, np.flatnonzero(tokens == BYTE_END) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]


def test_a_folder_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for source in ("mine", "./mine", str(tmp_path / "mine")):
        (file,) = find_source(settings(source, tmp_path)).files
        assert file.path.read_text() == "text"


def test_a_data_set_of_tables_brings_its_own_validation(tmp_path: Path) -> None:
    """Stories 18 and 19 stand in both: they are left out of training, and that is said."""
    data, said = settings(tiny_stories(tmp_path / "set"), tmp_path), list[str]()
    prepare_tokens(data, said.append)
    assert read(data, "val") == stories(18, 24)
    assert read(data, "train") == stories(0, 18)
    assert any("validation is the source's own: 1 of the files" in text for text in said)
    assert any("2 documents are left out" in text for text in said)


def test_fineweb_has_no_split_and_gets_one_by_hash(tmp_path: Path) -> None:
    folder = tmp_path / "fineweb-edu"
    for number in range(3):
        rows = stories(number * 50, number * 50 + 50)
        write_table(folder / f"sample/10BT/{number:03d}_00000.parquet", rows)
    data = settings(folder, tmp_path, val_fraction=0.2)
    train, val = read(data, "train"), read(data, "val")
    assert sorted(train + val) == sorted(stories(0, 150)) and 10 < len(val) < 60
    one = settings(folder, tmp_path, max_files=1, val_fraction=0.0)
    assert read(one, "train") == stories(0, 50)


def test_what_datasets_saved_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": stories(0, 12), "n": list(range(12))})
    both = datasets.DatasetDict(
        {"train": rows.select(range(2, 12)).shuffle(seed=1), "test": rows.select([1]),
         "validation": rows.select([0])}
    )  # fmt: skip
    both.save_to_disk(tmp_path / "dict", num_shards={"train": 2, "test": 1, "validation": 1})
    data = settings(tmp_path / "dict", tmp_path)
    assert read(data, "train") == both["train"]["text"][:], "in the order that it was saved in"
    assert read(data, "val") == ["story 0 of a fox"]
    rows.save_to_disk(tmp_path / "one")
    assert read(settings(tmp_path / "one", tmp_path, val_fraction=0.0), "train") == stories(0, 12)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", stories(0, 3), column="content")
    with pytest.raises(DataError, match="no column 'text'; it has id, content"):
        prepare_tokens(settings(file, tmp_path), quiet)
    prepare_tokens(settings(file, tmp_path, text_field="content"), quiet)


@pytest.mark.parametrize("row", [None, 5])
def test_a_row_without_text_is_named(row: Any, tmp_path: Path) -> None:
    texts = [row] * 5 if row else [*stories(0, 4), None]
    file = write_table(tmp_path / "a.parquet", texts)
    with pytest.raises(DataError, match=r"a.parquet: row \d has no text in 'text'"):
        prepare_tokens(settings(file, tmp_path), quiet)


def break_footer(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def break_page(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4:400] = bytes(396)
    path.write_bytes(raw)


def be_text(path: Path) -> None:
    path.write_text("no table")


@pytest.mark.parametrize("damage", [break_footer, break_page, be_text])
def test_a_damaged_table_ends_the_run(damage: Callable[[Path], None], tmp_path: Path) -> None:
    file = write_table(tmp_path / "a.parquet", stories(0, 100))
    damage(file)
    with pytest.raises(DataError, match="a.parquet cannot be read"):
        prepare_tokens(settings(file, tmp_path), quiet)
    assert not list((tmp_path / "cache" / "tokens").glob("a-*/")), "half-made shards are left"
    arrow = tmp_path / "b.arrow"
    arrow.write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match="b.arrow cannot be read"):
        prepare_tokens(settings(arrow, tmp_path), quiet)


def test_long_documents_are_cut_between_words(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 32)
    file = tmp_path / "a.txt"
    text = "one two three four five six seven eight nine ten\neleven " + "ü" * 40
    file.write_text(text)
    pieces = [piece.decode() for piece in iter_file(file, "text", between_words=True)]
    assert "".join(pieces) == text and all(len(piece.encode()) <= 32 for piece in pieces)
    assert pieces[:2] == ["one two three four five six", " seven eight nine ten\n"]
    assert b"".join(iter_file(file, "text", between_words=False)) == text.encode()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    rows = [piece.decode() for piece in iter_file(tmp_path / "rows.jsonl", "text", True)]
    assert rows == pieces


class FakeHub:
    """A hub with one data set, and a log of what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()

    def HfApi(self) -> "FakeHub":
        return self

    def dataset_info(self, name: str, revision: str) -> Any:
        self.asked.append(f"info {name} {revision}")
        return SimpleNamespace(sha=COMMIT)

    def list_repo_files(self, name: str, revision: str, repo_type: str) -> list[str]:
        assert (revision, repo_type) == (COMMIT, "dataset")
        return [str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()]

    def hf_hub_download(self, name: str, file: str, revision: str, repo_type: str) -> str:
        assert (revision, repo_type) == (COMMIT, "dataset")
        self.asked.append(f"download {file}")
        return str(self.folder / file)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: Any) -> FakeHub:
    made = FakeHub(tiny_stories(tmp_path / "there"))
    monkeypatch.setattr(hub, "require_extra", lambda name, extra: made)
    return made


def test_a_name_of_the_hub_is_pinned(fake_hub: FakeHub, tmp_path: Path) -> None:
    data = settings("roneneldan/TinyStories", tmp_path)
    _, manifest = prepare_tokens(data, quiet)
    assert manifest.revision == COMMIT and read(data, "val") == stories(18, 24)
    assert fake_hub.asked[0] == "info roneneldan/TinyStories main"
    assert not any("README" in text or ".txt" in text for text in fake_hub.asked)


def test_a_pinned_set_that_is_prepared_needs_no_network(fake_hub: FakeHub, tmp_path: Path) -> None:
    data = settings(f"hf://datasets/roneneldan/TinyStories@{COMMIT}/data", tmp_path, max_files=1)
    first = prepare_tokens(data, quiet)
    assert [word for word in fake_hub.asked if "train" in word] == [
        "download data/train-00000-of-00002-2d5a.parquet"
    ]
    fake_hub.asked.clear()
    assert prepare_tokens(data, pytest.fail) == first and not fake_hub.asked


def test_without_a_network_the_name_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def offline(name: str, extra: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise ConnectionError("no route to host")

        return SimpleNamespace(HfApi=lambda: SimpleNamespace(dataset_info=fail))

    monkeypatch.setattr(hub, "require_extra", offline)
    with pytest.raises(DataError, match="org/name@main.*cannot be had from the hub: no route"):
        prepare_tokens(settings("org/name", tmp_path), quiet)


def test_a_folder_here_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    write_table(tmp_path / "org/name/a.parquet", stories(0, 3))
    monkeypatch.chdir(tmp_path)
    source = find_source(settings("org/name", tmp_path))
    assert [d.text.decode() for d in iter_documents(source.files, "text", False)] == stories(0, 3)
