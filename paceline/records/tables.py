"""The CSV files of a run: one list of columns for their writer (table_file.py) and their readers.

Columns have names, never positions. A file of another version may have fewer columns or more:
what is missing reads as empty, what is unknown is left alone, and nothing is dropped. Metrics of a
job are columns of training.csv too: train/NAME and val/NAME, behind the others.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.metrics import TRAIN, VAL
from paceline.records.base import damaged
from paceline.records.cells import DTYPES, parse_chunk
from paceline.records.columns import Layout, Row, Table
from paceline.records.files import open_regular
from paceline.records.phases import OWN_PHASES, STEP_PHASES, Phase

Cell = str | float | None  # and so int and bool
CHUNK_LETTERS = 2**21
LAST_BYTES = 2**16  # that are looked through at once for the last lines
WRITTEN, FAILED = "ok", "failed"  # outcomes of a checkpoint


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One step of all ranks. `skipped`: no update was made; `overflowed`: because fp16 looked for
    its scale, which is no fault. Up to 0.6 nothing told the two apart."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    skipped: bool
    overflowed: bool
    warmup: bool
    val_loss: float | None
    metrics: dict[str, float]  # by whole name, as val/accuracy; without the losses


@dataclass(frozen=True, slots=True)
class StepRow:
    """Phase times of one step of one rank, in seconds; `blocked_s` is what of a phase it spent in
    collectives, where others were waited for. `units` are its own share of the step, `collectives`
    how many it has begun since it joined. `read_s` and `joined_s` are what its samples took to read
    and to put together, in loader processes or here."""

    step: int
    warmup: bool
    wall_s: float
    phases_s: dict[Phase, float]
    unaccounted_s: float
    blocked_s: dict[Phase, float]
    units: float | None
    collectives: int | None
    read_s: float | None = None
    joined_s: float | None = None


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
    "throttle_reasons", "ecc_errors", "xid", "num_processes", "alloc_retries",
)  # fmt: skip


def _training_row(cells: dict[str, Any]) -> TrainingRow:
    metrics = {name: cells.pop(name) for name in list(cells) if name.startswith((TRAIN, VAL))}
    known = {name: value for name, value in metrics.items() if value is not None}
    return TrainingRow(**cells, metrics=known)


TRAINING = Layout(
    {
        "step": int, "loss": float, "lr": float, "grad_norm": float, "step_s": float,
        "samples_per_s": float, "tokens_per_s": float, "skipped": bool, "overflowed": bool,
        "warmup": bool, "val_loss": float,
    },
    _training_row,
    frozenset({"tokens_per_s", "val_loss"}),
    (TRAIN, VAL),
)  # fmt: skip
STEPS = Layout(
    {"step": int, "warmup": bool, "wall_s": float}
    | {phase.column: float for phase in STEP_PHASES}
    | {"unaccounted_s": float}
    | {phase.blocked_column: float for phase in OWN_PHASES}
    | {"units": float, "collectives": int, "read_s": float, "joined_s": float},
    lambda cells: StepRow(
        cells["step"],
        cells["warmup"],
        cells["wall_s"],
        {phase: cells[phase.column] or 0.0 for phase in STEP_PHASES},
        cells["unaccounted_s"],
        {phase: cells[phase.blocked_column] or 0.0 for phase in OWN_PHASES},
        cells["units"],
        cells["collectives"],
        cells["read_s"],
        cells["joined_s"],
    ),
    frozenset(
        [phase.column for phase in STEP_PHASES]
        + [phase.blocked_column for phase in OWN_PHASES]
        + ["units", "collectives", "read_s", "joined_s"]
    ),
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


def read_steps(path: Path, last: int | None = None) -> Table[StepRow]:
    """Read the steps of a rank; with `last`, so many of them, without what stands before."""
    return read_table(path, STEPS, last)


def read_telemetry(path: Path) -> Table[TelemetryRow]:
    return read_table(path, TELEMETRY)


def read_checkpoints(path: Path) -> Table[CheckpointRow]:
    return read_table(path, CHECKPOINTS)


def read_table(path: Path, layout: Layout[Row], last: int | None = None) -> Table[Row]:
    """Read the rows of a file; none where it is absent. A row that was cut off, because a run was
    killed inside its line, is not one. With `last` only so many lines at its end are read."""
    layout = layout.of_file(read_header(path))
    values: dict[str, list[NDArray[Any]]] = {
        name: [np.empty(0, DTYPES[kind])] for name, kind in layout.columns.items()
    }
    gaps: dict[str, list[NDArray[np.bool_]]] = {
        name: [np.empty(0, bool)] for name in layout.optional
    }
    try:
        line = 2
        for text, header in _iter_text(path, layout, last):
            chunk = parse_chunk(path, text, header, layout.columns, line)
            line += text.count("\n") + 1
            for name, (found, is_empty) in chunk.items():
                values[name].append(found)
                if name in gaps:
                    gaps[name].append(is_empty)
    except DataError:
        if last is None:
            raise
        return read_table(path, layout)[-last:]  # it says in which line the damage is
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not text in UTF-8", f"byte {error.start} of a part") from error
    except csv.Error as error:  # a cell without an end
        raise damaged(path, "it is not a table", error) from error
    # Column by column: the chunks of one are let go before the next is put together.
    return Table(
        layout,
        {name: np.concatenate(values.pop(name)) for name in list(values)},
        {name: np.concatenate(gaps.pop(name)) for name in list(gaps)},
    )


def read_header(path: Path) -> list[str]:
    """Return the columns of a file; none where it is absent or has no whole line."""
    try:
        with TextIOWrapper(open_regular(path), "utf-8-sig", "replace", newline="") as file:
            first = file.readline()
        return next(csv.reader([first]), []) if first.endswith("\n") else []
    except (OSError, csv.Error):
        return []


def _iter_text(
    path: Path, layout: Layout[Any], last: int | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield some whole lines at a time, and the header: never all of the text at once."""
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    with opened:
        first = opened.readline().decode("utf-8-sig")
        header = next(csv.reader([first] if first.endswith("\n") else []), [])
        if header and "step" in layout.columns and "step" not in header:
            raise damaged(path, "it is not one of our tables", "it has no column step")
        if last is not None:
            _seek_last(opened, last)
        file, rest = TextIOWrapper(opened, encoding="utf-8", newline=""), ""
        while block := file.read(CHUNK_LETTERS):  # in blocks: line by line takes twice as long
            whole, _, rest = (rest + block).rpartition("\n")
            if whole:
                yield whole, header


def _seek_last(file: BinaryIO, num_lines: int) -> None:
    """Go on from where so many whole lines are left, by blocks from the end: what stands before
    them may be long, and is not read. Where there are fewer, stay."""
    begin, num_found = file.tell(), 0
    at = file.seek(0, os.SEEK_END)
    while at > begin and num_found <= num_lines:
        size = min(LAST_BYTES, at - begin)
        at = file.seek(at - size)
        block = file.read(size)
        num_found += block.count(b"\n")
    place = 0
    for _ in range(num_found - num_lines):
        place = block.index(b"\n", place) + 1
    file.seek(at + place)
