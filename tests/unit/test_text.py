"""Text to token shards: nothing lost, documents apart, train and validation apart."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.data.base import TextData
from paceline.data.documents import list_files
from paceline.data.shards import unigram_entropy
from paceline.data.text import open_tokens, prepare_tokens
from paceline.data.tokenizer import BYTE_END
from paceline.errors import DataError


def data(source: Path | str, tmp_path: Path, **more: object) -> TextData:
    settings = {"source": str(source), "cache_dir": str(tmp_path / "cache"), "seq_len": 32}
    return TextData.model_validate(settings | more)


def quiet(text: str) -> None:
    del text


def documents(tokens: np.ndarray) -> list[bytes]:
    ends = np.flatnonzero(tokens == BYTE_END)
    starts = [0, *(ends[:-1] + 1)]
    return [tokens[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends, strict=True)]


def test_every_document_comes_back_and_belongs_to_one_split(corpus: Path, tmp_path: Path) -> None:
    settings = data(corpus, tmp_path, val_fraction=0.3)
    home, manifest = prepare_tokens(settings, quiet)
    train, val = (open_tokens(home, settings, split) for split in ("train", "val"))
    assert train is not None and val is not None
    found = [documents(np.concatenate(split.parts)) for split in (train, val)]
    assert found[0] and found[1] and not set(found[0]) & set(found[1])
    assert sorted(found[0] + found[1]) == sorted(p.read_bytes() for p in corpus.iterdir())
    assert manifest.num_documents == 40
    assert manifest.num_tokens == sum(p.stat().st_size + 1 for p in corpus.iterdir())


def test_samples_overlap_by_the_token_to_predict(corpus: Path, tmp_path: Path) -> None:
    settings = data(corpus, tmp_path)
    home, _ = prepare_tokens(settings, quiet)
    train = open_tokens(home, settings, "train")
    assert train is not None
    stream = np.concatenate(train.parts)
    for index in (0, 1, len(train) - 1):
        expected = stream[index * 32 : index * 32 + 33]
        assert train[index]["tokens"].tolist() == expected.tolist()
    batch = train.batch(np.array([3, 1]))["tokens"]
    assert batch.shape == (2, 33) and batch[1].tolist() == train[1]["tokens"].tolist()


def test_jsonl_rows_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"body": f"row {n}"}) + "\n" for n in range(50)))
    settings = data(file, tmp_path, text_field="body", val_fraction=0.0)
    assert prepare_tokens(settings, quiet)[1].num_documents == 50


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(DataError, match="rows.jsonl:2 is not a JSON row"):
        prepare_tokens(data(file, tmp_path), quiet)
    assert not list((tmp_path / "cache" / "tokens").glob("rows*/")), "half-made shards are left"


def test_shards_are_made_once_and_again_when_a_file_changes(corpus: Path, tmp_path: Path) -> None:
    settings, said = data(corpus, tmp_path), list[str]()
    first = prepare_tokens(settings, said.append)
    assert said
    assert prepare_tokens(settings, pytest.fail) == first
    (corpus / "99.txt").write_text("one more document")
    assert prepare_tokens(settings, quiet)[1].fingerprint != first[1].fingerprint


def test_max_files_and_the_standard_library(tmp_path: Path) -> None:
    files = list_files(data("stdlib", tmp_path, max_files=5))
    assert len(files) == 5 and all(file.path.suffix == ".py" for file in files)
    every = [file.path for file in list_files(data("stdlib", tmp_path))]
    assert not any("site-packages" in path.parts for path in every)
    assert sum(path.stat().st_size for path in every) > 5_000_000


def test_a_damaged_shard_is_refused(corpus: Path, tmp_path: Path) -> None:
    settings = data(corpus, tmp_path)
    home, _ = prepare_tokens(settings, quiet)
    shard = home / "train_00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(DataError, match="its manifest says"):
        open_tokens(home, settings, "train")
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match="not what its manifest says"):
        prepare_tokens(settings, quiet)


def test_validation_gets_its_fraction_and_keeps_it_when_rows_are_added(tmp_path: Path) -> None:
    """A tenth of 400 rows by their hash: 40, with a standard deviation of 6."""
    file, found = tmp_path / "rows.jsonl", []
    for number in (400, 500):
        lines = [json.dumps({"text": f"row {n}"}) + "\n" for n in reversed(range(number))]
        file.write_text("".join(lines))
        settings = data(file, tmp_path, val_fraction=0.1, seq_len=4)
        home, _ = prepare_tokens(settings, quiet)
        val = open_tokens(home, settings, "val")
        assert val is not None
        found.append(set(documents(np.concatenate(val.parts))))
    assert 16 < len(found[0]) < 64 and found[0] <= found[1]


def test_one_large_file_has_a_validation_part(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    file.write_text("".join(f"line {number} of many\n" for number in range(500_000)))
    settings = data(file, tmp_path, val_fraction=0.3)
    home, _ = prepare_tokens(settings, quiet)
    assert open_tokens(home, settings, "train") and open_tokens(home, settings, "val")


def test_our_own_run_records_are_no_text(corpus: Path, tmp_path: Path) -> None:
    run = corpus / "runs" / "a"
    run.mkdir(parents=True)
    for name in ("run.yaml", "train.log.txt", "heartbeat_rank0.jsonl"):
        (run / name).write_text("not json")
    assert len(list_files(data(corpus, tmp_path))) == 40


def test_a_cache_that_cannot_be_written_is_named(corpus: Path) -> None:
    settings = TextData(source=str(corpus), cache_dir="/proc/nope")
    with pytest.raises(DataError, match="data.cache_dir=/proc/nope"):
        prepare_tokens(settings, quiet)


@pytest.mark.parametrize("source", ["/no/such/place", "nowhere"])
def test_a_missing_source_is_named(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=source):
        prepare_tokens(data(source, tmp_path), quiet)


def test_entropy_of_known_counts() -> None:
    # Four equally likely tokens: log 4 nats. One token: 0.
    assert unigram_entropy(np.array([5, 5, 5, 5])) == pytest.approx(np.log(4))
    assert unigram_entropy(np.array([9, 0])) == 0


BINARY = {
    "model.safetensors": b"\x40\0\0\0\0\0\0\0" + b'{"w":{"dtype":"F32"}}' + b"\0" * 99,
    "weights.pt": b"words that look like text",  # by its suffix
    "picture.txt": bytes(range(128, 256)) * 20,  # neither text nor UTF-8
    "wide.txt": "words in two bytes a letter".encode("utf-16"),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_binary_file_is_not_text(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(BINARY[name])
    with pytest.raises(DataError, match=name) as caught:
        prepare_tokens(data(file, tmp_path), quiet)
    assert "UTF-8" in str(caught.value) and not (tmp_path / "cache").exists()


def test_a_folder_names_the_binary_files_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"good{number}.txt").write_text("words " * 50)
    (folder / "model.safetensors").write_bytes(b"\0" * 99)  # not looked at: no suffix of a text
    prepare_tokens(data(folder, tmp_path), quiet)
    for name in ("picture.txt", "wide.txt"):
        (folder / name).write_bytes(BINARY[name])
    with pytest.raises(DataError, match="(?s)picture.txt.*wide.txt"):
        prepare_tokens(data(folder, tmp_path), quiet)


def test_old_encodings_pass(tmp_path: Path) -> None:
    """A token is a byte: a few that are not UTF-8 do no harm."""
    (tmp_path / "old.txt").write_bytes(
        "Ein Käse für Jörg und viele Wörter mehr. ".encode("latin-1") * 20
    )
    prepare_tokens(data(tmp_path / "old.txt", tmp_path), quiet)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../train_00000.bin"}, {"file": "/etc/hostname"}, {"file": ""}, {"split": "x"},
        {"num_tokens": -1}, {"num_tokens": 0}, {"num_tokens": 10**30}, {"sha256": None},
    ],
)  # fmt: skip
def test_a_manifest_of_shards_that_cannot_be_is_damaged(
    corpus: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    home, _ = prepare_tokens(data(corpus, tmp_path), quiet)
    body = json.loads((home / "manifest.json").read_text())
    body["shards"][0] |= change
    (home / "manifest.json").write_text(json.dumps(body))
    for read in (
        lambda: prepare_tokens(data(corpus, tmp_path), quiet),
        lambda: open_tokens(home, data(corpus, tmp_path), "train"),
    ):
        with pytest.raises(DataError, match="manifest"):
            read()


def test_what_is_not_a_file_is_no_text(tmp_path: Path) -> None:
    """A FIFO in a folder of texts: to open it would be to wait without end."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    os.mkfifo(folder / "b.txt")
    assert list_files(data(folder, tmp_path)) == [(folder / "a.txt", None)]
    (folder / "c.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match="c.jsonl:1 is not a JSON row"):
        prepare_tokens(data(folder, tmp_path), quiet)
