"""From samples to a batch: who makes it, how it is padded, and who is named where it cannot be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data import pad
from paceline.data.collate import collate
from paceline.errors import DataError
from paceline.workloads.base import Workload, own_collate

IDS = np.array([5, 2, 9])


class Data:
    """Sample i is what `make(i)` says."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def ragged(index: int) -> Tensor:
    return torch.full((index,), index)


class OfData(Data):
    def collate_fn(self, samples: list[Any]) -> Any:
        return "collate_fn", len(samples)


class OfBatch(OfData):
    def batch(self, indices: Any) -> Any:
        return "batch", list(indices)


class Job(Workload):
    def collate(self, samples: list[Any]) -> Any:
        return "job", len(samples)


def test_the_workload_comes_first_then_the_data_set_then_torch() -> None:
    own = own_collate(Job())
    assert own is not None and own_collate(Workload()) is None
    assert collate(OfBatch(ragged), IDS, own) == ("job", 3)
    assert collate(OfBatch(ragged), IDS) == ("batch", [5, 2, 9])
    assert collate(OfData(ragged), IDS) == ("collate_fn", 3)
    assert collate(Data(torch.tensor), IDS).tolist() == [5, 2, 9]
    assert Workload().collate([torch.ones(2), torch.ones(2)]).shape == (2, 2)


def test_a_data_set_of_hugging_face_is_not_asked_for_its_batch() -> None:
    """Theirs makes batches of rows: `batch(8)` is another data set."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(20))})
    assert collate(data, IDS)["x"].tolist() == [5, 2, 9]


def test_pad_fills_up_to_the_longest() -> None:
    batch = pad([ragged(3), ragged(1)], fill=-1)
    assert batch.tolist() == [[3, 3, 3], [1, -1, -1]]
    assert pad([ragged(3), ragged(3)], multiple=4).shape == (2, 4)
    frames = pad([torch.ones(2, 5), torch.ones(4, 5)])
    assert frames.shape == (2, 4, 5) and frames[0, 2:].sum() == 0


def test_pad_by_key_leaves_the_others_alone() -> None:
    samples = [
        {"tokens": [1, 2, 3], "label": 7, "fixed": torch.ones(2), "name": "a"},
        {"tokens": [4], "label": 8, "fixed": torch.ones(2), "name": "b"},
    ]
    batch = pad(samples, fill={"tokens": -100}, multiple=2, lengths=True)
    assert batch["tokens"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["tokens_length"].tolist() == [3, 1]
    assert batch["label"].tolist() == [7, 8] and batch["fixed"].shape == (2, 2)
    assert batch["name"] == ["a", "b"] and "fixed_length" not in batch
    pair = pad([(np.ones(2), 1), (np.ones(3), 2)])
    assert pair[0].shape == (2, 3) and pair[1].tolist() == [1, 2]


def broken(index: int) -> dict[str, Tensor]:
    return {"x": torch.ones(4)} | ({"y": torch.ones(1)} if index == 2 else {})


def raising(samples: list[Any]) -> Any:
    for sample in samples:
        if sample == 2:
            raise ValueError("no transcript")


CASES: dict[str, tuple[Callable[[int], Any], Any, str]] = {
    "shapes": (ragged, None, r"sample 2 has shape \[2\], and sample 5 shape \[5\]\nhint: .*pad"),
    "keys": (broken, None, r"sample 2 has {x: .*, y: .*first one {x: .* of its batch \(sample 5\)"),
    "keys, padded": (broken, pad, r"sample 2 has the keys x, y, and the first one x of its batch"),
    "one raises": (lambda index: index, raising, r"raising failed on sample 2: .*no transcript"),
    "one fails": ({5: 1, 2: 1}.__getitem__, None, r"data set failed on sample 9: KeyError"),
    "width": (
        lambda index: torch.ones(3, 4 - (index == 9)),
        pad,
        r"sample 9 has shape \[3, 3\], and the first one \[3, 4\]",
    ),
    "all": (lambda index: object(), None, r"default_collate failed on sample 5, sample 2, sample"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sample_is_named(case: str) -> None:
    make, rule, says = CASES[case]
    with pytest.raises(DataError, match=says):
        collate(Data(make), IDS, rule)
