"""What to prepare, from tables: parquet with audio in it, or CSV and JSON lists of files.

    found = scan_tables(root, columns)     the same clips that a folder of files would give
    iter_cells(clips)                      the audio inside a parquet file, a few rows at a time

A parquet row is what Hugging Face's Audio makes: `audio` is {bytes, path}, and text stands beside
it. A list names files, from its own folder; a path that leads out of the input is rejected.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from paceline.data.extras import require_extra
from paceline.data.manifest import one_line, path_problem
from paceline.errors import ConfigError, DataError
from paceline.prepare.speech_audio import Unusable
from paceline.prepare.speech_tree import Cell, Clip, Found, is_inside, scan_tree
from paceline.records.base import DAMAGED
from paceline.records.files import open_regular, read_text
from paceline.records.words import did_you_mean

# Which names a column may have, the likeliest first.
MEANINGS: dict[str, tuple[str, ...]] = {
    "audio": ("audio", "file_name", "audio_filepath", "path", "file", "audio_path", "wav"),
    "text": ("text", "sentence", "transcript", "transcription", "normalized_text"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "split": ("split", "subset"),
}
TABLES = frozenset({".parquet", ".csv", ".tsv", ".json", ".jsonl"})
NOT_LISTS = frozenset({"manifest.tsv", "rejected.tsv", "dataset_infos.json", "dataset_dict.json"})
SHARD = re.compile(r"(.+?)-\d+-of-\d+")
SPLITS = ("train", "validation", "val", "dev", "test", "validated")
MAX_TABLE_BYTES = 2 << 30
BATCH_ROWS = 16  # of a parquet file, in memory at once
Row = Mapping[str, Any]
T = TypeVar("T")
Columns = dict[str, str]


def parse_columns(asked: str) -> Columns:
    """Read `text=sentence,speaker=client_id`: what a column means, and its name."""
    pairs = [pair.partition("=") for pair in asked.split(",") if pair.strip()]
    wrong = [key for key, _, name in pairs if key.strip() not in MEANINGS or not name.strip()]
    if wrong:
        raise ConfigError(
            f"--columns={asked}: {wrong[0]!r} is not MEANING=NAME\n"
            f"hint: {did_you_mean(wrong[0], MEANINGS)}a meaning is one of {', '.join(MEANINGS)}"
        )
    return {key.strip(): name.strip() for key, _, name in pairs}


def scan_tables(root: Path, columns: Columns, max_files: int | None = None) -> Found:
    """List the audio that tables hold or name. A folder without tables is taken as it is.
    `max_files`: only the first tables of each split, or the first audio files of each."""
    files = [root] if root.is_file() else _tables_in(root)
    if not files:
        found = scan_tree(root)
        found.clips = _first_of_each(found.clips, lambda clip: clip.split, max_files)
        return found
    base = root.parent if root.is_file() else root
    found = Found()
    for file in _first_of_each(files, lambda file: _split_of(file, base), max_files):
        if file.suffix.lower() == ".parquet":
            _add_parquet(file, base, columns, found)
        else:
            _add_list(file, base, columns, found)
    return found.settle()


def _first_of_each(things: list[T], kind: Callable[[T], str], most: int | None) -> list[T]:
    """Return the first so many things of each kind; None: all."""
    seen: Counter[str] = Counter()
    kept = []
    for thing in things:
        seen[kind(thing)] += 1
        if most is None or seen[kind(thing)] <= most:
            kept.append(thing)
    return kept


def _tables_in(root: Path) -> list[Path]:
    """Return the parquet files below a folder, or else the lists."""
    inside = root.resolve()
    files = sorted(
        path for path in root.rglob("*")
        if path.suffix.lower() in TABLES and path.name not in NOT_LISTS
        and path.is_file() and is_inside(path, inside)
    )  # fmt: skip
    return [path for path in files if path.suffix.lower() == ".parquet"] or files


def _choose(names: Sequence[str], columns: Columns, file: Path) -> dict[str, str]:
    """Return which column has which meaning; audio must have one."""
    absent = [name for name in columns.values() if name not in names]
    chosen = {
        meaning: next((n for n in (columns.get(meaning), *usual) if n in names), None)
        for meaning, usual in MEANINGS.items()
    }
    if absent or chosen["audio"] is None:
        lacks = f"no column {absent[0]}" if absent else "no column of audio"
        raise DataError(
            f"{file} has {lacks}; it has {', '.join(map(one_line, names))}\n"
            "hint: name its columns: --columns audio=NAME,text=NAME,speaker=NAME,split=NAME"
        )
    return {meaning: name for meaning, name in chosen.items() if name is not None}


def _split_of(file: Path, base: Path) -> str:
    """Return the split that a table's name gives, or else its folder's."""
    stem = shard[1] if (shard := SHARD.fullmatch(file.stem)) else file.stem
    folder = file.relative_to(base).parent.as_posix()
    if shard or stem in SPLITS:
        return stem
    return "" if folder == "." else folder


def _add_list(file: Path, base: Path, columns: Columns, found: Found) -> None:
    rows = list(_read_list(file))
    if not rows:
        raise DataError(f"{file} has no rows")
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    chosen = _choose(names, columns, file)
    folder = file.parent.relative_to(base).as_posix().removeprefix(".")
    for number, row in rows:
        origin = f"{file.relative_to(base).as_posix()}:{number}"
        named = row.get(chosen["audio"])
        path = str(named.get("path") if isinstance(named, dict) else named or "")
        problem, rel = _locate(base, folder, path)
        if problem:
            found.reject(origin, f"{path!r} {problem}")
            continue
        state = (base / rel).stat()
        text, speaker, split = _said(row, chosen)
        found.clips.append(
            Clip(
                out=str(PurePosixPath(rel).with_suffix(".flac")),
                origin=origin,
                path=base / rel,
                stamp=f"{state.st_size}:{state.st_mtime_ns}",
                num_bytes=state.st_size,
                transcript=text,
                speaker=speaker,
                split=split or _split_of(file, base),
            )
        )


def _said(row: Row, chosen: Mapping[str, str]) -> tuple[str, str, str]:
    cells = (row.get(chosen[key]) if key in chosen else "" for key in ("text", "speaker", "split"))
    text, speaker, split = ("" if cell is None else one_line(cell) for cell in cells)
    return text, speaker, split


def _locate(base: Path, folder: str, path: str) -> tuple[str, str]:
    """Find the file that a row names, inside `base`: return what is wrong, or its path from there.
    Common Voice's lists name files of a folder `clips` beside them."""
    for place in (folder, f"{folder}/clips".lstrip("/")):
        rel = f"{place}/{path}" if place else path
        if problem := path_problem(path) or path_problem(rel):
            return problem, ""
        target = base / rel
        if not is_inside(target, base.resolve()):
            return "is a link that leads out of the input", ""
        if target.is_file():
            return "", PurePosixPath(rel).as_posix()
    return "is not a file", ""


