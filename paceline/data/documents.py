"""Sources of text: files, folders, JSONL, tables and the hub, as documents in a fixed order.

    source = find_source(data)                     which files, of which split, which revision
    iter_documents(source.files, "text", False)    each a piece of text in UTF-8, with its split

A file of text is a document, and so is a row of JSONL, parquet or arrow. No code that comes with a
data set is run: tables are read by their columns.
"""

import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from paceline.data.base import TextData
from paceline.data.extras import require_extra
from paceline.data.hub import HubSet, parse_hub
from paceline.errors import DataError
from paceline.records.base import DAMAGED
from paceline.records.words import few

PIECE_BYTES = 1 << 18
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text"})
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
BINARY_SUFFIXES = frozenset(
    """
    .avi .bin .bz2 .ckpt .exe .gguf .gif .gz .h5 .jpeg .jpg .mp3 .mp4 .npy .npz .onnx .pdf .pickle
    .pkl .png .pt .pth .pyc .safetensors .so .tar .wav .webp .xz .zip .zst
    """.split()
)
LOOKED_AT_BYTES = 1 << 16
MAX_SAID = 120
MOST_BROKEN = 0.1  # share of characters that are not UTF-8; latin-1 has a few
TABLE_ROWS = 1024
# How the hub tells splits apart: a word in a file's or a folder's name.
VALIDATION = re.compile(r"(?:^|[\d \-_./])(?:validation|valid|val|dev)(?:[\d \-_./]|$)")
TEST = re.compile(r"(?:^|[\d \-_./])(?:test|testing|eval|evaluation)(?:[\d \-_./]|$)")
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)


class SourceFile(NamedTuple):
    """`split`: where the source itself says so; None: the hash of each document decides."""

    path: Path
    split: Split | None = None


class Document(NamedTuple):
    text: bytes
    split: Split | None


@dataclass(frozen=True)
class Source:
    """What is read, and what identifies it. `state` changes whenever that would change; `revision`
    is the commit of a data set on the hub, whose files are downloaded when they are needed."""

    name: str
    state: tuple[str, ...]
    find_files: Callable[[], list[SourceFile]]
    revision: str = ""

    @cached_property
    def files(self) -> list[SourceFile]:
        """The files in the order in which they are read."""
        return self.find_files()

    @property
    def num_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def require_text(self) -> None:
        """Raise a `DataError` that names the files which are not text."""
        if self.name != "stdlib":
            _require_text([file.path for file in self.files])


def find_source(data: TextData) -> Source:
    """Find what `data.source` names; `DataError` if it does not exist."""
    hub = parse_hub(data.source)
    if hub is not None:
        pinned = hub.pin()  # a branch means one commit from here on
        state = (str(pinned), str(data.max_files))
        return Source(data.source, state, lambda: _download(data, pinned), pinned.revision)
    files = list_files(data)
    kept = (f"{f.path}:{f.path.stat().st_size}:{f.path.stat().st_mtime_ns}" for f in files)
    return Source(data.source, tuple(kept), lambda: files)


def _download(data: TextData, pinned: HubSet) -> list[SourceFile]:
    listed = pinned.list_files()
    tables = [name for name in listed if Path(name).suffix in TABLE_SUFFIXES]
    chosen = _splits(tables or [name for name in listed if Path(name).suffix in JSONL_SUFFIXES])
    if not chosen:
        raise DataError(f"{pinned} has neither parquet, arrow nor JSONL files")
    first = _first(chosen, data.max_files)
    return [SourceFile(pinned.download(name), split) for name, split in first]


def list_files(data: TextData) -> list[SourceFile]:
    """Return the files of a source on disk, in a fixed order, at most `max_files` of each split."""
    root = Path(sysconfig.get_paths()["stdlib"] if data.source == "stdlib" else data.source)
    root = root.expanduser()
    if root.is_file():
        return [SourceFile(root)]
    if not root.is_dir():
        raise DataError(
            f"data.source={data.source} is neither synthetic, stdlib, a file, a folder nor ORG/NAME"
            " on the hub"
        )
    wanted = TEXT_SUFFIXES | JSONL_SUFFIXES | TABLE_SUFFIXES
    found = sorted(_iter_files(root, {".py"} if data.source == "stdlib" else wanted))
    if not found:
        raise DataError(f"{root} holds no text: looked for {', '.join(sorted(wanted))}")
    # A folder with tables is a data set: the text beside them is about it.
    names = [str(path.relative_to(root)) for path in found]
    tables = [name for name in names if Path(name).suffix in TABLE_SUFFIXES]
    without_split: list[tuple[str, Split | None]] = [(name, None) for name in names]
    chosen = _splits(tables) if tables else without_split
    return [SourceFile(root / name, split) for name, split in _first(chosen, data.max_files)]


def _splits(names: Collection[str]) -> list[tuple[str, Split | None]]:
    """Return train and validation files by the words in their names, validation first; without the
    split where only one of the two is there. Files of a test split are in neither."""
    stems = {name: str(Path(name).with_suffix("")) for name in sorted(names)}
    val = [name for name, stem in stems.items() if VALIDATION.search(stem)]
    test = [name for name, stem in stems.items() if TEST.search(stem) and name not in val]
    train = [name for name in stems if name not in (*val, *test)]
    if not val or not train:
        return [(name, None) for name in train or val or test]
    return [*((name, "val") for name in val), *((name, "train") for name in train)]


def _first(
    chosen: list[tuple[str, Split | None]], most: Literal["all"] | int
) -> Iterator[tuple[str, Split | None]]:
    for split in ("val", "train", None):
        ours = [(name, mark) for name, mark in chosen if mark == split]
        yield from ours if most == "all" else ours[:most]


