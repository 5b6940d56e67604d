"""Turns samples into a batch, by the job's rule or torch's; names the sample at fault if that
fails."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from paceline.data.base import Dataset
from paceline.data.cursor import Indices
from paceline.data.padding import BadSample
from paceline.errors import DataError
from paceline.records.words import few

Collate = Callable[[list[Any]], Any]
UNLIKE = "give all samples the same keys, and shapes that differ in their first dimension at most"
UNEQUAL = (
    "samples of different shapes need a rule: write collate(self, samples) in the workload;"
    " paceline.data.pad(samples) pads them to the longest"
)


class Made(NamedTuple):
    """A batch, and how long it took to read its samples and to put them together."""

    batch: Any
    read_s: float
    joined_s: float


def collate(
    data: Dataset, sample_ids: Indices, own: Collate | None = None, place: int | None = None
) -> Any:
    """Return the batch that `make_batch` makes."""
    return make_batch(data, sample_ids, own, place).batch


def make_batch(
    data: Dataset, sample_ids: Indices, own: Collate | None = None, place: int | None = None
) -> Made:
    """Build a batch of these samples: by `own`, the workload's rule, else by the data set's.

    A data set that draws random numbers may have `at(index, position)`: the samples stand at
    positions `place`, `place + 1` and so on of the run, so what it draws depends on neither ranks,
    nor loaders, nor microbatches. In validation there is no place."""
    whole, begun = getattr(data, "batch", None), time.perf_counter()
    if own is None and whole is not None and not _is_of_datasets(data):
        try:
            return Made(whole(sample_ids), time.perf_counter() - begun, 0.0)
        except DataError:
            raise
        except Exception as error:
            named = few([str(index) for index in sample_ids])
            raise DataError(f"{_name(whole)} failed on samples {named}: {_told(error)}") from error
    ids = sample_ids.tolist()
    samples = [_sample(data, ids[n], None if place is None else place + n) for n in range(len(ids))]
    read = time.perf_counter()
    batch = join(samples, own or rule_of(data), lambda n: f"sample {sample_ids[n]}")
    return Made(batch, read - begun, time.perf_counter() - read)


def rule_of(data: Any) -> Collate | None:
    """Return the data set's own function that makes a batch of samples, if it has one."""
    rule: Collate | None = getattr(data, "collate_fn", None) or getattr(data, "collate", None)
    return rule


def join(samples: list[Any], rule: Collate | None, name: Callable[[int], str]) -> Any:
    """Make a batch of samples; `name` says in an error which sample the n-th one is."""
    try:
        if rule is not None:
            return rule(samples)
        _require_equal_keys(samples)
        return default_collate(samples)
    except DataError:
        raise
    except Exception as error:
        raise _blamed(samples, rule or default_collate, name, error) from error


def _sample(data: Any, index: int, position: int | None) -> Any:
    try:
        return (
            data.at(index, position)
            if position is not None and hasattr(data, "at")
            else data[index]
        )
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the data set failed on sample {index}: {_told(error)}") from error


def _require_equal_keys(samples: list[Any]) -> None:
    """torch uses the first sample's keys: further keys of the others would be dropped."""
    first = samples[0]
    if isinstance(first, dict):
        for number, sample in enumerate(samples):
            if not isinstance(sample, dict) or sample.keys() != first.keys():
                raise BadSample(number, f"{form_of(sample)}, and the first one {form_of(first)}")


def _blamed(
    samples: list[Any], rule: Collate, name: Callable[[int], str], error: Exception
) -> DataError:
    """Find the sample at fault: the one that the error names, those that fail alone too, or one
    that is not like the first; else name all of them."""
    names = [name(number) for number in range(len(samples))]
    if isinstance(error, BadSample):
        return DataError(
            f"{names[error.number]} has {error.what} of its batch ({names[0]})\nhint: {UNLIKE}"
        )
    alone = [number for number, sample in enumerate(samples) if _fails(rule, sample)]
    odd = next((n for n, s in enumerate(samples) if form_of(s) != form_of(samples[0])), None)
    if alone and len(alone) < len(samples):
        culprits = few([names[number] for number in alone])
        return DataError(f"{_name(rule)} failed on {culprits}: {_told(error)}")
    if odd is not None:
        return DataError(
            f"{_name(rule)} failed: {_told(error)}\n{names[odd]} has {form_of(samples[odd])}, and"
            f" {names[0]} {form_of(samples[0])}\nhint: {UNEQUAL}"
        )
    return DataError(f"{_name(rule)} failed on {few(names)}: {_told(error)}")


def _fails(rule: Collate, sample: Any) -> bool:
    try:
        rule([sample])
    except Exception:
        return True
    return False


def form_of(sample: Any) -> str:
    """Describe a sample by its keys and shapes."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {form_of(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list) and sample and not isinstance(sample[0], int | float):
        return "(" + ", ".join(form_of(value) for value in sample) + ")"
    shape = getattr(sample, "shape", None)
    if shape is not None:
        return f"shape {list(shape)}"
    return f"{len(sample)} numbers" if isinstance(sample, list) else f"a {type(sample).__name__}"


def _is_of_datasets(data: Any) -> bool:
    """Hugging Face's data sets have a `batch` that means something else."""
    return type(data).__module__.startswith("datasets.")


def _name(rule: Any) -> str:
    return str(getattr(rule, "__qualname__", None) or type(rule).__name__)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
