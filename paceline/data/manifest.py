"""The manifest of a speech corpus: one table of its files, so that nothing else has to be read.

    save_manifest(path, utterances)          by `paceline prepare speech`
    find_manifest(config.data, os.environ)   before ranks start: where it is
    read_manifest(path, sample_rate)         on every rank: one file, and none of the corpus

It has tabs between its columns, and its rows are sorted by path:

    rel_path  num_samples  duration_sec  transcript  speaker  split  sha256

A manifest from elsewhere may have only the first three columns, and no header. No torch is
imported, so that a config is read quickly.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from paceline.config.schema import DataConfig
from paceline.config.section import Positive
from paceline.errors import ConfigError, DataError
from paceline.records.files import read_text, write_atomic
from paceline.records.words import UNSEEN, count, visible

COLUMNS = ("rel_path", "num_samples", "duration_sec", "transcript", "speaker", "split", "sha256")
NEEDED = COLUMNS[:3]
VARIABLE = "LIBRISPEECH_MANIFEST_PATH"
MANIFEST = "manifest.tsv"  # in the root of what `paceline prepare speech` has made
MAX_BYTES = 4 << 30
MAX_NAMED = 20
MAX_NAME_BYTES = 250  # file systems take 255
DRIVE = re.compile("[A-Za-z]:")
NO_PATH = re.compile(rf"[\t\n\\]|{UNSEEN.pattern}")


class AudioData(DataConfig):
    """The `data` section of workloads that read speech."""

    root_dir: str = Field("", description="The folder that a manifest's paths begin at.")
    manifest_path: str = Field(
        "auto",
        description=f"Its table of files. auto: ${VARIABLE}, or else {MANIFEST} in root_dir.",
    )
    sample_rate: Positive = Field(16000, description="Hz of every file; none is resampled here.")
    train_splits: list[str] = Field(
        ["train*"], description="Splits to train on; * stands for anything."
    )
    val_splits: list[str] = Field(
        ["dev*", "val*"], description="Splits to evaluate on; * stands for anything."
    )


def find_manifest(data: AudioData, environ: Mapping[str, str]) -> Path:
    """Return the manifest to use, as an absolute path: ranks get that one, whatever their own
    environment says."""
    if not data.root_dir:
        raise ConfigError(
            "data.root_dir is not set: there is no folder to read speech from\n"
            "hint: set it to the --output-root of paceline prepare speech"
        )
    root = Path(data.root_dir).expanduser()
    asked = environ.get(VARIABLE, "") if data.manifest_path == "auto" else data.manifest_path
    by = VARIABLE if data.manifest_path == "auto" else "data.manifest_path"
    path = Path(asked).expanduser() if asked else root / MANIFEST
    problems = [] if root.is_dir() else [f"data.root_dir={data.root_dir} is not a folder"]
    if not path.is_file():
        told = f"{by}={asked}" if asked else str(path)
        problems.append(
            f"{told} is not a file\nhint: paceline prepare speech writes a manifest;"
            f" name it with data.manifest_path or {VARIABLE}"
        )
    if problems:
        raise DataError(problems)
    return path.resolve()


class Utterance(NamedTuple):
    """One audio file of a corpus, and all that is known of it without opening it."""

    rel_path: str  # from the corpus's root, with / between folders
    num_samples: int
    duration_s: float
    transcript: str = ""
    speaker: str = ""
    split: str = ""
    sha256: str = ""

    def is_in(self, splits: Sequence[str]) -> bool:
        """Say whether it belongs to one of these splits, which may be patterns: `train-*`. If the
        manifest names none, the first folder is its split."""
        own = self.split or self.rel_path.partition("/")[0]
        return any(fnmatchcase(own, wanted) for wanted in splits)


def save_manifest(path: Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest, whole or not at all."""
    rows = sorted(utterances)
    lines = ["\t".join(COLUMNS)]
    lines += [
        "\t".join([u.rel_path, str(u.num_samples), f"{u.duration_s:.6f}", *map(one_line, u[3:])])
        for u in rows
    ]
    write_atomic(path, "\n".join(lines) + "\n")


