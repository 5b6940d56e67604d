"""Samples that depend on where they stand in the run: `at(index, position)` of a data set.

A data set that draws random numbers, as `Images` does for its crops, may have this method beside
`__getitem__`. What it draws then depends on the seed and the position alone: not on ranks, loaders
or microbatches, nor on when the run was stopped. `__getitem__` is what evaluation asks.
"""

from typing import Any

from paceline.data.base import Dataset
from paceline.data.cursor import Indices


def at_positions(data: Dataset, sample_ids: Indices, first: int) -> Dataset:
    """Return the data set as it is for these samples, which stand at positions `first`, `first + 1`
    and so on of the run; one without `at` is returned as it is."""
    return _Placed(data, sample_ids, first) if hasattr(data, "at") else data


class _Placed:
    """A data set whose samples are asked for by index, each with its position."""

    def __init__(self, data: Any, sample_ids: Indices, first: int) -> None:
        self.data, self.positions = data, dict[int, list[int]]()
        for position, index in enumerate(sample_ids.tolist(), first):
            self.positions.setdefault(index, []).append(position)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        left = self.positions[index]  # several where an epoch ends inside a microbatch
        return self.data.at(index, left.pop(0) if len(left) > 1 else left[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)  # its rule to make a batch, if it has one
