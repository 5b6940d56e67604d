"""The CSV files of a run: one list of columns for who writes them and who reads them.

Columns have names, never positions. A file of another version may have fewer columns or more:
what is missing reads as empty, what is unknown is left alone, and nothing is dropped.
"""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.records.base import damaged
from paceline.records.cells import DTYPES, Kind, parse_chunk
from paceline.records.files import open_regular, write_atomic
from paceline.records.phases import STEP_PHASES, Phase

Cell = str | float | None  # and so int and bool
Row = TypeVar("Row")
CHUNK_ROWS = 20_000
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


@dataclass(frozen=True)
class Layout(Generic[Row]):
    """The columns of a table in the order they are written, and how a row is made of its cells. A
    cell that is empty, or whose column the file does not have, is None where `optional` has it;
    else nan, 0, False or ""."""

    columns: Mapping[str, Kind]
    make: Callable[[dict[str, Any]], Row]
    optional: frozenset[str] = frozenset()


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


def read_training(path: Path) -> "Table[TrainingRow]":
    return read_table(path, TRAINING)


def read_steps(path: Path) -> "Table[StepRow]":
    return read_table(path, STEPS)


def read_telemetry(path: Path) -> "Table[TelemetryRow]":
    return read_table(path, TELEMETRY)


def read_checkpoints(path: Path) -> "Table[CheckpointRow]":
    return read_table(path, CHECKPOINTS)


@dataclass(frozen=True, eq=False)
class Table(Sequence[Row]):
    """Rows that are kept as columns: a million of them take 9 bytes a number. `table[3]` makes a
    row, `column` gives all its values at once, and `since` leaves out the steps before one."""

    layout: Layout[Row]
    values: dict[str, NDArray[Any]] = field(repr=False)
    is_empty: dict[str, NDArray[np.bool_]] = field(repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "Table[Row]": ...
    def __getitem__(self, index: int | slice) -> "Row | Table[Row]":
        if isinstance(index, slice):
            return self.pick(index)
        cells: dict[str, Any] = {name: _plain(found[index]) for name, found in self.values.items()}
        for name, is_empty in self.is_empty.items():
            if is_empty[index]:
                cells[name] = None
        return self.layout.make(cells)

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), CHUNK_ROWS):
            part = self.pick(slice(start, start + CHUNK_ROWS))
            columns = {name: values.tolist() for name, values in part.values.items()}
            for name, is_empty in part.is_empty.items():
                for place in np.flatnonzero(is_empty):
                    columns[name][place] = None
            for cells in zip(*columns.values(), strict=True):
                yield self.layout.make(dict(zip(columns, cells, strict=True)))

    def column(self, name: str) -> NDArray[Any]:
        """Return the values of one column; an empty cell of a float column is nan."""
        return self.values[name]

    def known(self, name: str) -> "Table[Row]":
        """Return the rows that have a value in an optional column."""
        return self.pick(~self.is_empty[name])

    def since(self, first_step: int) -> "Table[Row]":
        return self.pick(self.values["step"] >= first_step)

    def pick(self, which: "slice | NDArray[np.bool_]") -> "Table[Row]":
        if not isinstance(which, slice) and which.all():
            return self
        return Table(
            self.layout,
            {name: values[which] for name, values in self.values.items()},
            {name: is_empty[which] for name, is_empty in self.is_empty.items()},
        )


def read_table(path: Path, layout: Layout[Row]) -> Table[Row]:
    """Read the rows of a file; none where it is absent. A row that was cut off, because a run was
    killed inside its line, is not one."""
    values: dict[str, list[NDArray[Any]]] = {
        name: [np.empty(0, DTYPES[kind])] for name, kind in layout.columns.items()
    }
    gaps: dict[str, list[NDArray[np.bool_]]] = {
        name: [np.empty(0, bool)] for name in layout.optional
    }
    try:
        for lines, header in _iter_lines(path, layout):
            chunk = parse_chunk(path, lines, header, layout.columns)
            for name, (found, is_empty) in chunk.items():
                values[name].append(found)
                if name in gaps:
                    gaps[name].append(is_empty)
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not text in UTF-8", f"byte {error.start} of a part") from error
    except csv.Error as error:  # a cell without an end
        raise damaged(path, "it is not a table", error) from error
    return Table(
        layout,
        {name: np.concatenate(found) for name, found in values.items()},
        {name: np.concatenate(found) for name, found in gaps.items()},
    )


def _iter_lines(path: Path, layout: Layout[Any]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield some whole lines at a time, and the header: never all of the text at once."""
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    with TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file:
        whole = (line for line in file if line.endswith("\n"))
        header = next(csv.reader(whole), [])
        if header and "step" in layout.columns and "step" not in header:
            raise damaged(path, "it is not one of our tables", "it has no column step")
        while lines := list(islice(whole, CHUNK_ROWS)):
            yield lines, header


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.item()


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
    """Make the file fit to be appended to; return its columns in their order."""
    try:
        with open_regular(path) as file:
            before = file.read().decode("utf-8-sig")
    except FileNotFoundError:
        before = ""
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not text in UTF-8", f"byte {error.start}") from error
    whole = before[: before.rfind("\n") + 1]
    first, *lines = whole.split("\n")[:-1] or [""]
    found = first.split(",") if first else []
    columns = found + [name for name in wanted if name not in found]
    padding = "," * (len(columns) - len(found))
    stay = [line + padding for line in lines if kept is None or _step_of(line, found) <= kept]
    after = "".join(f"{line}\n" for line in (",".join(columns), *stay))
    if after != before:
        write_atomic(path, after)
    return columns


def _step_of(line: str, columns: Sequence[str]) -> int:
    """Return the step of a row; 0, so that it stays, where that cannot be read."""
    cell = line.split(",")[columns.index("step")] if "step" in columns else ""
    return int(cell) if cell.isdigit() else 0


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
    text = " ".join(str(value).split())
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
