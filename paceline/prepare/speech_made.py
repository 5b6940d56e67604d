"""The prepared files and their journal: which are sound already, and which are still to be made.

make_clips(clips, root, sound, kept)       in a process: yields what became of each
load_journal(root / JOURNAL, sound.how)    what earlier runs have made in the same way
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from paceline.errors import DataError
from paceline.prepare.speech_audio import Rendered, Sound, Unusable, render
from paceline.prepare.speech_tables import Row, iter_cells, open_cell
from paceline.prepare.speech_tree import Clip
from paceline.records.base import DAMAGED
from paceline.records.files import open_regular, read_regular

PARTIAL = ".partial"  # where files are written before they are moved into the tree
MAX_JOURNAL_BYTES = 4 << 30
Kept = Mapping[tuple[str, str], "Made"]  # by path and by the stamp of the source


class Made(NamedTuple):
    """A prepared file as the journal keeps it."""

    num_samples: int
    source_s: float
    sha256: str


class Done(NamedTuple):
    """What became of a clip: `made`, now or in a run before, or why not."""

    made: Made | None
    is_new: bool
    reason: str = ""


def make_clips(clips: Sequence[Clip], root: Path, sound: Sound, kept: Kept) -> Iterator[Done]:
    """Yield what became of each clip: kept if the journal's sum is the file's, made otherwise."""
    for clip, cell in zip(clips, _rows_of(clips), strict=False):
        earlier = kept.get((clip.out, clip.stamp))
        if earlier is not None and _sum_of(root / clip.out) == earlier.sha256:
            yield Done(earlier, is_new=False)
            continue
        try:
            with _open(clip, cell) as file:
                rendered = render(file, sound)
                flac = rendered.flac or _read_again(file)
        except Unusable as error:
            yield Done(None, False, str(error))
            continue
        yield Done(_keep(root, clip.out, flac, rendered), is_new=True)


def _rows_of(clips: Sequence[Clip]) -> Iterator[Row | None]:
    """Yield the parquet row of each clip; None for one that is a file, or cannot be read."""
    if clips[0].cell is not None:
        with suppress(OSError, DataError, *DAMAGED):  # pyarrow's errors are of these classes
            yield from iter_cells(clips)
    while True:
        yield None


def _open(clip: Clip, row: Row | None) -> BinaryIO:
    try:
        if row is not None:
            return open_cell(row, clip.path.parent)
        if clip.cell is not None:
            raise Unusable("cannot be read: this part of the table is damaged")
        return open_regular(clip.path, follow=True)
    except (OSError, DataError) as error:
        raise Unusable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_again(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _keep(root: Path, rel: str, flac: bytes, rendered: Rendered) -> Made:
    put_file(root, rel, flac)
    source_s = round(rendered.source_s, 6)
    return Made(rendered.num_samples, source_s, hashlib.sha256(flac).hexdigest())


def put_file(root: Path, rel: str, raw: bytes) -> None:
    """Put a file into the tree, whole. What a power cut leaves of it is found by its sum."""
    temporary = root / PARTIAL / str(os.getpid())
    try:
        temporary.write_bytes(raw)
        os.replace(temporary, root / rel)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(root / rel)) from error


def _sum_of(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, DataError):
        return ""


def journal_line(clip: Clip, how: str, made: Made) -> str:
    body = {"out": clip.out, "stamp": clip.stamp, "how": how, **made._asdict()}
    return json.dumps(body, ensure_ascii=False) + "\n"


def load_journal(path: Path, how: str) -> Kept:
    """Return what was made in this way, by path and stamp of the source. A line that was torn off
    is as if it were not there."""
    found: dict[tuple[str, str], Made] = {}
    try:
        raw = read_regular(path, MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        return found
    for line in raw.split(b"\n"):
        try:
            body = json.loads(line)
            made = Made(int(body["num_samples"]), float(body["source_s"]), str(body["sha256"]))
            if body["how"] == how:
                found[body["out"], body["stamp"]] = made
        except DAMAGED:
            continue
    return found
