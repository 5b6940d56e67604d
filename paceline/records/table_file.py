"""Rows appended to the CSV files of a run, whose columns are in tables.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from paceline.records.files import write_atomic
from paceline.records.tables import Cell, Layout


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

    def widen(self, names: Sequence[str]) -> None:
        """Add the columns that the file lacks, behind all others: it is written anew, once."""
        if set(names) <= set(self._columns):
            return
        self.close()
        self._columns = _open_for(self._path, [*self._columns, *names], None)
        self._file = self._path.open("a")

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
    before = path.read_bytes().decode() if path.is_file() else ""
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
