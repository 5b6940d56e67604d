"""Sources of images: folders, lists, WebDataset tars and parquet files.

    found = look_through(path, columns)      kind, files, and an iterator of places
    read_place(found, place)                 the bytes of one image

Nothing is unpacked to disk, and no link inside a tar is followed. pyarrow is an extra.
"""

import csv
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from paceline.data.extras import require_extra
from paceline.errors import DataError
from paceline.records.files import open_regular, read_regular, read_text

SUFFIXES = frozenset("jpg jpeg png webp bmp gif tif tiff ppm pgm".split())
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
MAX_IMAGE_BYTES = 256 << 20
MAX_GROUP_BYTES = 2 << 30
MAX_LIST_BYTES = 1 << 30
MAX_LABEL_BYTES, MAX_LABEL = 64, 1 << 62
BLOCK = 512  # of a tar
PATH_COLUMNS = ("path", "file", "file_name", "image")
Kind = Literal["files", "tar", "parquet"]


class Columns(NamedTuple):
    """Which columns of parquet files and lists hold image and label."""

    image: str
    label: str


class Place(NamedTuple):
    """One image. `first` and `length` are bytes of a tar, or row group and row of a parquet file;
    `file` is its number among the source's; a file that is an image is known by its name alone."""

    name: str
    label: int | str | None
    file: int = 0
    first: int = 0
    length: int = 0


@dataclass(frozen=True)
class Source:
    """What is at a path. Names of files are relative to `root`; `files` are tars or parquet files,
    or the images themselves."""

    path: Path
    root: Path
    kind: Kind
    files: list[Path]
    listed: list[Place] | None = None  # by a CSV

    def places(self, columns: Columns) -> Iterator[Place]:
        """Yield every image, in an order that depends on names alone."""
        if self.listed is not None:
            yield from self.listed
            return
        for number, file in enumerate(self.files):
            if self.kind == "files":
                yield _file_place(file.relative_to(self.root))
            elif self.kind == "tar":
                yield from _tar_places(file, number)
            else:
                yield from _parquet_places(file, number, columns)


def look_through(path: Path, columns: Columns) -> Source:
    """Find out what kind of source lies at `path`, and which files it has."""
    if path.is_dir():
        return _folder(path)
    kind = _kind_of(path)
    if not path.exists():
        raise DataError(f"{path} does not exist\nhint: give a folder of images, tars or parquet")
    if path.suffix.lower() == ".csv":
        return Source(path, path.parent, "files", [path], _list_places(path, columns))
    if kind not in ("tar", "parquet"):
        raise DataError(
            f"{path} is not a source of images{_why_packed(path)}\n"
            "hint: give a folder of images, a .tar, a .parquet file, a .csv that lists images, or a"
            " folder of .tar or .parquet files"
        )
    return Source(path, path.parent, kind, [path])


def _folder(root: Path) -> Source:
    by_kind: dict[Kind, list[Path]] = {"files": [], "tar": [], "parquet": []}
    packed, walked = [], {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, followlinks=True):
        inner = {name: os.path.realpath(Path(folder, name)) for name in sorted(subfolders)}
        # Links to folders are followed, but each folder is walked once: links may lead in circles.
        new = {name: real for name, real in inner.items() if real not in walked}
        walked |= set(new.values())
        subfolders[:] = [name for name in new if not name.startswith(".")]
        for name in sorted(names):
            kind = _kind_of(Path(name))
            if kind is not None and not name.startswith("."):
                by_kind[kind].append(Path(folder, name))
            elif _why_packed(Path(name)):
                packed.append(name)
    found = {kind: files for kind, files in by_kind.items() if files}
    if not found:
        reason = f"; {packed[0]}{_why_packed(Path(packed[0]))}" if packed else ""
        raise DataError(f"{root} holds no images, .tar or .parquet files{reason}")
    if len(found) > 1:
        shown = ", ".join(f"{len(files)} such as {files[0].name}" for files in found.values())
        raise DataError(
            f"{root} holds more than one kind of source: {shown}\nhint: keep them in folders of"
            " their own, and name one"
        )
    [(kind, files)] = found.items()
    return Source(root, root, kind, sorted(files))


def _kind_of(path: Path) -> Kind | None:
    suffix = path.suffix.lower().removeprefix(".")
    if suffix in SUFFIXES:
        return "files"
    return "tar" if suffix == "tar" else "parquet" if suffix == "parquet" else None


def _why_packed(path: Path) -> str:
    if not path.name.lower().endswith(PACKED):
        return ""
    return " is compressed, and cannot be read from the middle: unpack it to a plain .tar"


def _file_place(name: Path) -> Place:
    """Take the first folder for the class, as is usual: class/anything.jpg."""
    return Place(name.as_posix(), name.parts[0] if len(name.parts) > 1 else None)


def _list_places(path: Path, columns: Columns) -> list[Place]:
    rows = csv.DictReader(io.StringIO(read_text(path, MAX_LIST_BYTES, follow=True)))
    try:
        return list(_rows_of_list(path, rows, columns))
    except csv.Error as error:
        raise DataError(f"{path}:{rows.line_num} is not CSV: {error}") from error


def _rows_of_list(path: Path, rows: "csv.DictReader[str]", columns: Columns) -> Iterator[Place]:
    names = [name for name in (*PATH_COLUMNS, columns.image) if name in (rows.fieldnames or ())]
    if not names:
        raise DataError(
            f"{path} has no column of paths: its first line is {list(rows.fieldnames or ())}\n"
            f"hint: call the column {PATH_COLUMNS[0]}"
        )
    for row in rows:
        if not row[names[0]]:
            raise DataError(f"{path}:{rows.line_num} names no file in column {names[0]}")
        yield Place(row[names[0]], _number(row.get(columns.label)))


