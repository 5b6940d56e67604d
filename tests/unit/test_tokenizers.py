"""Tokenizers: ids as the library gives them, an end behind each document, and a model that fits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.base import TextData
from paceline.data.shards import MANIFEST, Manifest
from paceline.data.text import open_tokens, prepare_tokens
from paceline.data.tokenizer import BYTES, FILE, Tokenizer, encode_documents, find_tokenizer
from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.prepare.text import END, TextRequest, prepare_text, train_bpe
from tests.machines import plan

TEXTS = [
    f"Story {n}: the quick brown fox sees über-lazy dogs, {n * n} of them.\n" for n in range(80)
]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(iter(TEXTS), 300)


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(tokenizer.definition)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rows(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def quiet(text: str) -> None:
    del text


def text_data(tmp_path: Path, place: Path, **more: Any) -> TextData:
    settings: dict[str, Any] = {
        "source": str(place),
        "seq_len": 16,
        "cache_dir": str(tmp_path / "cache"),
    }
    return TextData.model_validate(settings | more)


def decode(tokenizer: Tokenizer, ids: Any) -> str:
    text: str = tokenizer._library.decode(list(ids), skip_special_tokens=False)
    return text


def test_any_text_comes_back(bpe: Tokenizer) -> None:
    strange = ["", "naïve 東京 \U0001f600\ttabs\r\n", "x" * 500]
    for text, ids in zip(strange, bpe.encode([t.encode() for t in strange]), strict=True):
        assert ids.dtype == np.uint16 and ids[-1] == bpe.end_id
        assert decode(bpe, ids) == text + END


def test_workers_give_the_same_tokens_in_order(bpe: Tokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.data.tokenizer.CHUNK_BYTES", 600)
    documents = [(text.encode(), number) for number, text in enumerate(TEXTS)]
    alone = list(encode_documents(documents, bpe, 1))
    shared = list(encode_documents(documents, bpe, 2))
    assert [mark for mark, _ in shared] == list(range(len(TEXTS)))
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(alone, shared, strict=True))


def test_a_file_and_its_folder_are_one_tokenizer(bpe: Tokenizer, tmp_path: Path) -> None:
    folder = save(tmp_path / "tok", bpe)
    by_file, by_folder = find_tokenizer(str(folder / FILE)), find_tokenizer(str(folder))
    assert by_file.sha256 == by_folder.sha256 == bpe.sha256
    assert by_file.end_id == bpe.end_id and by_file.vocab_size == 300
    body = json.loads(bpe.definition)
    body["model"]["merges"] = body["model"]["merges"][:-1]
    (folder / FILE).write_text(json.dumps(body))
    assert find_tokenizer(str(folder)).sha256 != bpe.sha256


def test_the_end_is_what_the_folder_says(bpe: Tokenizer, tmp_path: Path) -> None:
    said = save(tmp_path / "a", bpe, eos_token={"content": "!"})
    assert find_tokenizer(str(said)).end_id == bpe._library.token_to_id("!")
    model = save(tmp_path / "b", bpe)
    (model / "config.json").write_text('{"eos_token_id": [5, 6]}')
    assert find_tokenizer(str(model)).end_id == 5
    nameless = tmp_path / "c"
    save(nameless, bpe)
    text = (nameless / FILE).read_text().replace(END, "<|pad|>")
    (nameless / FILE).write_text(text)
    found = find_tokenizer(str(nameless))
    assert (found.end_id, found.vocab_size, found.names_end) == (300, 301, False)


def test_what_the_tokenizer_adds_itself_is_kept(bpe: Tokenizer, tmp_path: Path) -> None:
    """As LLaMA's begins a text: the template is the tokenizer's own. Padding and truncation, which
    a tokenizer.json may ask for, are not for documents."""
    body = json.loads(bpe.definition)
    mark, text = (
        {"SpecialToken": {"id": END, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    body["post_processor"] = {
        "type": "TemplateProcessing", "single": [mark, text, mark],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [bpe.end_id], "tokens": [END]}},
    }  # fmt: skip
    body["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    folder = tmp_path / "tok"
    save(folder, bpe)
    (folder / FILE).write_text(json.dumps(body))
    (ids,) = find_tokenizer(str(folder)).encode([b"Story of a fox"])
    assert decode(bpe, ids) == f"{END}Story of a fox{END}"


def test_older_layouts_are_read_by_transformers(bpe: Tokenizer, tmp_path: Path) -> None:
    body = json.loads(bpe.definition)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(body["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in body["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    found = find_tokenizer(str(tmp_path))
    assert np.array_equal(*(t.encode([b"the quick brown fox"])[0] for t in (found, bpe)))


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_a_damaged_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(DataError, match="not a tokenizer"):
        find_tokenizer(str(file))


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/such/tokenizer.json"])
def test_a_missing_tokenizer_is_named(name: str) -> None:
    with pytest.raises(DataError, match=f"data.tokenizer={name} is neither"):
        find_tokenizer(name)


def test_shards_keep_the_tokenizer(bpe: Tokenizer, tmp_path: Path) -> None:
    settings = text_data(tmp_path, rows(tmp_path / "a.jsonl"), val_fraction=0.2)
    home, manifest = prepare_tokens(settings, quiet, bpe)
    assert manifest.tokenizer_sha256 == bpe.sha256 and manifest.dtype == "<u2"
    assert find_tokenizer(str(home)).sha256 == bpe.sha256
    train = open_tokens(home, settings, "train")
    assert train is not None
    text = decode(bpe, np.concatenate(train.parts))
    assert set(text.split(END)[:-1]) < set(TEXTS)
    assert manifest.bytes_per_token("val") == pytest.approx(2, rel=0.5)
    other = train_bpe(iter(TEXTS), 290)
    assert prepare_tokens(settings, quiet, other)[0] != home


def test_a_large_vocabulary_takes_four_bytes() -> None:
    assert Tokenizer("n", "{}", 65_535, 65_536).dtype == np.uint16
    assert Tokenizer("n", "{}", 65_536, 65_537).dtype == np.uint32
    assert BYTES.dtype == np.uint16


def test_prepared_shards_are_a_source(tmp_path: Path) -> None:
    source, out = rows(tmp_path / "a.jsonl"), tmp_path / "shards"
    asked = TextRequest(text_data(tmp_path, source), 300, None)
    made = prepare_text(asked, out, quiet)
    assert prepare_text(asked, out, quiet) == made, "the same words find them done"
    assert not list(tmp_path.glob("shards.lock")) and not list(tmp_path.glob(".shards*"))
    home, manifest = prepare_tokens(text_data(tmp_path, out), pytest.fail)
    assert home == out and manifest == Manifest.load(out / MANIFEST)
    halved = text_data(tmp_path, source, val_fraction=0.5)
    for wrong in (
        TextRequest(text_data(tmp_path, source), 290, None),
        TextRequest(halved, 300, None),
    ):
        with pytest.raises(ConfigError, match="holds shards of"):
            prepare_text(wrong, out, quiet)


def test_validation_is_not_learnt_from(tmp_path: Path) -> None:
    """A document of the validation split has letters that no other has: were it read, they would be
    merged into a token."""
    odd = "ŁŁŁŁ" * 200
    texts = [*TEXTS, *(f"{odd} {n}" for n in range(30))]
    source = rows(tmp_path / "a.jsonl", texts)
    settings = text_data(tmp_path, source, val_fraction=0.0)
    learnt = json.loads((_prepare(settings, tmp_path / "all") / FILE).read_text())["model"]["vocab"]
    assert any(len(token) > 7 and token.count("Å") > 2 for token in learnt)
    parts = {"train": TEXTS, "validation": texts[len(TEXTS) :]}
    folder = tmp_path / "tables"
    for split, part in parts.items():
        write_table(folder / f"{split}-00000-of-00001.parquet", part)
    settings = text_data(tmp_path, folder)
    learnt = json.loads((_prepare(settings, tmp_path / "own") / FILE).read_text())["model"]["vocab"]
    assert not any(token.count("Å") > 2 for token in learnt)


def _prepare(settings: TextData, out: Path) -> Path:
    prepare_text(TextRequest(settings, 300, 1), out, quiet)
    return out


def write_table(path: Path, texts: list[str], column: str = "text") -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({column: texts, "n": range(len(texts))}), path)
    return path


@pytest.mark.parametrize(
    "asked, more, said",
    [
        ({"source": "synthetic"}, None, "nothing to prepare"),
        ({"tokenizer": "bytes"}, 300, "give one of the two"),
        ({}, 256, "257 tokens or more"),
        ({}, 100_000, "has merges for [0-9]+ tokens only"),
    ],
)
def test_what_cannot_be_prepared_is_said(
    asked: dict[str, Any], more: int | None, said: str, tmp_path: Path
) -> None:
    source = rows(tmp_path / "a.jsonl", TEXTS[:3])
    with pytest.raises(ConfigError, match=said):
        prepare_text(
            TextRequest(text_data(tmp_path, source, **asked), more, None), tmp_path / "o", quiet
        )
    assert not (tmp_path / "o").exists()


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine.txt").write_text("precious")
    source = rows(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="holds no token shards"):
        prepare_text(TextRequest(text_data(tmp_path, source), None, None), tmp_path / "o", quiet)


def lm_problems(*overrides: str, source: str = "lm_tiny") -> list[str]:
    found = plan(*overrides, source=source).problems()
    return [str(problem) for problem in found]


def test_a_model_with_too_few_rows_is_refused_before_launch(bpe: Tokenizer, tmp_path: Path) -> None:
    folder = save(tmp_path / "tok", bpe)
    asked = [f"data.tokenizer={folder}", "model.vocab_size=299"]
    (problem,) = lm_problems(*asked)
    assert "299 rows cannot hold" in problem and "model.vocab_size=300 or more" in problem
    assert not lm_problems(f"data.tokenizer={folder}", "model.vocab_size=300")
    (problem,) = lm_problems("model.vocab_size=200")
    assert "200 rows cannot hold byte tokens, which need 257" in problem
    job = load_job("lm_tiny", [*asked, f"data.source={rows(tmp_path / 'a.jsonl')}",
                               f"data.cache_dir={tmp_path}"])  # fmt: skip
    with pytest.raises(ConfigError, match="299 rows cannot hold"):
        job.workload.prepare(job.config, quiet)


def test_prepared_shards_bring_their_vocabulary(tmp_path: Path) -> None:
    out = _prepare(text_data(tmp_path, rows(tmp_path / "a.jsonl")), tmp_path / "shards")
    (problem,) = lm_problems(f"data.source={out}", "model.vocab_size=299")
    assert "299 rows cannot hold the ids of bpe-300, which need 300" in problem
    asked = [f"data.source={out}", "data.tokenizer=bytes"]
    job = load_job("lm_tiny", asked)
    with pytest.raises(ConfigError, match="the same numbers stand for other tokens"):
        job.workload.prepare(job.config, quiet)
    job = load_job("lm_tiny", [f"data.source={out}"])
    facts = job.workload.prepare(job.config, quiet)
    assert facts["tokenizer"] == str(out / FILE) and "unigram_entropy" not in facts


def hf_folder(folder: Path, tokenizer: Tokenizer | None, vocab_size: int = 320) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=vocab_size, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder if tokenizer is None else save(folder, tokenizer)


def test_causal_lm_takes_the_tokenizer_of_its_model(bpe: Tokenizer, tmp_path: Path) -> None:
    folder, source = hf_folder(tmp_path / "model", bpe), rows(tmp_path / "a.jsonl")
    asked = [f"model.hf={folder}", f"data.source={source}", f"data.cache_dir={tmp_path}",
             "data.seq_len=16"]  # fmt: skip
    job = load_job("causal_lm", asked)
    facts = job.workload.prepare(job.config, quiet)
    assert facts["tokenizer_sha256"] == bpe.sha256
    job.workload.prepared = facts
    data = job.workload.build_data(job.config, "train")
    assert data is not None and decode(bpe, data[0]["tokens"].tolist()).startswith("Story")
    few = rows(tmp_path / "few.jsonl", [text[::-1] for text in TEXTS])
    other = _prepare(text_data(tmp_path, few), tmp_path / "other")
    job = load_job("causal_lm", [*asked, f"data.source={other}"])
    assert Manifest.load(other / MANIFEST).tokenizer_sha256 != bpe.sha256
    with pytest.raises(ConfigError, match="stand for other tokens"):
        job.workload.prepare(job.config, quiet)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(bpe: Tokenizer, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", bpe, vocab_size=299)
    (problem,) = lm_problems(f"model.hf={folder}", "data.source=stdlib", "data.seq_len=16",
                             source="causal_lm")  # fmt: skip
    assert "299 rows cannot hold" in problem and "which need 300" in problem
