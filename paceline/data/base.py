"""The data seam: samples by index, and who counts what a batch holds. No torch."""

from typing import Any, Protocol


class Dataset(Protocol):
    """Samples by index. `batch(indices)`, if there is one, builds a whole batch at once from a
    numpy array of indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class CountsUnits(Protocol):
    """Counts what the loss is a sum over, such as tokens: a workload does."""

    def units(self, batch: Any) -> int: ...
