"""What to prepare, from folders: audio files in LibriSpeech's layout or any other, as clips.

    found = scan_tree(root)       clips, transcripts to copy, and what is not taken, with its reason

Nothing is opened but transcripts. Links are followed only to files inside the root; archives are
never opened: what is in them could lead anywhere, or be a thousand times as large.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from paceline.data.manifest import path_problem
from paceline.errors import DataError
from paceline.records.files import read_text
from paceline.records.words import count

AUDIO = frozenset({".flac", ".wav", ".ogg", ".oga", ".opus", ".mp3"})
ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip", ".7z", ".rar")
MAX_TEXT_BYTES = 256 << 20
UTTERANCE = re.compile(r"(\d+)-(\d+)-\d+")  # speaker, chapter, number: LibriSpeech's names


class Cell(NamedTuple):
    """Where in a parquet file a clip's bytes are: column, row group, and row of that."""

    column: str
    group: int
    row: int


class Clip(NamedTuple):
    """One audio file to prepare. `stamp` changes when the source does."""

    out: str  # the path to write to, from the output root
    origin: str  # what people know the source by
    path: Path
    stamp: str
    num_bytes: int
    transcript: str = ""
    speaker: str = ""
    split: str = ""
    cell: Cell | None = None  # where `path` is a parquet file


class Reject(NamedTuple):
    """Something that is not taken, and why."""

    origin: str
    reason: str


@dataclass
class Found:
    """All that a scan has found, in no fixed order."""

    clips: list[Clip] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    texts: list[tuple[Path, str]] = field(default_factory=list)  # files to copy, and where to
    notes: list[str] = field(default_factory=list)

    def settle(self) -> "Found":
        """Sort the clips; of several that would be written to one file the first one stays."""
        taken: dict[str, Clip] = {}
        lowest = {clip.out.rpartition("/")[0] for clip in self.clips} - {""}
        folders = lowest | {str(above) for one in lowest for above in PurePosixPath(one).parents}
        for clip in sorted(self.clips):
            if clip.out in folders:
                self.reject(clip.origin, f"would be written to {clip.out}, which is a folder")
            elif clip.out in taken:
                first = taken[clip.out].origin
                self.reject(clip.origin, f"would be written to {clip.out}, as {first} is")
            else:
                taken[clip.out] = clip
        self.clips = list(taken.values())
        return self

    def reject(self, origin: str, reason: str) -> None:
        self.rejects.append(Reject(origin, reason))


def scan_tree(root: Path) -> Found:
    """List a folder's audio with what its transcripts and names say of it."""
    found = Found()
    texts: dict[tuple[str, str], Path] = {}  # by folder and utterance
    spoken: dict[tuple[str, str], str] = {}
    audio: list[tuple[str, os.DirEntry[str]]] = []
    archives: list[str] = []
    for entry, rel in _walk(root, found):
        path = PurePosixPath(rel)
        if path.suffix.lower() == ".txt":
            found.texts.append((Path(entry.path), rel))
            texts[_key(path)] = Path(entry.path)
            if path.name.lower().endswith(".trans.txt"):
                spoken |= _read_lines(Path(entry.path), path, found)
        elif path.suffix.lower() in AUDIO:
            audio.append((rel, entry))
        elif rel.lower().endswith(ARCHIVES):
            archives.append(rel)
    for rel, entry in audio:
        key = _key(PurePosixPath(rel))
        if key not in spoken and key in texts:
            spoken[key] = _read(texts[key], f"{rel}'s transcript", found)
        found.clips.append(_clip(rel, entry, spoken.get(key, "")))
    if archives:
        several = f"{count(len(archives), 'archive')} not read: unpack what you need of it"
        found.notes.append(f"{several} ({', '.join(sorted(archives)[:3])})")
    return found.settle()


def _key(path: PurePosixPath) -> tuple[str, str]:
    return str(path.parent), path.stem


def _walk(root: Path, found: Found) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield every file below the root with its path from there; reject what must not be read."""
    inside = root.resolve()
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in sorted(_list(root / folder), key=lambda entry: entry.name):
            rel = f"{folder}/{entry.name}".lstrip("/")
            if problem := path_problem(rel):
                found.reject(ascii(rel), problem)
            elif entry.is_symlink() and not is_inside(entry.path, inside):
                found.reject(rel, "a link that leads out of the input root")
            elif entry.is_dir(follow_symlinks=False):
                folders.append(rel)
            elif os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file():
                yield entry, rel
            elif entry.is_symlink() or PurePosixPath(rel).suffix.lower() in AUDIO:
                found.reject(rel, "not a file")


def is_inside(path: str | Path, folder: Path) -> bool:
    """Tell whether a path stays in a folder, which is resolved, when its links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(folder)  # which takes a loop of links too


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}") from error


def _read_lines(path: Path, rel: PurePosixPath, found: Found) -> dict[tuple[str, str], str]:
    """Return what was said by folder and utterance, from lines of `ID text`."""
    lines = (line.strip().partition(" ") for line in _read(path, str(rel), found).split("\n"))
    return {(str(rel.parent), key): said.strip() for key, _, said in lines if key}


def _read(path: Path, origin: str, found: Found) -> str:
    try:
        return read_text(path, MAX_TEXT_BYTES, follow=True)
    except DataError as error:
        found.reject(origin, str(error).partition("\n")[0])
        return ""


def _clip(rel: str, entry: os.DirEntry[str], transcript: str) -> Clip:
    path, state = PurePosixPath(rel), entry.stat()
    speaker, split = who_and_where(path)
    return Clip(
        out=str(path.with_suffix(".flac")),
        origin=rel,
        path=Path(entry.path),
        stamp=f"{state.st_size}:{state.st_mtime_ns}",
        num_bytes=state.st_size,
        transcript=transcript,
        speaker=speaker,
        split=split,
    )


def who_and_where(path: PurePosixPath) -> tuple[str, str]:
    """Return speaker and split as LibriSpeech's paths name them, SPLIT/SPEAKER/CHAPTER/ID; of any
    other tree the first folder is the split."""
    named = UTTERANCE.fullmatch(path.stem)
    if named and path.parts[-3:-1] == named.groups():
        return named[1], path.parts[-4] if len(path.parts) > 3 else ""
    return "", path.parts[0] if len(path.parts) > 1 else ""


def require_tree(root: Path, kinds: Iterable[str] = ()) -> None:
    """Refuse an input that is not there, or is an archive."""
    if root.name.lower().endswith(ARCHIVES):
        raise DataError(
            f"--input-root={root} is an archive, and archives are not unpacked here\n"
            "hint: unpack it (tar -xf, unzip) into a folder and give that"
        )
    is_table = root.is_file() and root.suffix.lower() in kinds
    if not root.is_dir() and not is_table:
        takes = f" or a file of {', '.join(sorted(kinds))}" if kinds else ""
        raise DataError(f"--input-root={root} is not a folder{takes}")
