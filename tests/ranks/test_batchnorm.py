"""BatchNorm: with `strategy.sync_batchnorm` ranks compute what one process does; without it they
agree on their buffers; to recompute counts nothing twice."""

import csv
from pathlib import Path

import pytest
import torch

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Finding
from paceline.records.rundir import RunDir
from tests.harness import run_each, run_here
from tests.parity import assert_same_weights

JOB = """
import torch
from torch import nn
from paceline import Workload

class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        x = torch.rand(3, 6, generator=torch.Generator().manual_seed(index))
        return {"x": (1 + index % 3) * x + index % 5, "y": torch.tensor(index % 4)}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
    def forward(self, x): return x + torch.tanh(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8, momentum=None)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False))
    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks: x = block(x)
        return self.head(x.mean(-1))

class Job(Workload):
    def build_model(self, config): return Net()
    def build_data(self, config, split): return Data()
    def loss(self, model, batch):
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits, batch["y"], reduction="sum"), len(logits)
"""
SETTINGS = [
    "optim.name=sgd", "optim.lr=0.1", "optim.schedule.name=constant", "train.steps=6",
    "train.eval_every=3", "train.global_batch_size=8", "data.num_workers=0", "launch.device=cpu",
]  # fmt: skip
TWO = ["launch.nproc=2", "train.micro_batch_size=4"]
SYNCED = "strategy.sync_batchnorm=true"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("normed") / "normed.py"
    file.write_text(JOB)
    return f"{file}:Job"


def waited_s(run: RunDir, rank: int) -> float:
    """Return how long a rank waited for the other in its forward passes."""
    with run.steps(rank).open() as file:
        return sum(float(row["forward_blocked_s"]) for row in csv.DictReader(file))


@pytest.mark.slow
def test_two_ranks_equal_one_where_statistics_are_shared(job: str, tmp_path: Path) -> None:
    reference = run_here(tmp_path / "one", job, [*SETTINGS, "train.micro_batch_size=8"])
    cases = {
        "ddp": ["strategy.name=ddp", SYNCED],
        "zero1": ["strategy.name=zero1", SYNCED],
        "zero2": ["strategy.name=zero2", SYNCED],
        "zero3": ["strategy.name=zero3", SYNCED, "train.activation_checkpointing=full"],
        "apart": ["strategy.name=ddp"],
        "apart, zero3": ["strategy.name=zero3"],
    }
    ends = run_each(tmp_path, job, {name: [*SETTINGS, *TWO, *m] for name, m in cases.items()})
    for name in ("ddp", "zero1", "zero2", "zero3"):
        for expected, found in zip(reference.rows, ends[name].rows, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-5), name
            if expected.step % 3 == 0:
                assert found.val_loss == pytest.approx(expected.val_loss, rel=1e-5), name
        assert_same_weights(reference, ends[name])
        assert min(waited_s(ends[name].run, rank) for rank in (0, 1)) > 0, name
    assert waited_s(ends["apart"].run, 0) == 0, "nothing is exchanged in its forward pass"
    for name in ("apart", "apart, zero3"):
        found = ends[name]
        assert found.rows[0].loss != pytest.approx(reference.rows[0].loss, rel=1e-4)
        ours, theirs = (state.weights for state in found.states)
        assert all(torch.equal(theirs[key], value) for key, value in ours.items()), name
    first, second = (row.val_loss for row in (ends["apart"].rows[2], ends["apart, zero3"].rows[2]))
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_to_recompute_counts_no_batch_twice(job: str, kind: str, tmp_path: Path) -> None:
    one = [*SETTINGS, "train.micro_batch_size=4"]
    plain = run_here(tmp_path / "plain", job, one).states[0].weights
    again = [*one, f"train.activation_checkpointing={kind}"]
    recomputed = run_here(tmp_path / "again", job, again).states[0].weights
    assert int(plain["blocks.0.norm.num_batches_tracked"]) == 12
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-6, atol=1e-7)


def findings(job: str, *more: str) -> list[Finding]:
    plan = make_plan(load_job(job, ["launch.device=cpu", *more]), probe())
    return [finding for finding in plan.findings if "BatchNorm" in finding.what + finding.hint]


def test_what_differs_is_said_before_anything_starts(job: str) -> None:
    two = ["launch.nproc=2", "train.micro_batch_size=4"]
    [told] = findings(job, *two)
    assert (told.severity, told.where) == ("warning", "strategy.sync_batchnorm")
    assert "4 BatchNorm layers" in told.what and "8 samples of all ranks" in told.hint
    assert findings(job, *two, SYNCED) == []
    assert findings(job) == []
    [told] = findings(job, "train.grad_accum=2")
    assert told.severity == "note" and "8 samples at a time, not the 16" in told.what


@pytest.mark.parametrize(
    ("source", "more", "what"),
    [
        ("lm_tiny", ["launch.nproc=2"], "the model has no BatchNorm"),
        ("own", [], "one rank has nobody to share with"),
        ("own", ["launch.nproc=4", "strategy.name=pipeline", "strategy.stages=2"], "with pipeline"),
    ],
)
def test_where_it_cannot_be_shared(job: str, source: str, more: list[str], what: str) -> None:
    name = job if source == "own" else source
    plan = make_plan(load_job(name, ["launch.device=cpu", SYNCED, *more]), probe())
    assert any(what in f.what for f in plan.findings if f.where == "strategy.sync_batchnorm")
