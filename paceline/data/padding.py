"""Pads samples of unequal size into one batch: `pad` is what a job's `collate` usually returns.

from paceline.data import pad

def collate(self, samples):
    return pad(samples, fill={"tokens": 0, "labels": -100}, multiple=8)
"""

from collections.abc import Mapping, Sequence
from typing import Any


class BadSample(ValueError):
    """The n-th sample of a batch is not like the others; `what` says how it is."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"sample {number} of the batch has {what}")
        self.number, self.what = number, what


def pad(
    samples: Sequence[Any],
    fill: float | Mapping[str, float] = 0,
    multiple: int = 1,
    lengths: bool = False,
) -> Any:
    """Stack samples, each filled up at its end to the longest of them in its first dimension.

    A sample is a dict, a tuple, or a tensor; arrays and lists of numbers are tensors too. `fill` is
    the value that is filled in; by key, it also says which entries are padded, and all others are
    stacked. The padded length is a multiple of `multiple`. `lengths` adds for every padded entry of
    a dict a tensor KEY_length: how long each sample was.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return _pad_by_key(samples, fill, multiple, lengths)
    assert not isinstance(fill, Mapping), "fill by key needs samples that are dicts"
    if isinstance(first, tuple):
        columns = (_column(samples, place) for place in range(len(first)))
        return tuple(_pad_rows(rows, fill, multiple) for rows in columns)
    return _pad_rows(samples, fill, multiple)


def _pad_by_key(
    samples: Sequence[Any], fill: float | Mapping[str, float], multiple: int, lengths: bool
) -> dict[str, Any]:
    import torch

    batch: dict[str, Any] = {}
    for number, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            keys, others = ", ".join(sample), ", ".join(samples[0])
            raise BadSample(number, f"the keys {keys}, and the first one {others}")
    for key in samples[0]:
        rows = _column(samples, key)
        value = fill.get(key) if isinstance(fill, Mapping) else fill
        batch[key] = _pad_rows(rows, value, multiple)
        if lengths and value is not None and _has_length(rows[0]):
            batch[f"{key}_length"] = torch.tensor([len(row) for row in rows])
    return batch


def _column(samples: Sequence[Any], key: Any) -> list[Any]:
    return [sample[key] for sample in samples]


def _has_length(row: Any) -> bool:
    """Say whether it can be padded: numbers, in one dimension or more."""
    is_array = hasattr(row, "shape") and len(row.shape) > 0
    return is_array or (isinstance(row, list) and not (row and isinstance(row[0], str)))


def _pad_rows(rows: Sequence[Any], fill: float | None, multiple: int) -> Any:
    import torch
    from torch.utils.data import default_collate

    if fill is None or not _has_length(rows[0]):
        return default_collate(list(rows))
    tensors = [torch.as_tensor(row) for row in rows]
    rest = tensors[0].shape[1:]
    for number, tensor in enumerate(tensors):
        if tensor.dim() == 0 or tensor.shape[1:] != rest:
            found, first = list(tensor.shape), list(tensors[0].shape)
            raise BadSample(number, f"shape {found}, and the first one {first}")
    longest = max(map(len, tensors))
    size = -(-longest // multiple) * multiple
    batch = tensors[0].new_full((len(tensors), size, *rest), fill)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch
