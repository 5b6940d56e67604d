"""Tables of a run, read as they grow, into columns of numbers.

`GrowingTable.read` returns the rows that were added since the last call. A file that was cut off or
written anew (a new attempt, a new metric) is read again from its beginning; `is_reset` says so.
"""

import csv
import os
from pathlib import Path
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.records.cells import Chunk, parse_chunk
from paceline.records.columns import Layout, Row, Table, empty_table
from paceline.records.files import open_regular

MAX_READ = 8 << 20  # bytes of one file in one call: the next call goes on from there
HEAD_BYTES = 1 << 14


class GrowingTable:
    """A table of one layout that may not exist yet. With `last_bytes` only so much of what is there
    at the beginning is read: ranks are many, and what they did long ago is not looked at."""

    def __init__(self, path: Path, layout: Layout[Any], last_bytes: int | None = None) -> None:
        self.path, self.layout, self._last_bytes = path, layout, last_bytes
        self._forget()

    def _forget(self) -> None:
        self._offset, self._head, self._header = 0, b"", list[str]()
        self._identity: tuple[int, int] | None = None

    def read(self) -> tuple[Chunk, bool]:
        """Return new whole rows by column, and whether all before them are to be forgotten. Rows of
        a damaged file are left out: a view goes on."""
        try:
            with open_regular(self.path) as file:
                text, is_reset = self._read_text(file)
        except (OSError, DataError):  # not there yet, or not a plain file
            return {}, False
        if not text or not self._header:
            return {}, is_reset
        layout = self.layout.of_file(self._header)
        try:
            return parse_chunk(self.path, text, self._header, layout.columns), is_reset
        except (DataError, csv.Error):
            return {}, is_reset

    def _read_text(self, file: Any) -> tuple[str, bool]:
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino)
        head = file.readline(HEAD_BYTES)
        if not head.endswith(b"\n"):
            return "", False
        is_other = identity != self._identity or head != self._head
        is_reset = bool(self._head) and (is_other or found.st_size < self._offset)
        if is_other or is_reset:
            self._identity, self._head = identity, head
            self._header = next(csv.reader([head.decode("utf-8-sig", "replace")]), [])
            self._offset = len(head)
            self._skip_to_last(file, found.st_size)
        self._go_back_to_amended(file)
        file.seek(self._offset)
        new = file.read(MAX_READ)
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", "replace"), is_reset

    def _go_back_to_amended(self, file: Any) -> None:
        """Read the last row once more where it has grown: an evaluation is put into the row of its
        step, which was written before (`TableFile.amend_last`)."""
        if self._offset <= len(self._head):
            return
        begin = max(len(self._head), self._offset - HEAD_BYTES)
        file.seek(begin)
        before = file.read(self._offset - begin)
        if before and not before.endswith(b"\n"):
            self._offset = begin + before.rfind(b"\n") + 1

    def _skip_to_last(self, file: Any, size: int) -> None:
        if self._last_bytes is not None and size - self._offset > self._last_bytes:
            file.seek(size - self._last_bytes)
            file.readline()  # the rest of a row
            self._offset = file.tell()


def num_rows(chunk: Chunk) -> int:
    return len(next(iter(chunk.values()))[0]) if chunk else 0


def known(chunk: Chunk, name: str) -> tuple[Any, Any]:
    """Return which rows have a value of a column, and the values."""
    values, is_empty = chunk[name]
    is_known = ~is_empty & np.isfinite(values)
    return is_known, values[is_known]


class ThinnedTable(Generic[Row]):
    """The rows of a table that grows, as far as a live run is judged by them: those of the last
    `recent` moments, and of all before them every 2nd, 4th, 8th ... one, at most as many again. So
    memory and time are the same after a month as after an hour, and how the run began is known.

    A moment is what rows share in the column `by`: a step, or the time at which all GPUs of a
    machine were sampled. Further columns of a file are left out.
    """

    def __init__(
        self, path: Path, layout: Layout[Row], by: str, recent: int, last_bytes: int | None = None
    ) -> None:
        self._file = GrowingTable(path, layout, last_bytes)
        self._by, self._recent = by, recent
        self._table = empty_table(layout)
        self._moments: NDArray[np.int64] = np.empty(0, np.int64)  # of each row, from 0 on

    def read(self) -> Table[Row]:
        """Take in what is new; return what is kept."""
        chunk, is_reset = self._file.read()
        if is_reset and not num_rows(chunk):
            self._keep(np.zeros(len(self._table), bool))
        while num_rows(chunk):
            self._take(chunk)
            chunk, _ = self._file.read()
        return self._table

    def skip(self) -> None:
        """Leave out what is there already."""
        self.read()
        self._keep(np.zeros(len(self._table), bool))

    def _take(self, chunk: Chunk) -> None:
        new = chunk[self._by][0]
        # A new attempt takes steps again, and a row that was amended comes again.
        self._keep(self._table.column(self._by) < new[0])
        first = self._moments[-1] + 1 if len(self._moments) else 0
        numbers = first + np.cumsum(np.diff(new, prepend=new[:1]) != 0)
        self._moments = np.concatenate([self._moments, numbers])
        old = self._table
        self._table = Table(
            old.layout,
            {n: np.concatenate([found, chunk[n][0]]) for n, found in old.values.items()},
            {n: np.concatenate([found, chunk[n][1]]) for n, found in old.is_empty.items()},
        )
        num_old, stride = self._moments[-1] + 1 - self._recent, 1
        while num_old > stride * self._recent:
            stride *= 2
        self._keep((self._moments >= num_old) | (self._moments % stride == 0))

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self._table, self._moments = self._table.pick(which), self._moments[which]