def _number(text: str | None) -> int | str | None:
    """Return a label as a number if it is one, else as the class's name."""
    try:
        number = int(text) if text else None
    except ValueError:
        return text
    return text if number is not None and abs(number) > MAX_LABEL else number


def _label(path: Path, value: Any) -> int | str | None:
    """Return a label of a parquet file: a number, a name, or none."""
    if value is None or isinstance(value, str) or (isinstance(value, int) and value <= MAX_LABEL):
        return value
    raise DataError(
        f"{path} has a label that is neither a number nor a name: {str(value)[:60]!r}\n"
        "hint: data.label_column names the column of labels"
    )


def _tar_places(path: Path, number: int) -> Iterator[Place]:
    """Yield the images of a WebDataset tar. Members of one sample share what is before the first
    dot of their name; KEY.cls holds the label."""
    labels: dict[str, int | str | None] = {}
    images: list[tuple[str, str, int, int]] = []
    for member, content in _members(path):
        folder, _, base = member.name.rpartition("/")
        stem, _, kind = base.partition(".")
        key = f"{folder}/{stem}"
        if kind.lower() in SUFFIXES and stem:  # ._a.png and the like are not images
            images.append((key, member.name, member.offset_data, member.size))
        elif kind == "cls":
            labels[key] = _number(content(member).decode(errors="replace").strip())
    for key, name, first, size in images:
        yield Place(name, labels.get(key), number, first, size)


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, Any]]:
    """Yield the plain files of a tar, and a function that reads a small one. Every byte up to the
    end mark must be accounted for: Python's reader takes a damaged header for the end."""
    try:
        with open_regular(path, follow=True) as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            size, before = os.fstat(raw.fileno()).st_size, -1
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                _require_plain(path, member, size)
                if tar.offset <= before:
                    raise DataError(f"{path} is damaged: its members overlap")
                before = tar.offset
                if member.isreg():
                    yield member, lambda m: os.pread(raw.fileno(), MAX_LABEL_BYTES, m.offset_data)
            if os.pread(raw.fileno(), BLOCK, tar.offset).strip(b"\0"):
                raise DataError(f"{path} is damaged: there is no header at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error


def _require_plain(path: Path, member: tarfile.TarInfo, num_bytes: int) -> None:
    what = f"{path}: member {member.name}"
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise DataError(f"{what} is a link, a device or sparse\nhint: pack plain files only")
    if not 0 <= member.size <= MAX_IMAGE_BYTES and member.isreg():
        raise DataError(f"{what} has {member.size} bytes; at most {MAX_IMAGE_BYTES} are read")
    if member.offset_data + member.size > num_bytes:
        raise DataError(f"{what} is cut off: the file ends before it")


def _parquet_places(path: Path, number: int, columns: Columns) -> Iterator[Place]:
    parquet, pyarrow = (
        require_extra("pyarrow.parquet", "images"),
        require_extra("pyarrow", "images"),
    )
    try:
        with parquet.ParquetFile(path) as file:
            _require_column(path, file, columns)
            has_labels = columns.label in file.schema_arrow.names
            row = 0
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                if facts.total_byte_size > MAX_GROUP_BYTES:
                    raise DataError(
                        f"{path}: row group {group} has {facts.total_byte_size} bytes, and one is"
                        " read whole for each image\nhint: write smaller row groups"
                    )
                labels: list[int | str | None] = [None] * facts.num_rows
                if has_labels:
                    read = file.read_row_group(group, columns=[columns.label], use_threads=False)
                    labels = [_label(path, label) for label in read.column(0).to_pylist()]
                for at, label in enumerate(labels):
                    yield Place(f"{path.name}:{row}", label, number, group, at)
                    row += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _require_column(path: Path, file: Any, columns: Columns) -> None:
    names = file.schema_arrow.names
    if columns.image not in names:
        raise DataError(
            f"{path} has no column {columns.image!r}; it has {', '.join(names)}\n"
            "hint: data.image_column names the one that holds images"
        )


def read_place(source: Source, place: Place, columns: Columns) -> bytes:
    """Return the bytes of one image; `DataError` if they are not there."""
    try:
        if source.kind == "files":
            return read_regular(source.root / place.name, MAX_IMAGE_BYTES, follow=True)
        path = source.files[place.file]
        if source.kind == "parquet":
            return _parquet_bytes(str(path), place, columns)
        with open_regular(path, follow=True) as file:
            return os.pread(file.fileno(), place.length, place.first)
    except (OSError, ValueError) as error:  # also a name with a zero byte, or damaged parquet
        raise DataError(f"{describe(source, place)} cannot be read: {error}") from error


def _parquet_bytes(path: str, place: Place, columns: Columns) -> bytes:
    images = _row_group(path, place.first, columns.image, os.getpid())
    found = images[place.length].as_py()
    raw = found.get("bytes") if isinstance(found, dict) else found
    if not isinstance(raw, bytes):
        has = f"only the path {found.get('path')!r}" if isinstance(found, dict) else "none"
        raise DataError(f"{path}, row {place.name.rpartition(':')[2]} holds no bytes: {has}")
    return raw


@lru_cache(maxsize=2)
def _row_group(path: str, group: int, column: str, process: int) -> Any:
    """Read one column of a row group; the last two are cached. `process` is part of the cache key:
    what a parent has read belongs to threads that a forked child does not have."""
    with require_extra("pyarrow.parquet", "images").ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column], use_threads=False).column(0)


def describe(source: Source, place: Place) -> str:
    """Name an image so that a person can find it."""
    if source.kind == "files":
        return str(source.root / place.name)
    file = source.files[place.file]
    if source.kind == "tar":
        return f"{file}, member {PurePosixPath(place.name)}"
    return f"{file}, row {place.name.rpartition(':')[2]}"
