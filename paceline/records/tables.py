"""The CSV files of a run: one list of columns for who writes them and who reads them.

Columns have names, never positions. A file of another version may have fewer columns or more:
what is missing reads as empty, what is unknown is left alone, and nothing is dropped.
"""

import csv
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.records.columns import Kind, Layout, Row, Table
from paceline.records.files import write_atomic
from paceline.records.phases import STEP_PHASES, Phase
from paceline.records.words import from_cell, text_cell

Cell = str | float | None  # and so int and bool
CHUNK_LETTERS = 2**21
EMPTY = -1e308  # stands for an empty cell while numbers are parsed: no measurement gives it
WRITTEN, FAILED = "ok", "failed"  # outcomes of a checkpoint


@dataclass(frozen=True, slots=True)
class TrainingRow:
    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    skipped: bool
    warmup: bool
    val_loss: float | None


@dataclass(frozen=True, slots=True)
class StepRow:
    """Phase times of one step of one rank, in seconds."""

    step: int
    warmup: bool
    wall_s: float
    phases_s: dict[Phase, float]
    unaccounted_s: float


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    time: float
    source: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    step: int
    reason: str
    num_bytes: int
    stall_s: float
    duration_s: float
    is_written: bool


MEASURES = (
    "utilisation_percent", "memory_bytes", "clock_mhz", "power_w", "temperature_c", "rss_bytes",
)  # fmt: skip
TRAINING = Layout(
    {
        "step": int, "loss": float, "lr": float, "grad_norm": float, "step_s": float,
        "samples_per_s": float, "tokens_per_s": float, "skipped": bool, "warmup": bool,
        "val_loss": float,
    },
    lambda cells: TrainingRow(**cells),
    frozenset({"tokens_per_s", "val_loss"}),
)  # fmt: skip
STEPS = Layout(
    {"step": int, "warmup": bool, "wall_s": float}
    | {phase.column: float for phase in STEP_PHASES}
    | {"unaccounted_s": float},
    lambda cells: StepRow(
        cells["step"],
        cells["warmup"],
        cells["wall_s"],
        {phase: cells[phase.column] or 0.0 for phase in STEP_PHASES},
        cells["unaccounted_s"],
    ),
    frozenset(phase.column for phase in STEP_PHASES),
)
SAMPLES = Layout({"step": int, "microbatch": int, "sample_ids": str}, lambda cells: cells)
CHECKPOINTS = Layout(
    {
        "step": int, "reason": str, "mode": str, "state": str, "num_bytes": int, "stall_s": float,
        "duration_s": float, "outcome": str, "error": str,
    },
    lambda cells: CheckpointRow(
        cells["step"], cells["reason"], cells["num_bytes"], cells["stall_s"], cells["duration_s"],
        cells["outcome"] == WRITTEN,
    ),
)  # fmt: skip
TELEMETRY = Layout(
    {"time": float, "source": str} | dict.fromkeys(MEASURES, float),
    lambda cells: TelemetryRow(
        cells["time"], cells["source"], {n: cells[n] for n in MEASURES if cells[n] is not None}
    ),
    frozenset(MEASURES),
)


def read_training(path: Path) -> Table[TrainingRow]:
    return read_table(path, TRAINING)


def read_steps(path: Path) -> Table[StepRow]:
    return read_table(path, STEPS)


def read_telemetry(path: Path) -> Table[TelemetryRow]:
    return read_table(path, TELEMETRY)


def read_checkpoints(path: Path) -> Table[CheckpointRow]:
    return read_table(path, CHECKPOINTS)


def read_table(path: Path, layout: Layout[Row]) -> Table[Row]:
    """Read the rows of a file; none where it is absent. A row that was cut off, because a run was
    killed inside its line, is not one."""
    values: dict[str, list[NDArray[Any]]] = {
        name: [np.empty(0, _dtype(kind))] for name, kind in layout.columns.items()
    }
    gaps: dict[str, list[NDArray[np.bool_]]] = {
        name: [np.empty(0, bool)] for name in layout.optional
    }
    for lines, header in _iter_lines(path, layout):
        chunk = _parse_numbers(lines, header, layout) or _parse_cells(path, lines, header, layout)
        for name, (found, is_empty) in chunk.items():
            values[name].append(found)
            if name in gaps:
                gaps[name].append(is_empty)
    # Column by column: the chunks of one are let go before the next is put together.
    return Table(
        layout,
        {name: np.concatenate(values.pop(name)) for name in list(values)},
        {name: np.concatenate(gaps.pop(name)) for name in list(gaps)},
    )


