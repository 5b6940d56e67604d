"""Files of a live run, read as they grow: new lines of a log, new rows of training.csv."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import DataError
from paceline.records.files import open_regular
from paceline.records.tables import read_header

MAX_DIGITS = 18  # of a step: such a number is one of 64 bits


@dataclass
class Tail:
    """New complete lines of a file that may not exist yet."""

    path: Path
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    @classmethod
    def from_end(cls, path: Path) -> "Tail":
        """Return a tail of what is written from now on: what is there is an earlier attempt's."""
        return cls(path, path.stat().st_size if path.is_file() else 0)

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the last call; with `last`, the unfinished one too."""
        try:
            with open_regular(self.path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    # A new attempt has cut off what its checkpoint does not hold. What is left has
                    # been returned before.
                    self._offset, self._rest = file.seek(0, os.SEEK_END), b""
                file.seek(self._offset)
                new = file.read()
        except (OSError, DataError):  # not there yet, or not a plain file
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        if last and self._rest:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]


class RowTail:
    """New rows of a table with a column `step`, as text by column. A line without a number of a
    step is none: a disk may have damaged it, and who follows a live run goes on."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)
        self._columns, self._last_step = list[str](), 0

    @classmethod
    def from_end(cls, path: Path, last_step: int) -> "RowTail":
        """Return a tail of the rows that are written from now on, behind a step."""
        made = cls(path)
        made._tail, made._columns = Tail.from_end(path), read_header(path)
        made._last_step = last_step
        return made

    def rows(self) -> list[dict[str, str]]:
        """Return the rows since the last call. A metric that is new adds a column, and the file is
        written anew: then all rows are read, and those left out that were returned before."""
        lines = self._tail.lines()
        columns, is_new = read_header(self._path), False
        if columns != self._columns:
            is_new, self._columns = bool(self._columns), columns
            self._tail = Tail(self._path)
            lines = self._tail.lines()[1:]
        cells = [dict(zip(columns, row, strict=False)) for row in _iter_rows(lines)]
        rows = [row for row in cells if len(row) == len(columns) and _is_step(row.get("step", ""))]
        rows = [row for row in rows if int(row["step"]) > self._last_step] if is_new else rows
        self._last_step = int(rows[-1]["step"]) if rows else self._last_step
        return rows


def _iter_rows(lines: list[str]) -> Iterator[list[str]]:
    """Yield the cells of each line; none of one that is no row, such as a cell without an end."""
    for line in lines:
        try:
            yield from csv.reader([line])
        except csv.Error:
            continue


def _is_step(cell: str) -> bool:
    return cell.isascii() and cell.isdigit() and len(cell) <= MAX_DIGITS
