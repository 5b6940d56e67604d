"""A table in memory, stored as columns, so that a million rows take little space."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from paceline.metrics import TRAIN, VAL
from paceline.records.cells import DTYPES, Kind

Row = TypeVar("Row")
CHUNK_ROWS = 20_000
# The losses were there first, and keep their columns.
LOSS_COLUMNS = {"train/loss": "loss", "val/loss": "val_loss"}


@dataclass(frozen=True)
class Layout(Generic[Row]):
    """The columns of a table in the order they are written, and how a row is made of its cells. A
    cell that is empty, or whose column the file does not have, is None where `optional` has it;
    else nan, 0, False or "". Further columns that a file may have begin with `prefixes`, and hold
    numbers."""

    columns: Mapping[str, Kind]
    make: Callable[[dict[str, Any]], Row]
    optional: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def of_file(self, header: Sequence[str]) -> "Layout[Row]":
        """Return the layout with the further columns that a file has."""
        more = [name for name in header if self.prefixes and name.startswith(self.prefixes)]
        columns = {**self.columns, **dict.fromkeys(more, float)}
        return replace(self, columns=columns, optional=self.optional | set(more)) if more else self


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

    @property
    def metrics(self) -> list[str]:
        """Return the names of all metrics that the file has, the losses too, by which `metric`
        finds them."""
        further = [name for name in self.values if name.startswith((TRAIN, VAL))]
        return [*(name for name, own in LOSS_COLUMNS.items() if own in self.values), *further]

    def metric(self, name: str) -> "tuple[NDArray[Any], NDArray[Any]]":
        """Return the steps that have a value of a metric, and the values."""
        column = LOSS_COLUMNS.get(name, name)
        rows = self.known(column) if column in self.is_empty else self
        return rows.column("step"), rows.column(column)

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


def empty_table(layout: Layout[Row]) -> Table[Row]:
    """Return a table without rows."""
    return Table(
        layout,
        {name: np.empty(0, DTYPES[kind]) for name, kind in layout.columns.items()},
        {name: np.empty(0, bool) for name in layout.optional},
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.item()
