"""Files of tensors: the safetensors format, written with a checksum on the way, read by rows.

The header carries the offsets of torch's distributed checkpoints, so that its
HuggingFaceStorageReader, and anybody's safetensors, read these files too. Nothing is pickled.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch
import xxhash
from torch import Tensor

from paceline.checkpoint.pieces import SECTIONS, Piece, Section
from paceline.errors import RestoreError
from paceline.records import FileSum, Manifest, TensorEntry, TensorRows
from paceline.records.files import sync_directory

SUFFIX = ".safetensors"
BLOCK_BYTES = 1 << 19  # read and summed together: a quarter of a core's own cache
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint32: "U32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def rng_file(rank: int) -> str:
    return f"rng-rank{rank}{SUFFIX}"


class Written(NamedTuple):
    """A file's sum and the tensors in it, as the manifest will say."""

    sum: FileSum
    tensors: dict[str, TensorEntry]


def write_pieces(path: Path, pieces: Sequence[Piece]) -> Written:
    """Write one file and make it durable. The sums, of the file and of each piece in it, are those
    of the bytes we meant to write."""
    ordered = sorted(pieces, key=lambda piece: -piece.value.element_size())  # all stay aligned
    header, tensors = _header(ordered), {}
    digest = xxhash.xxh3_64(header)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for piece in ordered:
            offset, own = file.tell(), xxhash.xxh3_64()
            for block in _blocks(_bytes_of(piece.value)):
                own.update(block)
                digest.update(block)
                _write_all(file, block)
            tensors[piece.name] = _entry(piece, path.name, offset, own.hexdigest())
        os.fsync(file.fileno())
        file_sum = FileSum(
            num_bytes=file.tell(),
            xxh3=digest.hexdigest(),
            head_bytes=len(header),
            head_xxh3=xxhash.xxh3_64(header).hexdigest(),
        )
    return Written(file_sum, tensors)