def one_line(text: object) -> str:
    """Return a text as one cell: no tab, no line break, nothing that a terminal acts on."""
    return " ".join(UNSEEN.sub(" ", str(text)).split())


def read_manifest(path: Path, sample_rate: int, splits: Sequence[str] = ("*",)) -> list[Utterance]:
    """Return the utterances of these splits in the order of the file. Every row is checked; all
    that are wrong are named at once, with their lines."""
    lines = read_text(path, MAX_BYTES, follow=True).split("\n")
    first = lines[0].rstrip("\r").split("\t")
    has_header = first[0] == NEEDED[0]
    if has_header and tuple(first[:3]) != NEEDED:
        raise DataError(
            f"{path}: the header has the columns {', '.join(map(visible, first))}\n"
            f"hint: the first three of a manifest are {', '.join(NEEDED)}"
        )
    order = [first.index(name) if name in first else None for name in COLUMNS]
    places = order if has_header else [0, 1, 2, None, None, None, None]
    found: dict[str, Utterance] = {}
    problems: list[str] = []
    for number, line in enumerate(lines[has_header:], start=1 + has_header):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        try:
            row = _utterance(cells, places, sample_rate)
            if row.rel_path in found:
                raise ValueError(f"{row.rel_path} stands in an earlier row already")
            found[row.rel_path] = row
        except ValueError as error:
            problems.append(f"{path}:{number}: {visible(str(error))}")
    if problems:
        raise _damaged(path, problems)
    return _of_splits(path, found, splits)


def _utterance(cells: list[str], places: list[int | None], sample_rate: int) -> Utterance:
    if len(cells) < len(NEEDED):
        raise ValueError(f"{count(len(cells), 'column')}, and {len(NEEDED)} are needed")
    name, samples, seconds, *more = (
        cells[place] if place is not None and place < len(cells) else "" for place in places
    )
    name = name.replace("\\", "/")
    if problem := path_problem(name):
        raise ValueError(f"{name!r} {problem}")
    num_samples, duration_s = int(samples), float(seconds)
    if num_samples < 1 or not math.isfinite(duration_s) or duration_s <= 0:
        raise ValueError(f"{samples} samples in {seconds} s is not a length")
    # Six decimals of a second are exact to 0.1 samples at any rate there is.
    if abs(num_samples - duration_s * sample_rate) > 1:
        rate = num_samples / duration_s
        raise ValueError(f"{samples} samples in {seconds} s are {rate:,.0f} Hz, not {sample_rate}")
    return Utterance(name, num_samples, duration_s, *more)


def path_problem(name: str) -> str:
    """Say why a path in a manifest or a list could lead out of its folder; empty if it is
    safe."""
    parts = name.split("/")  # pathlib would take most of the time that a manifest is read in
    if not name.strip("/. "):
        return "is not the path of a file"
    if not parts[0] or DRIVE.match(name):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of its folder"
    if NO_PATH.search(name):
        return "has characters in it that no path in a table can have"
    if len(name) > MAX_NAME_BYTES // 4 and max(len(p.encode()) for p in parts) > MAX_NAME_BYTES:
        return f"has a name of more than {MAX_NAME_BYTES} bytes"
    return ""


def _damaged(path: Path, problems: list[str]) -> DataError:
    more = len(problems) - MAX_NAMED
    told = problems[:MAX_NAMED] + ([f"and {count(more, 'more row')}"] if more > 0 else [])
    hint = "hint: paceline prepare speech writes a manifest of the files that are sound"
    return DataError("\n".join([*told, hint]))


def _of_splits(path: Path, found: dict[str, Utterance], splits: Sequence[str]) -> list[Utterance]:
    chosen = [row for row in found.values() if row.is_in(splits)]
    if chosen:
        return chosen
    there = sorted({row.split or row.rel_path.partition("/")[0] for row in found.values()})
    has = f"it has {', '.join(there[:MAX_NAMED])}" if there else "it has no rows"
    raise DataError(f"{path} lists no file of {', '.join(splits)}: {has}")
