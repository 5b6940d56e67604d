"""Token shards on disk: files of ids, the tokenizer, and a manifest with their checksums.

    manifest.json  train_00000.bin ...  val_00000.bin ...  tokenizer.json (unless tokens are bytes)

A folder of shards is whole or absent: it is written aside and renamed.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paceline.data.documents import SPLITS, Document, Split
from paceline.data.tokenizer import BYTE_END, FILE, Tokenizer, Tokens, encode_documents
from paceline.errors import DataError
from paceline.records import Part, Record
from paceline.records.files import fingerprint, sync_directory

SHARD_TOKENS = 16 << 20
VERIFIED_BYTES = 1 << 30
MANIFEST = "manifest.json"
Id = Annotated[int, Field(ge=0, lt=1 << 31)]


class Shard(Part):
    file: Annotated[str, Field(pattern=r"^[a-z]+_[0-9]+\.bin$")]  # beside its manifest
    split: Split
    num_tokens: Annotated[int, Field(ge=1, lt=1 << 60)]
    sha256: str
    num_bytes: Annotated[int, Field(ge=0)] = 0  # of the text that it was; 0: not counted


class Manifest(Record):
    """What the shards hold, and proof that they hold it. The defaults describe tokens that are
    bytes, as in manifests from before there were tokenizers."""

    source: str
    num_documents: int
    num_tokens: int
    unigram_entropy: float
    shards: list[Shard]
    tokenizer: str = "bytes"
    tokenizer_sha256: str = "bytes"
    vocab_size: Annotated[Id, Field(ge=1)] = BYTE_END + 1
    end_id: Id = BYTE_END
    dtype: Literal["<u2", "<u4"] = "<u2"
    revision: str = Field("", description="The commit of a data set of the hub.")
    num_repeated: int = Field(0, description="Documents left out: validation has them too.")
    made_from: str = Field("", description="Changes with the source and how it was read.")

    @property
    def fingerprint(self) -> str:
        return fingerprint(*(shard.sha256 for shard in self.shards))

    @property
    def is_bytes(self) -> bool:
        return self.tokenizer_sha256 == "bytes"

    def bytes_per_token(self, split: Split) -> float | None:
        """Return the bytes of text that a token of a split stands for; None if not known."""
        ours = [shard for shard in self.shards if shard.split == split]
        num_bytes = sum(shard.num_bytes for shard in ours)
        return num_bytes / sum(shard.num_tokens for shard in ours) if num_bytes else None

    def tokenizer_file(self, home: Path) -> Path | None:
        return None if self.is_bytes else home / FILE


class Origin(Part):
    """What shards are made from, as their manifest says it."""

    source: str
    revision: str
    made_from: str
    val_fraction: float


def write_shards(
    home: Path,
    origin: Origin,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    workers: int,
) -> Manifest:
    """Write shards, tokenizer and manifest aside, then rename: a kill leaves nothing half done. The
    caller holds a lock, so what stands aside already is of a process that was killed."""
    for wreck in [path for path in home.parent.iterdir() if path.name.startswith(f".{home.name}.")]:
        shutil.rmtree(wreck, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}."))
    try:
        seen = Chosen()
        chosen = choose_splits(documents, origin.val_fraction, seen)
        writers = {split: _ShardWriter(aside, split) for split in SPLITS}
        counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for (split, num_bytes), tokens in encode_documents(chosen, tokenizer, workers):
            writers[split].add(tokens, num_bytes)
            counts += np.bincount(tokens, minlength=len(counts))
        manifest = Manifest(
            **origin.model_dump(exclude={"val_fraction"}),
            num_documents=seen.num_documents,
            num_tokens=int(counts.sum()),
            unigram_entropy=unigram_entropy(counts),
            shards=[shard for writer in writers.values() for shard in writer.close()],
            tokenizer=tokenizer.name,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            dtype=tokenizer.dtype.str,
            num_repeated=seen.num_repeated,
        )
        if not tokenizer.is_bytes:
            (aside / FILE).write_text(tokenizer.definition, encoding="utf-8")
        manifest.save(aside / MANIFEST)
        os.chmod(aside, 0o755)  # mkdtemp's is for its maker alone
        os.replace(aside, home)
        sync_directory(home.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return manifest


@dataclass
class Chosen:
    """How many documents `choose_splits` has seen."""

    num_documents: int = 0
    num_repeated: int = 0


def choose_splits(
    documents: Iterable[Document], val_fraction: float, seen: Chosen | None = None
) -> Iterator[tuple[bytes, tuple[Split, int]]]:
    """Yield documents with their split and size. One that the source uses for validation is left
    out of training wherever it appears again."""
    seen = seen or Chosen()
    kept_apart: set[bytes] = set()
    for text, given in documents:
        digest = hashlib.sha256(text).digest()
        if given == "val":  # these come first
            kept_apart.add(digest[:16])
        elif given == "train" and digest[:16] in kept_apart:
            seen.num_repeated += 1
            continue
        # The first goes to train: a source of one piece is useless as validation only.
        drawn = split_of(digest, val_fraction) if seen.num_documents else "train"
        seen.num_documents += 1
        yield text, (given or drawn, len(text))


def split_of(digest: bytes, val_fraction: float) -> Split:
    """Draw the split from the document's hash: the same document is always in the same one."""
    draw = int.from_bytes(digest[:8], "little") / 2**64
    return "val" if draw < val_fraction else "train"