def write_bytes(path: Path, content: bytes) -> FileSum:
    """Write a small file beside the tensors; return its sum."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(num_bytes=len(content), xxh3=xxhash.xxh3_64(content).hexdigest())


def _bytes_of(value: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU, contiguous; of any other, a copy."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _blocks(view: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(view), BLOCK_BYTES):
        yield view[begin : begin + BLOCK_BYTES]


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
    """Write until all is written: a raw write takes at most 2 GiB, and on a full disk less than it
    was given."""
    while view:
        view = view[file.write(view) :]


def _entry(piece: Piece, file: str, offset: int, xxh3: str) -> TensorEntry:
    num_rows = piece.value.shape[0] if piece.shape else 1
    rows = TensorRows(file=file, row=piece.row, num_rows=num_rows, offset=offset, xxh3=xxh3)
    return TensorEntry(shape=list(piece.shape), dtype=DTYPES[piece.value.dtype], parts=[rows])


def sum_head(path: Path, num_bytes: int) -> str:
    """Sum the first bytes of a file."""
    with path.open("rb") as file:
        return xxhash.xxh3_64(file.read(num_bytes)).hexdigest()


def sum_file(path: Path) -> FileSum:
    """Sum what is on disk now."""
    digest, buffer = xxhash.xxh3_64(), bytearray(BLOCK_BYTES)
    view, num_bytes = memoryview(buffer), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            num_bytes += count
    return FileSum(num_bytes=num_bytes, xxh3=digest.hexdigest())


class TensorFiles:
    """The tensors of one checkpoint, read by rows from whichever files hold them.

    Each part is summed on its way into memory. One that is not what was written is handed out all
    the same and named in `damages`: all ranks finish reading, and then believe it together or not.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.damages: list[str] = []
        self._handles: dict[str, int] = {}
        self._sizes = {name: file.num_bytes for name, file in manifest.files.items()}
        self._tensors: dict[Section, dict[str, TensorEntry]] = {
            "model": manifest.model,
            "optimizer": manifest.optimizer,
        }
        self._shapes = {
            section: {name: tuple(entry.shape) for name, entry in tensors.items()}
            for section, tensors in self._tensors.items()
        }

    def shapes(self, section: Section) -> dict[str, tuple[int, ...]]:
        return self._shapes[section]

    def rows(self, section: Section, name: str, first: int, count: int) -> Tensor:
        entry = self._tensors[section][name]
        shape = (count, *entry.shape[1:]) if entry.shape else ()
        out = torch.empty(shape, dtype=TYPES[entry.dtype])
        self.fill(section, name, first, out)
        return out

    def fill(self, section: Section, name: str, first: int, out: Tensor) -> None:
        """Read row `first` and as many as fit into `out`, whatever device and type it has."""
        entry = self._tensors[section][name]
        is_plain = out.device.type == "cpu" and out.is_contiguous()
        if not is_plain or out.dtype != TYPES[entry.dtype]:
            like = torch.empty(out.shape, dtype=TYPES[entry.dtype])
            self.fill(section, name, first, like)
            out.copy_(like)
            return
        if out.numel():
            count = out.shape[0] if out.dim() else 1
            self._fill(name, entry, first, count, _bytes_of(out))

    def _fill(self, name: str, entry: TensorEntry, first: int, count: int, out: memoryview) -> None:
        size, row = len(out) // count, first  # bytes of a row; the next row that is wanted
        for part in sorted(entry.parts, key=lambda p: p.row):
            end = min(first + count, part.row + part.num_rows)
            if not part.row <= row < end:
                continue
            place = out[(row - first) * size : (end - first) * size]
            if part.offset + part.num_rows * size > self._sizes.get(part.file, 0):
                self._note(part, f"{name} would not fit into it")
            elif len(place) == part.num_rows * size:
                self._read(part, name, place)
            else:  # only the sum of the whole part is known
                whole = memoryview(bytearray(part.num_rows * size))
                self._read(part, name, whole)
                place[:] = whole[(row - part.row) * size : (end - part.row) * size]
            row = end
        if row != first + count:
            raise RestoreError(f"{self.folder.name} has {row - first} of {count} rows of {name}")

    def _read(self, part: TensorRows, name: str, out: memoryview) -> None:
        digest, offset = xxhash.xxh3_64(), part.offset
        try:
            handle = self._handle(part.file)
            # Read, not mapped: of a bad disk that is an error, and not the end of the process.
            for block in _blocks(out):
                if os.preadv(handle, [block], offset) != len(block):
                    raise OSError(None, "it ends too early")
                digest.update(block)
                offset += len(block)
        except OSError as error:
            self._note(part, f"it cannot be read: {error.strerror}")
            return
        if digest.hexdigest() != part.xxh3:
            self._note(part, f"{name} is damaged")

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            self._handles[file] = os.open(self.folder / file, os.O_RDONLY | os.O_NOFOLLOW)
        return self._handles[file]

    def __del__(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def _note(self, part: TensorRows, what: str) -> None:
        self.damages.append(f"{self.folder.name}/{part.file} has changed: {what}")


def consolidate(folder: Path, manifest: Manifest) -> Manifest:
    """Write whole tensors to `model.safetensors` and `optimizer.safetensors`, in place of all
    parts."""
    source, files = TensorFiles(folder, manifest), dict(manifest.files)
    tensors: dict[Section, dict[str, TensorEntry]] = {}
    for section in SECTIONS:
        path = folder / f"{section}{SUFFIX}"
        parts = [file for file in files if file.startswith(f"{section}-rank")]
        if len(parts) == 1:
            (folder / parts[0]).rename(path)
            files[path.name] = files.pop(parts[0])
            tensors[section] = _renamed(getattr(manifest, section), path.name)
        else:
            files[path.name], tensors[section] = write_whole(source, section, path)
            for part in parts:
                del files[part]
                (folder / part).unlink()
    sync_directory(folder)
    return Manifest(step=manifest.step, files=files, **tensors)


def _renamed(tensors: dict[str, TensorEntry], file: str) -> dict[str, TensorEntry]:
    return {
        name: entry.model_copy(
            update={"parts": [part.model_copy(update={"file": file}) for part in entry.parts]}
        )
        for name, entry in tensors.items()
    }


def write_whole(source: TensorFiles, section: Section, path: Path) -> Written:
    """Write every tensor of a section, whole, to one file."""
    return write_pieces(path, whole_pieces(source, section))


def whole_pieces(source: TensorFiles, section: Section) -> list[Piece]:
    pieces = [
        Piece(section, name, shape, 0, source.rows(section, name, 0, (*shape, 1)[0]), ())
        for name, shape in source.shapes(section).items()
    ]
    if source.damages:
        raise RestoreError(source.damages)
    return pieces