def _iter_lines(path: Path, layout: Layout[Any]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield some whole lines at a time, and the header: never all of the text at once."""
    if not path.is_file():
        return
    with path.open(newline="") as file:
        first = file.readline()
        header = next(csv.reader([first] if first.endswith("\n") else []), [])
        if header and "step" in layout.columns and "step" not in header:
            raise DataError(f"{path} is not one of our tables: it has no column step")
        rest = ""
        while block := file.read(CHUNK_LETTERS):  # in blocks: line by line takes twice as long
            *lines, rest = (rest + block).split("\n")
            if lines:
                yield lines, header


Chunk = dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]  # values, and which cells are empty


def _parse_numbers(lines: Sequence[str], header: list[str], layout: Layout[Any]) -> Chunk | None:
    """Parse rows that hold numbers and nothing else, ten times as fast as cell by cell; None where
    they are not such."""
    if str in layout.columns.values():
        return None
    text = "\n".join([*lines, ""])
    if ",," in text or ",\n" in text:
        for _ in range(2):  # a gap may share its comma with the gap before it
            text = text.replace(",,", f",{EMPTY!r},")
        lines = text.replace(",\n", f",{EMPTY!r}\n").split("\n")[:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lines without a cell
        try:
            cells = np.loadtxt(lines, delimiter=",", comments=None, ndmin=2)
        except ValueError:
            return None
    if cells.shape != (len(lines), len(header)):
        return None
    found = dict(zip(header, np.ascontiguousarray(cells.T), strict=True))
    absent = np.full(len(lines), EMPTY)
    return {name: _typed(found.get(name, absent), kind) for name, kind in layout.columns.items()}


def _typed(cells: NDArray[np.float64], kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    is_empty = cells == EMPTY
    if not is_empty.any():
        return cells.astype(_dtype(kind)), is_empty
    return np.where(is_empty, np.nan if kind is float else 0, cells).astype(_dtype(kind)), is_empty


def _parse_cells(path: Path, lines: Sequence[str], header: list[str], layout: Layout[Any]) -> Chunk:
    """Parse any rows. Cells behind the last column belong to none; a row with fewer is cut off."""
    rows = [row for row in csv.reader(lines) if len(row) >= len(header)]
    place = {name: header.index(name) for name in layout.columns if name in header}
    chunk = {}
    for name, kind in layout.columns.items():
        cells = [row[place[name]] for row in rows] if name in place else [""] * len(rows)
        is_empty = np.array([not cell for cell in cells], dtype=bool)
        chunk[name] = (_parsed(path, name, kind, cells), is_empty)
    return chunk


def _dtype(kind: Kind) -> Any:
    return {int: np.int64, float: np.float64, bool: np.bool_, str: np.object_}[kind]


def _parsed(path: Path, name: str, kind: Kind, cells: Sequence[str]) -> NDArray[Any]:
    if kind is str:
        return np.array([from_cell(cell) for cell in cells], dtype=object)
    if kind is bool:
        return np.array([cell == "1" for cell in cells], dtype=bool)
    empty = 0 if kind is int else np.nan
    try:
        return np.array([kind(cell) if cell else empty for cell in cells], dtype=_dtype(kind))
    except ValueError as error:
        raise DataError(f"{path} is damaged: column {name}: {error}") from error


class TableFile:
    """Appends rows, kept in memory until `flush`, which is one write of whole lines.

    A file that is there already keeps its columns in their places; columns it lacks are added
    behind them. `kept` is the last step whose rows stay: a run that is resumed takes the later
    ones again.
    """

    def __init__(self, path: Path, layout: Layout[Any], kept: int | None = None) -> None:
        self._path, self._lines = path, list[str]()
        self._columns = _open_for(path, list(layout.columns), kept)
        self._file: TextIO = path.open("a")

    def add(self, row: Mapping[str, Cell]) -> None:
        assert set(row) <= set(self._columns), f"{set(row) - set(self._columns)} has no column"
        self._lines.append(",".join(_text(row.get(name)) for name in self._columns))

    def amend_last(self, name: str, value: Cell) -> None:
        """Put another value into the last row that was written, in place: the file may be long."""
        self.flush()
        with self._path.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            begin = _begin_of_last_line(file, end)
            file.seek(begin)
            cells = file.read(end - begin).decode().rstrip("\n").split(",")
            cells[self._columns.index(name)] = _text(value)
            line = (",".join(cells) + "\n").encode()
            # One write, then the end: killed between the two, a scrap stays behind that no reader
            # takes for a row.
            os.pwrite(file.fileno(), line, begin)
            file.truncate(begin + len(line))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()

    def sync(self) -> None:
        self.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def _open_for(path: Path, wanted: list[str], kept: int | None) -> list[str]:
    """Make the file fit to be appended to; return its columns in their order. Rows that go stand at
    its end, unless somebody has edited it, and are cut off in place: the file may be long."""
    if not path.is_file():
        write_atomic(path, ",".join(wanted) + "\n")
        return wanted
    with path.open("rb") as file:
        first = file.readline()
        found = first.decode().rstrip("\n").split(",")
        if not first.endswith(b"\n") or not set(wanted) <= set(found):
            return _rewrite(path, wanted, kept)
        read = stays_until = len(first)
        for line in file:
            read += len(line)
            if line.endswith(b"\n") and (kept is None or _step_of(line, found) <= kept):
                if stays_until < read - len(line):
                    return _rewrite(path, wanted, kept)
                stays_until = read
    if stays_until < read:
        os.truncate(path, stays_until)
    return found


def _rewrite(path: Path, wanted: list[str], kept: int | None) -> list[str]:
    """Write the rows that stay anew, with empty cells in the columns that the file lacks."""
    before = path.read_bytes()
    first, *lines = before[: before.rfind(b"\n") + 1].split(b"\n")[:-1] or [b""]
    found = first.decode().split(",") if first else []
    columns = found + [name for name in wanted if name not in found]
    padding = b"," * (len(columns) - len(found))
    stay = [line + padding for line in lines if kept is None or _step_of(line, found) <= kept]
    write_atomic(path, b"".join(line + b"\n" for line in (",".join(columns).encode(), *stay)))
    return columns


def _step_of(line: bytes, columns: Sequence[str]) -> int:
    """Return the step of a row; 0, so that it stays, where that cannot be read."""
    place = columns.index("step") if "step" in columns else -1
    cells = line.split(b",", place + 1)
    return int(cells[place]) if 0 <= place < len(cells) and cells[place].isdigit() else 0


def _begin_of_last_line(file: Any, end: int) -> int:
    """Return where the last line begins, looking back from the end."""
    reach = 4096
    while True:
        start = max(0, end - reach)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n", 0, -1)
        if found >= 0 or start == 0:
            return int(start + found + 1)
        reach *= 2


def _text(value: Cell) -> str:
    """Ten digits of a float: enough to tell two float32 apart. None is an empty cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, bool):
        return str(int(value))
    text = text_cell(str(value))
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
