"""Turns text into token ids: bytes, or any tokenizer of `tokenizers` or `transformers`.

    find_tokenizer("bytes")                  257 ids: the bytes, and the end of a document
    find_tokenizer("gpt2/tokenizer.json")    or the folder that holds it, or ORG/NAME
    encode_documents(documents, tokenizer, workers)

A tokenizer is data, its own JSON: nothing is unpickled, and no code that comes with it is run.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.extras import require_extra
from paceline.data.hub import SHORT, download_model_files
from paceline.errors import DataError, LoaderError
from paceline.machine.process import die_with_parent
from paceline.records.base import DAMAGED
from paceline.records.files import read_text

BYTE_END = 256
FILE = "tokenizer.json"
MAX_FILE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 19  # of text that is encoded in one call: small enough to share out evenly
AHEAD = 3  # chunks that each worker has, waits for or has done
# What a folder may hold that transformers makes a tokenizer of.
FILES = (FILE, "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
         "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")  # fmt: skip
# Names of the token behind a text, where nothing beside the vocabulary says which it is.
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
Tokens = NDArray[np.unsignedinteger[Any]]
Mark = TypeVar("Mark")  # what a caller wants back with the tokens of a document


@dataclass(frozen=True)
class Tokenizer:
    """`definition` is the tokenizer's JSON, "" for bytes; `end_id` stands behind every document."""

    name: str
    definition: str
    end_id: int
    vocab_size: int  # ids are less than it, the end's too
    names_end: bool = True  # False: the tokenizer has no such token, and `end_id` is a new one

    @property
    def is_bytes(self) -> bool:
        return not self.definition

    @cached_property
    def sha256(self) -> str:
        """Return a sum over all that decides which ids a text has; "bytes" for bytes."""
        if self.is_bytes:
            return "bytes"
        body = json.loads(self.definition)
        kept = {k: v for k, v in body.items() if k not in ("version", "truncation", "padding")}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, documents: list[bytes]) -> list[Tokens]:
        """Return the ids of each document, with the end behind them."""
        if self.is_bytes:
            ends = bytes([0])
            found = [np.frombuffer(text + ends, np.uint8).astype(self.dtype) for text in documents]
            for tokens in found:
                tokens[-1] = BYTE_END
            return list(found)
        texts = [text.decode(errors="replace") for text in documents]
        encoded = self._library.encode_batch_fast(texts)
        return [self._ended(item.ids) for item in encoded]

    def _ended(self, ids: list[int]) -> Tokens:
        if not ids or ids[-1] != self.end_id:  # some add it themselves
            ids.append(self.end_id)
        return np.array(ids, dtype=self.dtype)

    @cached_property
    def _library(self) -> Any:
        found = parse_definition(self.definition, self.name)
        found.no_padding()
        found.no_truncation()
        return found


BYTES = Tokenizer("bytes", "", BYTE_END, BYTE_END + 1)


def find_tokenizer(asked: str, beside: Path | None = None) -> Tokenizer:
    """Load what `data.tokenizer` names. auto is what the folder `beside` holds, else bytes."""
    if asked == "bytes" or (asked == "auto" and (beside is None or not holds_tokenizer(beside))):
        return BYTES
    place = beside if asked == "auto" and beside is not None else Path(asked).expanduser()
    if not place.exists():
        if not SHORT.fullmatch(asked) or asked.startswith("."):
            raise DataError(
                f"data.tokenizer={asked} is neither bytes, a file, a folder nor ORG/NAME on the hub"
            )
        place = download_model_files(asked, (*FILES, "config.json"))
    if place.is_file():
        return _load(read_text(place, MAX_FILE_BYTES, follow=True), place.parent, asked)
    if (place / FILE).is_file():
        return _load(read_text(place / FILE, MAX_FILE_BYTES, follow=True), place, asked)
    return _load(_convert(place), place, asked)


def is_local(asked: str) -> bool:
    """Say whether it can be looked at while a run is planned, without the network."""
    return asked in ("auto", "bytes") or Path(asked).expanduser().exists()


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def _load(definition: str, folder: Path, asked: str) -> Tokenizer:
    name = str(folder) if asked == "auto" else asked
    library = parse_definition(definition, name)
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"the tokenizer {name} has no vocabulary")
    size = max(vocabulary.values()) + 1
    end = _find_end(folder, vocabulary)
    end_id = size if end is None else end
    return Tokenizer(name, definition, end_id, max(size, end_id + 1), end is not None)