def _read_list(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield rows with the lines, or of a JSON list the places, where they stand."""
    text = read_text(file, MAX_TABLE_BYTES, follow=True)
    suffix, number = file.suffix.lower(), 0
    try:
        if suffix in (".csv", ".tsv"):
            lines = io.StringIO(text, newline="")
            reader = (
                csv.DictReader(lines, restkey="+")
                if suffix == ".csv"  # the others, as Common Voice's, have quotes as they come
                else csv.DictReader(lines, restkey="+", delimiter="\t", quoting=csv.QUOTE_NONE)
            )
            for row in reader:
                number = reader.line_num
                yield number, row
            return
        # One document, or one to a line.
        is_list = text.lstrip().startswith("[")
        bodies: Iterable[Any] = json.loads(text) if is_list else text.split("\n")
        for number, body in enumerate(bodies, start=1):
            if isinstance(body, str) and not body.strip():
                continue
            parsed = json.loads(body) if isinstance(body, str) else body
            if not isinstance(parsed, dict):
                raise ValueError("not a map of columns")
            yield number, parsed
    except (csv.Error, *DAMAGED) as error:
        raise DataError(
            f"{file}:{number} is not a row: {error}\n"
            "hint: JSON is a list of maps, or one map to a line; CSV has a header; where a folder"
            " holds other files too, give the one table as --input-root"
        ) from error


def _add_parquet(file: Path, base: Path, columns: Columns, found: Found) -> None:
    opened = _open_parquet(file)
    chosen = _choose(opened.schema_arrow.names, columns, file)
    audio = chosen.pop("audio")
    labels, stems = _read_labels(opened, file, audio, list(chosen.values()))
    often = Counter(stems)
    state, default = file.stat(), _split_of(file, base)
    name, num_bytes = file.relative_to(base).as_posix(), state.st_size // max(1, len(stems))
    for number, (stem, cell) in enumerate(zip(stems, _cells(opened, audio), strict=True)):
        row = {key: label[number] for key, label in labels.items()}
        text, speaker, split = _said(row, chosen)
        split = split or default
        own = stem if stem and often[stem] == 1 else f"{stem or file.stem}-{number:06d}"
        out = f"{split}/{own}.flac" if split else f"{own}.flac"
        origin = f"{name}:{number}"
        if problem := path_problem(out):
            found.reject(origin, f"{out!r} {problem}")
            continue
        stamp = f"{state.st_size}:{state.st_mtime_ns}:{number}:{audio}"
        found.clips.append(
            Clip(out, origin, file, stamp, num_bytes, text, speaker, split, cell=cell)
        )


def _cells(opened: Any, audio: str) -> Iterator[Cell]:
    for group in range(opened.metadata.num_row_groups):
        for row in range(opened.metadata.row_group(group).num_rows):
            yield Cell(audio, group, row)


def _read_labels(
    opened: Any, file: Path, audio: str, names: list[str]
) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns beside the audio, and what the files in it are called."""
    kind = opened.schema_arrow.field(audio).type
    fields = {kind.field(n).name for n in range(kind.num_fields)}
    if "bytes" not in fields:
        raise DataError(
            f"{file}: column {audio} is {kind}, not {{bytes, path}}\n"
            "hint: a table of paths is read from CSV or JSON; --columns audio=NAME names another"
        )
    inner = [f"{audio}.path"] if "path" in fields else []
    try:
        read: dict[str, list[Any]] = opened.read([*names, *inner], use_threads=False).to_pydict()
    except (OSError, *DAMAGED) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    cells = read.pop(audio, None) or [None] * opened.metadata.num_rows
    return read, [_stem(cell.get("path") if cell else None) for cell in cells]


def _stem(path: object) -> str:
    """Return what a row's file is called, without folders: they are those of the machine that wrote
    it."""
    name = PurePosixPath(str(path).replace("\\", "/")).name if path else ""
    return one_line(PurePosixPath(name).stem) if name not in ("", ".", "..") else ""


def _open_parquet(file: Path) -> Any:
    parquet = require_extra("pyarrow.parquet", "audio")
    try:
        return parquet.ParquetFile(file)
    except (OSError, *DAMAGED) as error:  # pyarrow's own errors are of these classes
        raise DataError(f"cannot read {file}: {error}") from error


def iter_cells(clips: Sequence[Clip]) -> Iterator[Row]:
    """Yield {bytes, path} of clips that lie in one row group, in the order of their rows."""
    cells = [clip.cell for clip in clips if clip.cell is not None]
    wanted = {cell.row for cell in cells}
    file, (column, group, _) = clips[0].path, cells[0]
    batches = _open_parquet(file).iter_batches(
        batch_size=BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False
    )
    row = 0
    for batch in batches:
        for value in batch.column(0):
            if row in wanted:
                yield value.as_py() or {}
            row += 1


def open_cell(value: Row, folder: Path) -> BinaryIO:
    """Open the audio of a row; one without bytes names a file, from the folder of its table."""
    if value.get("bytes") is not None:
        return io.BytesIO(value["bytes"])
    path = str(value.get("path") or "")
    problem, rel = _locate(folder, "", path)
    if problem:
        raise Unusable(f"no bytes, and {path!r} {problem}")
    return open_regular(folder / rel, follow=True)
