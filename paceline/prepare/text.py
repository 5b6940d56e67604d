"""Text to a folder of token shards, which any run may read: `paceline prepare text`.

    prepare_text(asked, out, say)    shards, tokenizer.json, manifest.json in `out`: all or nothing

`data.source=OUT` reads them. With `train_bpe` a tokenizer is made of the source first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.base import TextData
from paceline.data.documents import Source, find_source, iter_documents
from paceline.data.extras import require_extra
from paceline.data.shards import MANIFEST, Manifest, choose_splits, verify_shards
from paceline.data.text import build_tokens, find_prepared, made_from
from paceline.data.tokenizer import Tokenizer, find_tokenizer, of_library
from paceline.errors import ConfigError

END = "<|endoftext|>"
FEWEST = 257  # every byte, and the end
TRAINED_BYTES = 1 << 29  # of text are enough to learn merges from


@dataclass(frozen=True)
class TextRequest:
    """What `paceline prepare text` was asked for."""

    data: TextData
    train_bpe: int | None
    workers: int | None


def prepare_text(asked: TextRequest, out: Path, say: Callable[[str], None]) -> Manifest:
    """Tokenise a source into `out`. Shards that are there already, of the same source read in the
    same way, are checked and kept."""
    _require_possible(asked, out)
    source = find_source(asked.data)
    source.require_text()
    tokenizer = _choose_tokenizer(asked, source, say)
    if not (out / MANIFEST).is_file():
        build_tokens(out, asked.data, source, tokenizer, say, asked.workers)
    manifest = Manifest.load(out / MANIFEST)
    if manifest.made_from != made_from(asked.data, source, tokenizer):
        raise ConfigError(
            f"{out} holds shards of {manifest.source}, made with another tokenizer, or from what"
            " has changed since\nhint: choose another --out, or delete that folder"
        )
    verify_shards(out, manifest, say)
    return manifest


def _require_possible(asked: TextRequest, out: Path) -> None:
    problems = []
    if asked.data.source == "synthetic":
        problems.append("synthetic tokens are drawn while training: there is nothing to prepare")
    if find_prepared(asked.data) is not None:
        problems.append(f"{asked.data.source} is prepared already\nhint: data.source takes it")
    if asked.train_bpe is not None and asked.data.tokenizer != "auto":
        problems.append(
            f"--train-bpe makes a tokenizer, and --tokenizer {asked.data.tokenizer} is one\n"
            "hint: give one of the two"
        )
    if asked.train_bpe is not None and asked.train_bpe < FEWEST:
        problems.append(
            f"--train-bpe {asked.train_bpe}: a vocabulary has {FEWEST} tokens or more, for every"
            " byte and the end of a document"
        )
    is_free = not out.exists() or (out / MANIFEST).is_file()
    if not is_free and not (out.is_dir() and not any(out.iterdir())):
        problems.append(f"{out} exists and holds no token shards\nhint: choose another --out")
    if problems:
        raise ConfigError(problems)


def _choose_tokenizer(asked: TextRequest, source: Source, say: Callable[[str], None]) -> Tokenizer:
    if asked.train_bpe is None:
        return find_tokenizer(asked.data.tokenizer)
    say(f"learning {asked.train_bpe} tokens from {source.name}")
    return train_bpe(_training_texts(asked.data, source), asked.train_bpe)


def _training_texts(data: TextData, source: Source) -> Iterator[str]:
    """Yield the training documents: a tokenizer that has seen validation would flatter it."""
    documents = iter_documents(source.files, data.text_field, between_words=True)
    seen = 0
    for text, (split, num_bytes) in choose_splits(documents, data.val_fraction):
        if split == "train":
            seen += num_bytes
            yield text.decode(errors="replace")
        if seen >= TRAINED_BYTES:
            return


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` tokens; any text can be written in it."""
    library = require_extra("tokenizers", "text")
    byte_level: Any = library.pre_tokenizers.ByteLevel
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = byte_level(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    found = of_library(made, f"bpe-{vocab_size}", END)
    if found.vocab_size < vocab_size:
        raise ConfigError(
            f"--train-bpe {vocab_size}: the source has merges for {found.vocab_size} tokens only\n"
            f"hint: ask for {found.vocab_size} or fewer, or give it more text"
        )
    return found
