"""Text to token shards: files, folders, JSONL or Python's own sources, byte by byte.

    prepare_tokens(config.data, say)           once, before ranks start: shards, manifest.json
    open_tokens(folder, seq_len, "train")      on every rank: memory-mapped, by index

A token is a byte; 256 stands between documents. A document belongs to train or to validation by
the hash of its content, so neither changes when files are added or the order differs.
"""

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from paceline.data.base import TextData
from paceline.errors import DataError, DiskError
from paceline.records import Part, Record
from paceline.records.base import DAMAGED
from paceline.records.files import FileLock, fingerprint, sync_directory

DOCUMENT_END = 256
DTYPE = np.dtype("<u2")
SHARD_TOKENS = 16 << 20
PIECE_BYTES = 1 << 18
VERIFIED_BYTES = 1 << 30
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text"})
BINARY_SUFFIXES = frozenset(
    """
    .arrow .avi .bin .bz2 .ckpt .exe .gguf .gif .gz .h5 .jpeg .jpg .mp3 .mp4 .npy .npz .onnx
    .parquet .pdf .pickle .pkl .png .pt .pth .pyc .safetensors .so .tar .wav .webp .xz .zip .zst
    """.split()
)
LOOKED_AT_BYTES = 1 << 16
MAX_SAID = 120
MOST_BROKEN = 0.1  # share of characters that are not UTF-8; latin-1 has a few
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)


class Shard(Part):
    file: Annotated[str, Field(pattern=r"^[a-z]+_[0-9]+\.bin$")]  # beside its manifest
    split: Split
    num_tokens: Annotated[int, Field(ge=1, lt=1 << 60)]
    sha256: str


class Manifest(Record):
    """What the shards hold, and proof that they hold it."""

    source: str
    num_documents: int
    num_tokens: int
    unigram_entropy: float
    shards: list[Shard]

    @property
    def fingerprint(self) -> str:
        return fingerprint(*(shard.sha256 for shard in self.shards))


