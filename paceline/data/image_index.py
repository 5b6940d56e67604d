"""The list of a source's images, made once and kept in the cache: the n-th image, for any n.

    home = keep_index(asked, say, why_bad)    before ranks start, or by whichever rank is first
    index = ImageIndex(home)                  on every rank: memory-mapped, the source is not listed
    index.ids("train", val_fraction=0.1)      numbers of the images of a split

An image belongs to train or to validation by the hash of its name, so neither changes when files
are added.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.extras import require_extra
from paceline.data.image_sources import (
    Columns,
    Kind,
    Place,
    Source,
    describe,
    look_through,
    read_place,
)
from paceline.errors import DataError, DiskError
from paceline.records import Record
from paceline.records.files import FileLock, sync_directory
from paceline.records.words import size

MANIFEST, SAMPLES, NAMES = "images.json", "samples.npy", "names.bin"
SAMPLE = np.dtype(
    [("file", "<i4"), ("first", "<i8"), ("length", "<i8"), ("label", "<i8"), ("draw", "<f8"),
     ("name_end", "<i8")]
)  # fmt: skip
NO_LABEL = -1
LARGE_GROUP = 64 << 20
CHECKED_AT_ONCE = 256
MAX_NAMED = 8
Say = Callable[[str], None]
WhyBad = Callable[[bytes], str]  # why bytes are not an image; empty where they are one


@dataclass(frozen=True)
class ImageQuery:
    """Which images: where they lie, and how many corrupt ones may be left out. "off": none is
    decoded before it is needed."""

    path: str
    columns: Columns
    cache_dir: str
    max_bad: Literal["off"] | int = "off"


class Manifest(Record):
    """What the list holds, beside the samples themselves."""

    source: str
    root: str
    kind: Kind
    image_column: str
    label_column: str
    files: list[str]
    classes: list[str]
    num_samples: int
    num_bad: int
    sha256: str


class ImageIndex:
    """The images of one source, by number."""

    def __init__(self, home: Path) -> None:
        self.manifest = found = Manifest.load(home / MANIFEST)
        try:
            self.samples = np.load(home / SAMPLES, mmap_mode="r", allow_pickle=False)
            self.names = np.memmap(home / NAMES, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(
                f"{home} is damaged: {error}\nhint: delete it: it is made anew"
            ) from error
        if self.samples.dtype != SAMPLE or len(self.samples) != found.num_samples:
            raise DataError(f"{home / SAMPLES} is damaged\nhint: delete {home}: it is made anew")
        self.columns = Columns(found.image_column, found.label_column)
        files = [Path(file) for file in found.files]
        self.source = Source(Path(found.source), Path(found.root), found.kind, files)
        self.fingerprint = found.sha256[:16]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def classes(self) -> list[str]:
        return self.manifest.classes

    def ids(self, split: str, val_fraction: float) -> NDArray[np.int64]:
        """Return the numbers of a split's images: all, or those whose draw falls to it."""
        draws = np.asarray(self.samples["draw"])
        taken = draws < val_fraction if split == "val" else draws >= val_fraction
        return np.flatnonzero(taken).astype(np.int64)

    def place(self, number: int) -> Place:
        row = self.samples[number]
        begin = int(self.samples[number - 1]["name_end"]) if number else 0
        name = self.names[begin : int(row["name_end"])].tobytes().decode(errors="surrogateescape")
        return Place(
            name, int(row["label"]), int(row["file"]), int(row["first"]), int(row["length"])
        )

    def read(self, number: int) -> bytes:
        return read_place(self.source, self.place(number), self.columns)

    def describe(self, number: int) -> str:
        return describe(self.source, self.place(number))


def is_index(path: Path) -> bool:
    return (path / MANIFEST).is_file() and (path / SAMPLES).is_file()


def keep_index(asked: ImageQuery, say: Say, why_bad: WhyBad) -> Path:
    """Return the folder of the list, and make it if it is not there; safe to call from any process.
    A path that is such a folder already is returned as it is."""
    path = Path(asked.path).expanduser().absolute()
    if is_index(path):
        return path
    source = look_through(path, asked.columns)
    home = _home(asked, source)
    if is_index(home):
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(home.with_suffix(".lock")):  # two processes never build the same list
            if not is_index(home):
                _build(asked, source, home, say, why_bad)
    except OSError as error:
        told = f"cannot keep the list of images in data.cache_dir={asked.cache_dir}: {error}"
        if DiskError.is_meant(error):
            raise DiskError(f"{told}\nhint: free space there, or set data.cache_dir") from error
        raise DataError(told) from error
    return home


