"""Lines of a table into columns of numbers, by name; a cell that is none is damage with its column.

chunk = parse_chunk(path, lines, header, {"step": int, "loss": float})
"""

import csv
import warnings
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
MAX_INT = 2**53  # up to here a float tells whole numbers apart
MAX_MEASURED = 1e100  # float32 ends at 3.4e38
MAX_SAID = 120
EMPTY = -1e308  # stands for an empty cell while numbers are parsed: no measurement gives it
Chunk = dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]  # values, and which cells are empty


def parse_chunk(path: Path, lines: Sequence[str], header: list[str], columns: Columns) -> Chunk:
    """Parse some rows of a file; a column that it does not have is empty."""
    chunk = _parse_numbers(lines, header, columns) or _parse_cells(path, lines, header, columns)
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


def _parse_numbers(lines: Sequence[str], header: list[str], columns: Columns) -> Chunk | None:
    """Parse rows that hold numbers and nothing else, ten times as fast as cell by cell; None where
    they are not such."""
    if str in columns.values():
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
    whole = [found[name] for name, kind in columns.items() if kind is int and name in found]
    if any((np.abs(column) > MAX_INT).any() or (column % 1).any() for column in whole):
        return None  # nor are they numbers of that kind: cell by cell it is said which
    absent = np.full(len(lines), EMPTY)
    return {name: _typed(found.get(name, absent), kind) for name, kind in columns.items()}


def _typed(cells: NDArray[np.float64], kind: Kind) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    is_empty = cells == EMPTY
    if not is_empty.any():
        return cells.astype(DTYPES[kind]), is_empty
    return np.where(is_empty, np.nan if kind is float else 0, cells).astype(DTYPES[kind]), is_empty


def _parse_cells(path: Path, lines: Sequence[str], header: list[str], columns: Columns) -> Chunk:
    """Parse any rows. Cells behind the last column belong to none; a row with fewer is cut off."""
    rows = [row for row in csv.reader(lines) if len(row) >= len(header)]
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
