"""Rows appended to the CSV files of a run, whose columns are in tables.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.records.base import damaged
from paceline.records.columns import Layout
from paceline.records.disk import Appender, Losses
from paceline.records.files import open_regular, write_atomic
from paceline.records.tables import Cell
from paceline.records.words import text_cell


class TableFile(Appender):
    """Appends rows, kept in memory until `flush`, which is one write of whole lines.

    A file that is there already keeps its columns in their places; columns it lacks are added
    behind them. `kept` is the last step whose rows stay: a run that is resumed takes the later
    ones again. A full disk ends nothing: rows wait for room, and those that are lost are noted in
    `lost` by their steps.
    """

    def __init__(
        self, path: Path, layout: Layout[Any], kept: int | None = None, lost: Losses | None = None
    ) -> None:
        super().__init__(path, lost)
        self._has_all = True  # columns that were asked for
        self._columns, is_new = _open_for(path, list(layout.columns), kept)
        if is_new:
            self.append(f"{','.join(self._columns)}\n".encode(), is_pinned=True)
            self.flush()

    def add(self, row: Mapping[str, Cell]) -> None:
        unknown = set(row) - set(self._columns)
        assert not unknown or not self._has_all, f"{unknown} has no column"
        line = ",".join(_text(row.get(name)) for name in self._columns)
        self.append(f"{line}\n".encode())

    def widen(self, names: Sequence[str]) -> None:
        """Add the columns that the file lacks, behind all others: it is written anew, once. Where
        the disk does not take that, they stay empty until it does."""
        if set(names) <= set(self._columns):
            return
        try:
            self._has_all = self.flush()
            if self._has_all:
                self._columns = _rewrite(self.path, [*self._columns, *names], None)
                self.reopen()
        except OSError as error:
            self._has_all = False
            self.lost.note(self.path, error)

    def amend_last(self, name: str, value: Cell) -> None:
        """Put another value into the last row that was written, in place: the file may be long."""
        try:
            if self.flush():
                self._amend(name, value)
        except OSError as error:
            self.lost.note(self.path, error, len(_text(value)))

    def _amend(self, name: str, value: Cell) -> None:
        with self.path.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            begin = _begin_of_last_line(file, end)
            file.seek(begin)
            cells = file.read(end - begin).decode().rstrip("\n").split(",")
            cells[self._columns.index(name)] = _text(value)
            line = (",".join(cells) + "\n").encode()
            # One write, then the end: killed between the two, a scrap stays behind that no reader
            # takes for a row.
            os.posix_fallocate(file.fileno(), begin, len(line))  # no room: the row stays as it is
            os.pwrite(file.fileno(), line, begin)
            file.truncate(begin + len(line))

    def dropped(self, line: bytes) -> None:
        if step := _step_of(line, self._columns):
            self.lost.by_file[self.path].miss_step(step)


def _open_for(path: Path, wanted: list[str], kept: int | None) -> tuple[list[str], bool]:
    """Make the file fit to be appended to; return its columns in their order, and whether it is
    empty still. Rows that go stand at its end, unless somebody has edited it, and are cut off in
    place: the file may be long, and a full disk takes that, too."""
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        return wanted, True
    with opened as file:
        first = file.readline()
        if not first:
            return wanted, True
        found = _names(path, first)
        if not first.endswith(b"\n") or not set(wanted) <= set(found):
            return _rewrite(path, wanted, kept), False
        read = stays_until = len(first)
        for line in file:
            read += len(line)
            if not line.isascii():
                _names(path, line)  # or damage, behind which nothing is written
            if line.endswith(b"\n") and (kept is None or _step_of(line, found) <= kept):
                if stays_until < read - len(line):
                    return _rewrite(path, wanted, kept), False
                stays_until = read
    if stays_until < read:
        os.truncate(path, stays_until)
    return found, False


def _rewrite(path: Path, wanted: list[str], kept: int | None) -> list[str]:
    """Write the rows that stay anew, with empty cells in the columns that the file lacks."""
    before = path.read_bytes()
    _names(path, before)
    first, *lines = before[: before.rfind(b"\n") + 1].split(b"\n")[:-1] or [b""]
    found = _names(path, first) if first else []
    columns = found + [name for name in wanted if name not in found]
    padding = b"," * (len(columns) - len(found))
    stay = [line + padding for line in lines if kept is None or _step_of(line, found) <= kept]
    write_atomic(path, b"".join(line + b"\n" for line in (",".join(columns).encode(), *stay)))
    return columns


def _names(path: Path, first: bytes) -> list[str]:
    try:
        return first.decode("utf-8-sig").rstrip("\n").split(",")
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not text in UTF-8", f"byte {error.start}") from error


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