def _iter_files(root: Path, wanted: Collection[str]) -> Iterator[Path]:
    """Yield files below `root`, without hidden folders, installed packages and our own run
    records."""
    for folder, subfolders, names in os.walk(root):
        if "run.yaml" in names:
            subfolders.clear()
            continue
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != "site-packages"]
        found = (Path(folder, name) for name in names if Path(name).suffix in wanted)
        yield from (path for path in found if path.is_file())  # opening a FIFO would block


def _require_text(files: Sequence[Path]) -> None:
    """Refuse weights, pictures and other binary files by name: any bytes could be trained on."""
    reasons = [(path, _why_not_text(path)) for path in files if path.suffix not in TABLE_SUFFIXES]
    problems = [f"{path} {reason}" for path, reason in reasons if reason]
    if problems:
        more = f"\nand {len(problems) - 5} more files" if len(problems) > 5 else ""
        raise DataError(
            "\n".join(problems[:5])
            + f"{more}\nhint: data.source takes text: a file in UTF-8, JSONL, parquet or arrow, or"
            " a folder of them"
        )


def _why_not_text(path: Path) -> str:
    """Return the reason why a file is not text, or ""."""
    if path.suffix.lower() in BINARY_SUFFIXES:
        return f"is not text: {path.suffix} is a binary format"
    try:
        with path.open("rb") as file:
            head = file.read(LOOKED_AT_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if b"\0" in head:
        return "is not text in UTF-8: it holds zero bytes"
    text = head.decode(errors="replace")
    broken = text.count("\ufffd") / max(1, len(text))
    return f"is not text in UTF-8: {broken:.0%} of it is not" if broken > MOST_BROKEN else ""


def iter_documents(
    files: Sequence[SourceFile], text_field: str, between_words: bool
) -> Iterator[Document]:
    """Yield the documents of all files. One that is longer than PIECE_BYTES comes as several, so
    that one large file has a validation part too, and none fills the memory."""
    for path, split in files:
        for piece in iter_file(path, text_field, between_words):
            yield Document(piece, split)


def iter_file(path: Path, text_field: str, between_words: bool) -> Iterator[bytes]:
    """Yield the documents of one file; `between_words`: long ones are not cut inside a word."""
    try:
        if path.suffix in JSONL_SUFFIXES | TABLE_SUFFIXES:
            rows = _jsonl_rows if path.suffix in JSONL_SUFFIXES else _table_rows
            for row in rows(path, text_field):
                yield from _pieces(io.BytesIO(row), between_words)
        else:
            with path.open("rb") as file:
                yield from _pieces(file, between_words)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _pieces(file: BinaryIO, between_words: bool) -> Iterator[bytes]:
    """Cut a file's content into pieces of at most PIECE_BYTES; an empty file is one empty piece."""
    rest = file.read(PIECE_BYTES)
    while len(rest) == PIECE_BYTES:
        end = _last_gap(rest) if between_words else PIECE_BYTES
        yield rest[:end]
        more = file.read(end)
        rest = rest[end:] + more
        if not rest:
            return
    yield rest


def _last_gap(block: bytes) -> int:
    """Return where to cut a block: behind its last line, else before its last word, else before its
    last character. Only in its second half: a piece is not a few words."""
    half = len(block) // 2
    if (line := block.rfind(b"\n", half)) >= 0:
        return line + 1
    if (word := block.rfind(b" ", half)) >= 0:
        return word
    end = len(block) - 1
    while end > half and block[end] & 0xC0 == 0x80:  # inside a character of several bytes
        end -= 1
    return end


def _jsonl_rows(path: Path, text_field: str) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row: Any = None
            try:
                row = json.loads(line)
                yield row[text_field].encode()
            except DAMAGED as error:
                said = repr(error)[:MAX_SAID]
                if isinstance(row, dict) and text_field not in row:
                    said = f"it has {few(row)[:MAX_SAID] or 'nothing'}"
                raise DataError(
                    f"{path}:{number} is not a JSON row with text in '{text_field}': {said}\n"
                    "hint: data.text_field names the field"
                ) from error


def _table_rows(path: Path, text_field: str) -> Iterator[bytes]:
    arrow = require_extra("pyarrow", "text")
    opened = _open_parquet if path.suffix == ".parquet" else _open_arrow
    number = 0
    try:
        columns, batches = opened(path, text_field)
        if text_field not in columns:
            raise DataError(
                f"{path} has no column '{text_field}'; it has {', '.join(columns)}\n"
                "hint: data.text_field names the column"
            )
        for batch in batches():
            for text in batch.column(text_field).to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise DataError(
                        f"{path}: row {number} has no text in '{text_field}':"
                        f" {repr(text)[:MAX_SAID]}\nhint: data.text_field names the column"
                    )
                yield text.encode(errors="replace")
    except (arrow.ArrowException, OSError, *DAMAGED) as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from error


Opened = tuple[list[str], Callable[[], Iterator[Any]]]


def _open_parquet(path: Path, text_field: str) -> Opened:
    file = require_extra("pyarrow.parquet", "text").ParquetFile(path)
    names = list(file.schema_arrow.names)
    return names, lambda: file.iter_batches(batch_size=TABLE_ROWS, columns=[text_field])


def _open_arrow(path: Path, text_field: str) -> Opened:
    """Open what `save_to_disk` of `datasets` writes: batches one after the other."""
    arrow = require_extra("pyarrow", "text")
    stream = arrow.ipc.open_stream(arrow.memory_map(str(path)))
    return list(stream.schema.names), lambda: iter(stream)
