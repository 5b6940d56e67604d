"""Text of a table into columns of numbers, by name; a cell that is none is damage with its column.

chunk = parse_chunk(path, text, header, {"step": int, "loss": float})
"""

import csv
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
FEW_LETTERS = 2**20  # up to here cells are parsed one by one in less time than pyarrow is imported
Chunk = dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]  # values, and which cells are empty


def parse_chunk(path: Path, text: str, header: list[str], columns: Columns) -> Chunk:
    """Parse some whole rows of a file; a column that it does not have is empty."""
    chunk = _parse_numbers(text, header, columns) if len(text) > FEW_LETTERS else None
    chunk = chunk or _parse_cells(path, text, header, columns)
    for name, (values, _) in chunk.items():
        _require_measured(path, name, values)
    return chunk


def _require_measured(path: Path, name: str, values: NDArray[Any]) -> None:
    """Refuse numbers whose sums and squares are no numbers any more: no run measures such. What is
    not finite was measured, and is said by whoever reads it; but a moment always is."""
    if values.dtype == np.float64:
        is_odd = np.isfinite(values) & (np.abs(values) > MAX_MEASURED)
        odd = values[is_odd | ~np.isfinite(values) if name == "time" else is_odd]
        if len(odd):
            raise damaged(path, f"column {name}", f"no run measures {odd[0]:g}")


def _parse_numbers(text: str, header: list[str], columns: Columns) -> Chunk | None:
    """Parse rows that hold numbers and nothing else, 30 times as fast as cell by cell; None where
    they are not such: cell by cell it is said which one is not."""
    if str in columns.values():
        return None
    import pyarrow
    from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, read_csv

    types = {float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.int64()}
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


def _parse_cells(path: Path, text: str, header: list[str], columns: Columns) -> Chunk:
    """Parse any rows. Cells behind the last column belong to none; a row with fewer is cut off."""
    rows = [row for row in csv.reader(text.split("\n")) if len(row) >= len(header)]
    place = {name: header.index(name) for name in columns if name in header}
    chunk = {}
    for name, kind in columns.items():
        cells = [row[place[name]] for row in rows] if name in place else [""] * len(rows)
        is_empty = np.array([not cell for cell in cells], dtype=bool)
        chunk[name] = (_parsed(path, name, kind, cells), is_empty)
    return chunk


def _parsed(path: Path, name: str, kind: Kind, cells: Sequence[str]) -> NDArray[Any]:
    if kind is str:
        return np.array([from_cell(cell) for cell in cells], dtype=object)
    if kind is bool:
        return np.array([cell == "1" for cell in cells], dtype=bool)
    empty = 0 if kind is int else np.nan
    try:
        return np.array([kind(cell) if cell else empty for cell in cells], dtype=DTYPES[kind])
    except (ValueError, OverflowError) as error:
        raise damaged(path, f"column {name}", str(error)[:MAX_SAID]) from error