def _home(asked: ImageQuery, source: Source) -> Path:
    """Return where the list of this source lies: another name when a file, or how it is read,
    changes."""
    digest = hashlib.sha256(f"{Manifest.SCHEMA}:{asked.columns}:{asked.max_bad}".encode())
    for file in source.files:
        facts = file.stat()
        digest.update(f"{file}:{facts.st_size}:{facts.st_mtime_ns}\n".encode(errors="replace"))
    name = f"{source.path.stem}-{digest.hexdigest()[:16]}"
    return Path(asked.cache_dir).expanduser().absolute() / "images" / name


def _build(asked: ImageQuery, source: Source, home: Path, say: Say, why_bad: WhyBad) -> None:
    """Write the list aside, then rename: a kill leaves nothing half done."""
    say(f"listing the images of {source.path}")
    places = list(source.places(asked.columns))
    bad: list[str] = []
    if asked.max_bad != "off":
        say(f"decoding {len(places):,} images once, to find corrupt ones (data.max_bad)")
        places = list(_sound(source, places, asked.columns, bad, why_bad))
        _require_few(bad, asked.max_bad, say)
    if not places:
        raise DataError(f"{source.path} holds no images")
    samples, names, classes = _table(places)
    aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}."))
    try:
        np.save(aside / SAMPLES, samples, allow_pickle=False)
        (aside / NAMES).write_bytes(names)
        Manifest(
            source=str(source.path),
            root=str(source.root),
            kind=source.kind,
            image_column=asked.columns.image,
            label_column=asked.columns.label,
            files=[] if source.kind == "files" else [str(file) for file in source.files],
            classes=classes,
            num_samples=len(samples),
            num_bad=len(bad),
            sha256=hashlib.sha256(samples.tobytes() + names).hexdigest(),
        ).save(aside / MANIFEST)
        shutil.rmtree(home, ignore_errors=True)  # of an older kind, or damaged
        os.replace(aside, home)
        sync_directory(home.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say(f"{len(samples):,} images{_in_groups(source)}")


def _in_groups(source: Source) -> str:
    """Warn about large row groups: reading one image means reading the whole group."""
    if source.kind != "parquet":
        return ""
    facts = require_extra("pyarrow.parquet", "images").read_metadata(source.files[0])
    largest = max(
        (facts.row_group(n).total_byte_size for n in range(facts.num_row_groups)), default=0
    )
    if largest < LARGE_GROUP:
        return ""
    return (
        f"; a row group is read whole for each, {size(largest)}: smaller ones, or tars, are faster"
    )


def _sound(
    source: Source, places: Sequence[Place], columns: Columns, bad: list[str], why_bad: WhyBad
) -> Iterator[Place]:
    """Yield the images that can be decoded; name the others in `bad`. Decoders run in parallel
    threads: they are C code that releases the interpreter's lock."""

    def judge(place: Place) -> str:
        try:
            return why_bad(read_place(source, place, columns))
        except DataError as error:
            return str(error)

    left = iter(places)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        while some := list(islice(left, CHECKED_AT_ONCE)):
            for place, reason in zip(some, threads.map(judge, some), strict=True):
                if reason:
                    bad.append(f"{describe(source, place)}: {reason}")
                else:
                    yield place


def _require_few(bad: list[str], max_bad: int, say: Say) -> None:
    more = f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
    shown = "\n".join(f"  {name}" for name in bad[:MAX_NAMED]) + more
    if len(bad) > max_bad:
        raise DataError(
            f"{len(bad)} images cannot be decoded, and data.max_bad allows {max_bad}:\n{shown}"
        )
    if bad:
        say(f"left out {len(bad)} images that cannot be decoded:\n{shown}")


def _table(places: Sequence[Place]) -> tuple[NDArray[Any], bytes, list[str]]:
    """Return places as rows, their names one after the other, and the names of classes. Labels are
    numbers as they are, or places in the sorted list of all classes where one is a word."""
    words = any(isinstance(place.label, str) for place in places)
    known = (
        sorted({str(place.label) for place in places if place.label is not None}) if words else []
    )
    numbers = {name: number for number, name in enumerate(known)}
    rows, names, end = [], [], 0
    for place in places:
        raw = place.name.encode(errors="surrogateescape")
        names.append(raw)
        end += len(raw)
        label = numbers[str(place.label)] if words and place.label is not None else place.label
        draw = int.from_bytes(hashlib.sha256(raw).digest()[:8], "little") / 2**64
        given = NO_LABEL if label is None else label
        rows.append((place.file, place.first, place.length, given, draw, end))
    return np.array(rows, dtype=SAMPLE), b"".join(names), known