class _ShardWriter:
    """Appends documents of one split to shards of about SHARD_TOKENS tokens."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.folder, self.split = folder, split
        self.pending: list[Tokens] = []
        self.num_pending = self.num_bytes = 0
        self.shards: list[Shard] = []

    def add(self, tokens: Tokens, num_bytes: int) -> None:
        self.pending.append(tokens)
        self.num_pending += len(tokens)
        self.num_bytes += num_bytes
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
        self.shards.append(
            Shard(
                file=name,
                split=self.split,
                num_tokens=self.num_pending,
                sha256=hashlib.sha256(raw).hexdigest(),
                num_bytes=self.num_bytes,
            )
        )
        self.pending, self.num_pending, self.num_bytes = [], 0, 0


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of drawing one token from these counts: a model that knows only
    how often each token occurs has this loss."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def verify_shards(home: Path, manifest: Manifest, say: Callable[[str], None]) -> None:
    """Check that shards have not changed since they were made, and hold no id that their tokenizer
    lacks; not if they have more than a GiB, as reading them would take too long."""
    width = np.dtype(manifest.dtype).itemsize
    if sum(shard.num_tokens for shard in manifest.shards) * width > VERIFIED_BYTES:
        say(f"the shards in {home} are large and are checked by size only")
        return
    for shard in manifest.shards:
        tokens = map_shard(home, manifest, shard)
        if hashlib.sha256(tokens.data).hexdigest() != shard.sha256:
            raise DataError(
                f"{home / shard.file} is not what its manifest says\n"
                f"hint: delete {home} and it is made anew"
            )
        if int(tokens.max()) >= manifest.vocab_size:
            raise DataError(
                f"{home / shard.file} has the token {tokens.max()}, and its tokenizer"
                f" {manifest.vocab_size} of them\nhint: delete {home} and make it anew"
            )


def map_shard(home: Path, manifest: Manifest, shard: Shard) -> Tokens:
    """Map a shard into memory, once its size is what the manifest says."""
    path, dtype = home / shard.file, np.dtype(manifest.dtype)
    expected = shard.num_tokens * dtype.itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != expected:
        raise DataError(
            f"{path} has {found} bytes, its manifest says {expected}\n"
            f"hint: delete {path.parent} and it is made anew"
        )
    return np.memmap(path, dtype=dtype, mode="r")