def of_library(library: Any, name: str, end: str) -> Tokenizer:
    """Return a tokenizer that was made here; `end` is one of its tokens."""
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values()) + 1
    return Tokenizer(name, library.to_str(), vocabulary[end], size)


def parse_definition(definition: str, name: str) -> Any:
    """Return the object of `tokenizers` that a tokenizer.json stands for."""
    library = require_extra("tokenizers", "text")
    try:
        return library.Tokenizer.from_str(definition)
    except Exception as error:  # it raises Exception itself
        raise DataError(
            f"{name} is not a tokenizer that `tokenizers` reads: {error}\n"
            f"hint: give the {FILE} of a model, or the folder that holds it"
        ) from error


def _convert(folder: Path) -> str:
    """Return the tokenizer.json of a folder in one of the older layouts, made by transformers."""
    if not holds_tokenizer(folder):
        raise DataError(f"{folder} holds no tokenizer\nhint: looked for {', '.join(FILES)}")
    auto = require_extra("transformers", "hf").AutoTokenizer
    try:
        made = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return str(made.backend_tokenizer.to_str())
    except Exception as error:  # transformers has no one class for what it refuses
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"transformers makes no tokenizer of {folder}: {why}\n"
            f"hint: save it with save_pretrained, which writes {FILE}"
        ) from error


def _find_end(folder: Path, vocabulary: dict[str, int]) -> int | None:
    """Return the id of the token that ends a text: as the files beside say, else by its name."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        named = _read_map(folder / file).get("eos_token")
        word = named.get("content") if isinstance(named, dict) else named
        if isinstance(word, str) and word in vocabulary:
            return vocabulary[word]
    number = _read_map(folder / "config.json").get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and 0 <= number < 1 << 31:
        return number
    return next((vocabulary[name] for name in END_NAMES if name in vocabulary), None)


def _read_map(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(read_text(path, MAX_FILE_BYTES, follow=True))
    except DAMAGED as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return read if isinstance(read, dict) else {}


def encode_documents(
    documents: Iterable[tuple[bytes, Mark]], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Mark, Tokens]]:
    """Yield the tokens of each document with its mark, in order. With several workers chunks are
    encoded by processes, a few ahead of what is asked for."""
    chunks = _chunks(documents)
    if workers <= 1 or tokenizer.is_bytes:
        for texts, marks in chunks:
            yield from zip(marks, tokenizer.encode(texts), strict=True)
        return
    # Forked: they need nothing but the tokenizer, and start in milliseconds.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (tokenizer,))
    waiting: deque[tuple[list[Mark], Future[tuple[bytes, list[int]]]]] = deque()
    try:
        for texts, marks in chunks:
            waiting.append((marks, pool.submit(_encode_chunk, texts)))
            if len(waiting) >= AHEAD * workers:
                yield from _take(waiting.popleft(), tokenizer)
        while waiting:
            yield from _take(waiting.popleft(), tokenizer)
    finally:
        pool.shutdown(cancel_futures=True)


def _chunks(
    documents: Iterable[tuple[bytes, Mark]],
) -> Iterator[tuple[list[bytes], list[Mark]]]:
    texts: list[bytes] = []
    marks: list[Mark] = []
    held = 0
    for text, mark in documents:
        texts.append(text)
        marks.append(mark)
        held += len(text)
        if held >= CHUNK_BYTES:
            yield texts, marks
            texts, marks, held = [], [], 0
    if texts:
        yield texts, marks


_WORKING: list[Tokenizer] = []  # in a worker: the tokenizer that it was started with


def _begin_worker(tokenizer: Tokenizer) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads
    _WORKING[:] = [tokenizer]


def _encode_chunk(texts: list[bytes]) -> tuple[bytes, list[int]]:
    found = _WORKING[0].encode(texts)
    return np.concatenate(found).tobytes(), [len(tokens) for tokens in found]


def _take(
    item: tuple[list[Mark], Future[tuple[bytes, list[int]]]], tokenizer: Tokenizer
) -> Iterator[tuple[Mark, Tokens]]:
    marks, future = item
    try:
        raw, lengths = future.result()
    except BrokenProcessPool as error:
        raise LoaderError(
            "a process that tokenises died\n"
            "hint: the kernel kills them when memory runs out: fewer --workers"
        ) from error
    tokens = np.frombuffer(raw, dtype=tokenizer.dtype)
    places = pairwise([0, *np.cumsum(lengths).tolist()])
    for mark, (first, last) in zip(marks, places, strict=True):
        yield mark, tokens[first:last]
