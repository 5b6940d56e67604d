"""Parses the text of a table into columns of numbers; a bad cell is reported with its place.

chunk = parse_chunk(path, text, header, {"step": int, "loss": float})
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.records.base import damaged
from paceline.records.words import from_cell

Kind = type[int] | type[float] | type[bool] | type[str]
Columns = Mapping[str, Kind]
DTYPES: dict[Kind, Any] = {int: np.int64, float: np.float64, bool: np.bool_, str: np.object_}
MAX_MEASURED = 1e100  # float32 ends at 3.4e38
MAX_SAID = 120
# Up to here cells are parsed one by one in less time than pyarrow is imported; and where it is
# imported already, in less time than it takes to be told what the columns are.
FEW_LETTERS, VERY_FEW_LETTERS = 2**20, 2**13
Chunk = dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]  # values, and which cells are empty


def parse_chunk(
    path: Path, text: str, header: list[str], columns: Columns, first_line: int = 2
) -> Chunk:
    """Parse some whole rows of a file; a column that it does not have is empty. `first_line` is
    that of the first row, for what is said of a damaged one."""
    few = VERY_FEW_LETTERS if "pyarrow.csv" in sys.modules else FEW_LETTERS
    chunk = _parse_columns(text, header, columns) if len(text) > min(few, FEW_LETTERS) else None
    if chunk is not None and not any(len(_find_odd(n, v)) for n, (v, _) in chunk.items()):
        return chunk
    return _parse_cells(path, text, header, columns, first_line)


def _find_odd(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return where numbers are whose sums and squares are no numbers any more: no run measures
    such. What is not finite was measured, and is said by whoever reads it; but a moment always
    is."""
    if values.dtype != np.float64:
        return np.empty(0, np.int64)
    is_odd = np.isfinite(values) & (np.abs(values) > MAX_MEASURED)
    return np.flatnonzero(is_odd | ~np.isfinite(values) if name == "time" else is_odd)


def _parse_columns(text: str, header: list[str], columns: Columns) -> Chunk | None:
    """Parse rows whose cells are what their columns hold, 30 times as fast as cell by cell; None
    where they are not such: cell by cell it is said which one is not."""
    if str in columns.values() and '"' in text:  # a text may have commas
        return None
    import pyarrow
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

    types = {float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.int64()}
    types[str] = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    place = {name: str(header.index(name)) for name in columns if name in header}
    content = text.encode()
    try:
        table = read_csv(
            pyarrow.BufferReader(content),
            ReadOptions(
                use_threads=False,
                block_size=len(content) + 1,
                column_names=[str(number) for number in range(len(header))],
            ),
            ParseOptions(quote_char=False),
            ConvertOptions(
                include_columns=list(place.values()),
                column_types={
                    place[name]: types[kind] for name, kind in columns.items() if name in place
                },
                null_values=[""],
            ),
        )
    except pyarrow.ArrowInvalid:
        return None
    absent = pyarrow.nulls(len(table), pyarrow.float64())
    found = {name: table[number].combine_chunks() for name, number in place.items()}
    return {name: _typed(found.get(name, absent), kind) for name, kind in columns.items()}


def _typed(cells: Any, kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the values of an arrow array as a column has them, and which cells are empty. By its
    buffers: what pyarrow has for it takes 40 MB to import."""
    if kind is str:
        return _texts(cells)
    is_known, numbers = cells.buffers()
    if is_known is None:
        is_empty = np.zeros(len(cells), dtype=bool)
    else:
        bits = np.unpackbits(np.frombuffer(is_known, dtype=np.uint8), bitorder="little")
        is_empty = bits[: len(cells)] == 0
    values = np.frombuffer(numbers, dtype=DTYPES[float] if kind is float else DTYPES[int])
    values = values[: len(cells)].astype(DTYPES[kind])  # a copy: arrow's memory is let go
    values[is_empty] = np.nan if kind is float else 0
    return values, is_empty


def _texts(cells: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return texts, of which most are the same few, and which are empty; all, where the file does
    not have the column."""
    if cells.null_count:
        return np.full(len(cells), "", dtype=object), np.ones(len(cells), dtype=bool)
    different = [from_cell(text) for text in cells.dictionary.to_pylist()]
    numbers = np.frombuffer(cells.indices.buffers()[1], dtype=np.int32)[: len(cells)]
    values = np.array(different, dtype=object)[numbers]
    return values, values == ""


def _parse_cells(
    path: Path, text: str, header: list[str], columns: Columns, first_line: int
) -> Chunk:
    """Parse any rows. Cells behind the last column belong to none; a row with fewer is cut off."""
    reader = csv.reader(text.split("\n"))
    found = [(reader.line_num, row) for row in reader if len(row) >= len(header)]
    rows, lines = [row for _, row in found], [first_line - 1 + number for number, _ in found]
    place = {name: header.index(name) for name in columns if name in header}
    chunk = {}
    for name, kind in columns.items():
        cells = [row[place[name]] for row in rows] if name in place else [""] * len(rows)
        is_empty = np.array([not cell for cell in cells], dtype=bool)
        try:
            values = _parsed(kind, cells)
        except (ValueError, OverflowError) as error:
            at = _find_unfit(kind, cells)
            raise damaged(
                path, f"column {name} of line {lines[at]}", str(error)[:MAX_SAID]
            ) from error
        if len(odd := _find_odd(name, values)):
            why = f"no run measures {values[odd[0]]:g}"
            raise damaged(path, f"column {name} of line {lines[odd[0]]}", why)
        chunk[name] = (values, is_empty)
    return chunk


def _parsed(kind: Kind, cells: Sequence[str]) -> NDArray[Any]:
    if kind is str:
        return np.array([from_cell(cell) for cell in cells], dtype=object)
    if kind is bool:
        return np.array([cell == "1" for cell in cells], dtype=bool)
    empty = 0 if kind is int else np.nan
    return np.array([kind(cell) if cell else empty for cell in cells], dtype=DTYPES[kind])


def _find_unfit(kind: Kind, cells: Sequence[str]) -> int:
    """Return the first cell that `_parsed` takes for no value."""
    for at, cell in enumerate(cells):
        try:
            _parsed(kind, [cell])
        except (ValueError, OverflowError):
            return at
    raise ValueError("each of them is a value")
