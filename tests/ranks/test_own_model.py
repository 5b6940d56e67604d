"""A workload is handed its own model, whatever a strategy has put around it."""

from pathlib import Path

import pytest

from tests.harness import RankEnds, run_each, run_here
from tests.parity import assert_same_weights

# Items, methods and attributes of the model are used, in training and in evaluation; two forward
# passes make one loss; targets are numbers that must stay in fp32.
JOB = """
import torch
from torch import nn
from paceline import Workload

class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        x = torch.rand(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum() + 1 / 3}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x): return x + torch.tanh(self.inner(x))

class Net(nn.ModuleDict):
    def __init__(self):
        super().__init__({"g": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
        self.blocks = nn.ModuleList([Block(), Block()])
        self.bias = nn.Parameter(torch.zeros(8))
        self.temperature = 2.0
    def encode(self, x):
        x = self["g"](x) + self.bias
        for block in self.blocks: x = block(x)
        return x

class Own(Workload):
    def build_model(self, config): return Net()
    def build_data(self, config, split): return Data()
    def loss(self, model, batch):
        assert type(model).__name__.endswith("Net"), type(model)
        assert batch["y"].dtype == torch.float32, batch["y"].dtype
        near = model["head"](model.encode(batch["x"])) / model.temperature
        far = model["head"](model.encode(1 - batch["x"])) / model.temperature
        error = (near - batch["y"][:, None]).square() + (far + batch["y"][:, None]).square()
        return error.sum(), len(batch["x"])
"""
SETTINGS = [
    "optim.name=sgd", "optim.lr=0.02", "optim.schedule.name=constant", "train.steps=8",
    "train.eval_every=4", "train.global_batch_size=8", "data.num_workers=0", "launch.device=cpu",
]  # fmt: skip
TWO = ["launch.nproc=2", "train.micro_batch_size=2"]
CASES = {
    "ddp": ["strategy.name=ddp"],
    "ddp, static graph": ["strategy.name=ddp", "strategy.static_graph=true"],
    "zero1": ["strategy.name=zero1"],
    "zero2": ["strategy.name=zero2"],
    "zero3": ["strategy.name=zero3"],
    "zero3, deferred, recomputed": [
        "strategy.name=zero3", "strategy.accumulate=defer", "train.activation_checkpointing=full",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(JOB)
    return f"{file}:Own"


@pytest.fixture(scope="module")
def reference(job: str, tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    folder = tmp_path_factory.mktemp("reference") / "run"
    return run_here(folder, job, [*SETTINGS, "train.micro_batch_size=8"])


@pytest.mark.slow
def test_items_and_methods_of_the_model_are_there_on_two_ranks(
    job: str, reference: RankEnds, tmp_path: Path
) -> None:
    cases = {name: [*SETTINGS, *TWO, *more] for name, more in CASES.items()}
    for name, ends in run_each(tmp_path, job, cases).items():
        for expected, found in zip(reference.rows, ends.rows, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-5), name
            if expected.step % 4 == 0:
                assert found.val_loss == pytest.approx(expected.val_loss, rel=1e-5), name
        assert_same_weights(reference, ends)
    assert reference.rows[-1].loss < reference.rows[0].loss, "nothing was learned"


def test_what_is_no_weight_keeps_its_type_in_bf16(job: str, tmp_path: Path) -> None:
    """The whole batch goes through the wrapper; only what meets weights may be rounded."""
    cases = {
        name: [*SETTINGS, *TWO, f"strategy.name={name}", "precision.mode=bf16"]
        for name in ("ddp", "zero3")
    }
    ends = run_each(tmp_path, job, cases)
    for expected, found in zip(ends["ddp"].rows, ends["zero3"].rows, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
