"""Recognises streams and opens them as numbered shards, for `streams` to read."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from typing_extensions import TypeIs

from paceline.data.base import Stream
from paceline.errors import DataError


class Shards(NamedTuple):
    """A stream as shards: their names, and what opens one of them in an epoch. What is opened is
    iterable, and may have `state_dict` and `load_state_dict`."""

    names: Sequence[str]
    open: Callable[[int, int], Any]


def is_stream(data: Any) -> TypeIs[Stream]:
    """Say whether samples only come one after another, and not by index."""
    if isinstance(data, IterableDataset):
        return True
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return not by_index and (hasattr(data, "__iter__") or _has_shards(data))


def _has_shards(data: Any) -> bool:
    return hasattr(data, "shards") and callable(getattr(data, "open", None))


def find_shards(data: Any) -> Shards:
    """Return the shards of a stream: its own `shards` and `open`, those of a data set of Hugging
    Face, or the whole as one."""
    if _has_shards(data):
        shards = list(data.shards)
        if not shards:
            raise DataError(f"{type(data).__name__}.shards is empty: there is nothing to read")
        return Shards([str(shard) for shard in shards], lambda n, epoch: data.open(shards[n]))
    if type(data).__module__.startswith("datasets."):
        size = data.num_shards
        return Shards([f"shard {n} of {size}" for n in range(size)], _open_of_datasets(data, size))
    name = type(data).__name__
    if hasattr(data, "__next__"):
        raise DataError(
            f"build_data returned a {name}, which can be read only once\n"
            "hint: return an object whose __iter__ begins anew, or has `shards` and open(shard)"
        )
    # One that keeps its place in itself is read by several readers, and again in the next epoch:
    # each has its own copy of it as it was at first.
    keeps_place = hasattr(data, "load_state_dict")
    return Shards([name], lambda n, epoch: copy.deepcopy(data) if keeps_place else data)


def _open_of_datasets(data: Any, size: int) -> Callable[[int, int], Any]:
    """Open a shard by itself. The library's shuffle buffer is not in its `state_dict`, so with one
    the state is not used: samples are counted."""
    inner, has_buffer = getattr(data, "_ex_iterable", None), False
    while inner is not None:
        has_buffer |= hasattr(inner, "buffer_size")
        inner = getattr(inner, "ex_iterable", None)

    def open_shard(n: int, epoch: int) -> Any:
        shard = data.shard(num_shards=size, index=n, contiguous=False)
        shard.set_epoch(epoch)
        return iter(shard) if has_buffer else shard

    return open_shard