def prepare_tokens(data: TextData, say: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Tokenise the source unless its shards are there already; safe to call from any process."""
    files = list_files(data)
    home = _home(data, files)
    if data.source != "stdlib" and not (home / "manifest.json").is_file():
        _require_text(files)
    if not (home / "manifest.json").is_file():  # else they are there whole, perhaps read-only
        _keep_tokens(data, files, home, say)
    manifest = Manifest.load(home / "manifest.json")
    _verify(home, manifest, say)
    return home, manifest


def _keep_tokens(
    data: TextData, files: Sequence[Path], home: Path, say: Callable[[str], None]
) -> None:
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(home.with_suffix(".lock")):  # two processes never build the same shards
            if not (home / "manifest.json").is_file():
                total_mb = sum(path.stat().st_size for path in files) / 1e6
                say(f"reading {len(files)} files ({total_mb:.1f} MB) of {data.source} as bytes")
                _build(data, files, home, say)
    except OSError as error:
        told = f"cannot keep token shards in data.cache_dir={data.cache_dir}: {error}"
        if DiskError.is_meant(error):
            hint = "free space there, or set data.cache_dir to a directory that has it"
            raise DiskError(f"{told}\nhint: {hint}") from error
        raise DataError(told) from error


def open_tokens(home: Path, seq_len: int, split: str) -> "PackedTokens | None":
    """Return the prepared samples of a split; None when it holds less than one."""
    manifest = Manifest.load(home / "manifest.json")
    parts = [_map_shard(home / s.file, s) for s in manifest.shards if s.split == split]
    tokens = PackedTokens(parts, seq_len, manifest.fingerprint)
    return tokens if len(tokens) else None


def list_files(data: TextData) -> list[Path]:
    """Return the text files of a source, in a fixed order, at most `max_files` of them."""
    root = Path(sysconfig.get_paths()["stdlib"] if data.source == "stdlib" else data.source)
    root = root.expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(
            f"data.source={data.source} is neither synthetic, stdlib, a file nor a folder"
        )
    wanted = {".py"} if data.source == "stdlib" else TEXT_SUFFIXES | JSONL_SUFFIXES
    found = sorted(_iter_files(root, wanted))
    if not found:
        raise DataError(f"{root} holds no text: looked for {', '.join(sorted(wanted))}")
    return found if data.max_files == "all" else found[: data.max_files]


def _require_text(files: Sequence[Path]) -> None:
    """Refuse weights, pictures and other binary files by name: any bytes could be trained on."""
    reasons = [(path, _why_not_text(path)) for path in files]
    problems = [f"{path} {reason}" for path, reason in reasons if reason]
    if problems:
        more = f"\nand {len(problems) - 5} more files" if len(problems) > 5 else ""
        raise DataError(
            "\n".join(problems[:5])
            + f"{more}\nhint: data.source takes text: a file in UTF-8, JSONL, or a folder of them"
        )


def _why_not_text(path: Path) -> str:
    """Return what shows that a file is not text, or ""."""
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


def _iter_files(root: Path, wanted: Collection[str]) -> Iterator[Path]:
    """Yield files below `root`, without hidden folders, installed packages and our own run
    records."""
    for folder, subfolders, names in os.walk(root):
        if "run.yaml" in names:
            subfolders.clear()
            continue
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != "site-packages"]
        found = (Path(folder, name) for name in names if Path(name).suffix in wanted)
        yield from (path for path in found if path.is_file())  # to open a FIFO is to wait


class PackedTokens:
    """Sample i is tokens [i T, i T + T], T + 1 of them: the last is the next sample's first."""

    def __init__(self, parts: list[NDArray[np.uint16]], seq_len: int, name: str) -> None:
        self.parts, self.seq_len = parts, seq_len
        self.fingerprint = f"{name}-{seq_len}"
        self.num_samples = [max(0, (len(part) - 1) // seq_len) for part in parts]
        self.starts = np.concatenate(([0], np.cumsum(self.num_samples)))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.batch([index])["tokens"][0]}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return samples (B, T + 1) as int32: the narrowest type that indexing on a GPU accepts."""
        out = np.empty((len(indices), self.seq_len + 1), dtype=np.int32)
        places = np.searchsorted(self.starts, indices, side="right") - 1
        for row, (index, place) in enumerate(zip(indices, places, strict=True)):
            first = (index - self.starts[place]) * self.seq_len
            out[row] = self.parts[place][first : first + self.seq_len + 1]
        return {"tokens": torch.from_numpy(out)}


def iter_documents(files: Sequence[Path], text_field: str) -> Iterator[bytes]:
    """Yield documents: each file is one, and so is each row of a JSONL file."""
    for path in files:
        if path.suffix in JSONL_SUFFIXES:
            yield from _jsonl_documents(path, text_field)
        else:
            yield path.read_bytes()


def _jsonl_documents(path: Path, text_field: str) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[text_field].encode()
            except DAMAGED as error:
                said = repr(error)[:MAX_SAID]
                raise DataError(
                    f"{path}:{number} is not a JSON row with text in '{text_field}': {said}\n"
                    "hint: data.text_field names the field"
                ) from error


def _build(data: TextData, files: Sequence[Path], home: Path, say: Callable[[str], None]) -> None:
    """Write shards and manifest aside, then rename: a kill leaves nothing half done. The lock is
    held, so what stands aside already is of a process that was killed."""
    for wreck in [path for path in home.parent.iterdir() if path.name.startswith(f".{home.name}.")]:
        shutil.rmtree(wreck, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}."))
    try:
        writers = {split: _ShardWriter(aside, split) for split in SPLITS}
        counts = np.zeros(DOCUMENT_END + 1, dtype=np.int64)
        num_documents = 0
        for piece in _pieces(iter_documents(files, data.text_field)):
            tokens = np.frombuffer(piece, dtype=np.uint8).astype(DTYPE)
            # The first goes to train: a source of one piece is useless as validation only.
            split: Split = _split_of(piece, data.val_fraction) if num_documents else "train"
            writers[split].add(tokens)
            counts[:DOCUMENT_END] += np.bincount(tokens, minlength=DOCUMENT_END)
            counts[DOCUMENT_END] += 1
            num_documents += 1
        shards = [shard for writer in writers.values() for shard in writer.close()]
        manifest = Manifest(
            source=data.source,
            num_documents=num_documents,
            num_tokens=int(counts.sum()),
            unigram_entropy=unigram_entropy(counts),
            shards=shards,
        )
        manifest.save(aside / "manifest.json")
        os.replace(aside, home)
        sync_directory(home.parent)
        say(f"{manifest.num_tokens / 1e6:.1f} M tokens in {len(shards)} shards")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _pieces(documents: Iterator[bytes]) -> Iterator[bytes]:
    """Cut long documents into several, so that one large file has a validation part too."""
    for document in documents:
        for start in range(0, max(1, len(document)), PIECE_BYTES):
            yield document[start : start + PIECE_BYTES]


class _ShardWriter:
    """Appends documents of one split to shards of about SHARD_TOKENS tokens."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.folder, self.split = folder, split
        self.pending: list[NDArray[np.uint16]] = []
        self.num_pending = 0
        self.shards: list[Shard] = []

    def add(self, tokens: NDArray[np.uint16]) -> None:
        self.pending += [tokens, np.array([DOCUMENT_END], dtype=DTYPE)]
        self.num_pending += len(tokens) + 1
        if self.num_pending >= SHARD_TOKENS:
            self._flush()

    def close(self) -> list[Shard]:
        if self.num_pending:
            self._flush()
        return self.shards

    def _flush(self) -> None:
        raw = np.concatenate(self.pending).tobytes()
        name = f"{self.split}_{len(self.shards):05d}.bin"
        with (self.folder / name).open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256(raw).hexdigest()
        self.shards.append(
            Shard(file=name, split=self.split, num_tokens=self.num_pending, sha256=digest)
        )
        self.pending, self.num_pending = [], 0


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of drawing one token from these counts: a model that knows only
    how often each byte occurs has this loss."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _split_of(document: bytes, val_fraction: float) -> Split:
    """Draw the split from the document's hash: the same document is always in the same one."""
    draw = int.from_bytes(hashlib.sha256(document).digest()[:8], "little") / 2**64
    return "val" if draw < val_fraction else "train"


def _home(data: TextData, files: Sequence[Path]) -> Path:
    """Return where this source's shards lie: another name when a file, or how it is read,
    changes."""
    state = [f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    how = f"{Manifest.SCHEMA}:{data.text_field}:{data.val_fraction!r}"
    stem = "stdlib" if data.source == "stdlib" else Path(data.source).stem
    return Path(data.cache_dir).expanduser() / "tokens" / f"{stem}-{fingerprint(how, *state)}"


def _verify(home: Path, manifest: Manifest, say: Callable[[str], None]) -> None:
    """Check that shards hold what they held when they were made; hashing more than a GiB takes too
    long."""
    if sum(shard.num_tokens for shard in manifest.shards) * DTYPE.itemsize > VERIFIED_BYTES:
        say(f"the shards in {home} are large and are checked by size only")
        return
    for shard in manifest.shards:
        _map_shard(home / shard.file, shard)
        if hashlib.sha256((home / shard.file).read_bytes()).hexdigest() != shard.sha256:
            raise DataError(
                f"{home / shard.file} is not what its manifest says\n"
                f"hint: delete {home} and it is made anew"
            )


def _map_shard(path: Path, shard: Shard) -> NDArray[np.uint16]:
    expected = shard.num_tokens * DTYPE.itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise DataError(
            f"{path} has {found} bytes, its manifest says {expected}\n"
            f"hint: delete {path.parent} and it is made anew"
        )
    return np.memmap(path, dtype=DTYPE, mode="r")
