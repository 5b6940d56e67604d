"""Files of tensors: the safetensors format, written with a checksum on the way, read by rows.

The header carries the offsets of torch's distributed checkpoints, so that its
HuggingFaceStorageReader, and anybody's safetensors, read these files too. Nothing is pickled.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.pieces import Piece, Section
from paceline.errors import RestoreError
from paceline.records import FileSum, Manifest, TensorEntry, TensorRows

SUFFIX = ".safetensors"
BLOCK_BYTES = 1 << 19  # read and summed together: a quarter of a core's own cache
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def write_pieces(path: Path, pieces: Sequence[Piece]) -> FileSum:
    """Write one file and make it durable. The sum is that of the bytes we meant to write."""
    ordered = sorted(pieces, key=lambda piece: -piece.value.element_size())  # all stay aligned
    digest = xxhash.xxh3_64()
    with path.open("wb", buffering=0) as file:
        for view in _views(ordered):
            digest.update(view)
            _write_all(file, view)
        os.fsync(file.fileno())
        return FileSum(num_bytes=file.tell(), xxh3=digest.hexdigest())


def write_bytes(path: Path, content: bytes) -> FileSum:
    """A small file beside the tensors, with its sum."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(num_bytes=len(content), xxh3=xxhash.xxh3_64(content).hexdigest())


def _views(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    yield memoryview(_header(pieces))
    for piece in pieces:
        if piece.value.numel():
            flat = piece.value.detach().cpu().contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(pieces: Sequence[Piece]) -> bytes:
    offsets = {p.name: {"saved_offsets": _offsets(p)} for p in pieces}
    body: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets),
        }
    }
    begin = 0
    for piece in pieces:
        end = begin + piece.num_bytes
        body[piece.name] = {
            "dtype": DTYPES[piece.value.dtype],
            "shape": list(piece.value.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _offsets(piece: Piece) -> list[int]:
    return [piece.row, *(0 for _ in piece.shape[1:])] if piece.shape else []


def _write_all(file: IO[bytes], view: memoryview) -> None:
    """A raw write takes at most 2 GiB at once, and on a full disk less than it was given."""
    while view:
        view = view[file.write(view) :]


def entries(pieces: Sequence[Piece], file: str) -> dict[str, TensorEntry]:
    """What the manifest says of the tensors in one file."""
    return {
        piece.name: TensorEntry(
            shape=list(piece.shape),
            dtype=DTYPES[piece.value.dtype],
            parts=[TensorRows(file=file, row=piece.row, num_rows=_num_rows(piece))],
        )
        for piece in pieces
    }


def _num_rows(piece: Piece) -> int:
    return piece.value.shape[0] if piece.shape else 1


def sum_file(path: Path) -> FileSum:
    """The sum of what is on disk now."""
    digest, buffer = xxhash.xxh3_64(), bytearray(BLOCK_BYTES)
    view, num_bytes = memoryview(buffer), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            num_bytes += count
    return FileSum(num_bytes=num_bytes, xxh3=digest.hexdigest())


class TensorFiles:
    """The tensors of one checkpoint, read by rows from whichever files hold them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._tensors: dict[Section, dict[str, TensorEntry]] = {
            "model": manifest.model,
            "optimizer": manifest.optimizer,
        }
        self._shapes = {
            section: {name: tuple(entry.shape) for name, entry in tensors.items()}
            for section, tensors in self._tensors.items()
        }
        self._open: dict[str, safe_open] = {}

    def shapes(self, section: Section) -> dict[str, tuple[int, ...]]:
        return self._shapes[section]

    def rows(self, section: Section, name: str, first: int, count: int) -> Tensor:
        """Where one file has them all this is that file, mapped: copy what must outlive it."""
        entry = self._tensors[section][name]
        found, row = [], first
        for part in sorted(entry.parts, key=lambda p: p.row):
            end = min(first + count, part.row + part.num_rows)
            if part.row <= row < end:
                found.append(self._slice(part, name, row - part.row, end - part.row))
                self._require_shape(found[-1], entry, end - row, f"{part.file}: {name}")
                row = end
        if row != first + count:
            raise RestoreError(f"{self.folder.name} has {row - first} of {count} rows of {name}")
        if not found:
            return torch.empty((0, *entry.shape[1:]), dtype=TYPES[entry.dtype])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slice(self, part: TensorRows, name: str, begin: int, end: int) -> Tensor:
        try:
            opened: Any = self._open.get(part.file)
            if opened is None:
                opened = self._open[part.file] = safe_open(self.folder / part.file, framework="pt")
            stored = opened.get_slice(name)
            rows: Tensor = stored[begin:end] if stored.get_shape() else opened.get_tensor(name)
            return rows
        except (SafetensorError, OSError) as error:
            raise RestoreError(f"{self.folder.name}/{part.file} cannot be read: {error}") from error

    def _require_shape(self, rows: Tensor, entry: TensorEntry, count: int, what: str) -> None:
        """A tensor of another shape would be stretched to fit, without a word."""
        wanted = (count, *entry.shape[1:]) if entry.shape else ()
        if tuple(rows.shape) != wanted or DTYPES.get(rows.dtype) != entry.dtype:
            raise RestoreError(f"{self.folder.name}/{what} is not what the manifest says it is")
