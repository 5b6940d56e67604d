"""Moments in 8 bits in checkpoints: from any ranks to any others, and in the audit of a run."""

from pathlib import Path

import pytest

from paceline.records import Audit
from tests.harness import run_here
from tests.legs import Leg, assert_same_bits, assert_same_state, read_all, run_legs
from tests.parity import BATCH, tiny_model
from tests.skips import needs_torchao

pytestmark = [pytest.mark.slow, needs_torchao]

# Each rank of four takes two rows of `head`, and the last one none. All but its bias are in 8 bits.
WIDE = """
import torch
from torch import nn
from paceline import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False)])
        self.narrow = nn.Linear(256, 1024, bias=False)
        self.head = nn.Linear(1024, 6)
    def forward(self, x):
        for block in self.blocks: x = torch.tanh(block(x))
        return self.head(torch.tanh(self.narrow(x)))

class Job(Workload):
    def build_model(self, config): return Net().to(torch.TYPE)
    def build_data(self, config, split):
        if split == "train":
            return [(torch.linspace(-1, n / 64, 256, dtype=torch.TYPE), n % 6) for n in range(64)]
    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x).float(), y, reduction="sum"), len(y)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_a_rank_has_not_are_on_others(dtype: str, tmp_path: Path) -> None:
    own = tmp_path / "wide.py"
    own.write_text(WIDE.replace("TYPE", dtype))
    job, four, *two = f"{own}:Job", "zero3", "zero2", "zero1", "ddp"
    first, again = run_legs(tmp_path / "4", job, [eight_bit(four, 4), eight_bit(four, 4)])
    kept = read_all(first)
    assert kept["optimizer:exp_avg_scales/head.weight"].shape == (6, 4)
    assert_same_state(first, again)
    for folder in run_legs(tmp_path / "2", job, [eight_bit(name, 2) for name in two], first):
        assert_same_bits(kept, read_all(folder))


def eight_bit(strategy: str, num_ranks: int) -> Leg:
    return Leg(strategy, num_ranks, ("optim.name=adamw8bit",))


def test_an_update_that_nobody_compiles_is_no_mismatch(tmp_path: Path) -> None:
    """On a CPU it is plain torch."""
    asked = [*tiny_model(), *BATCH, "train.steps=3", "train.micro_batch_size=16"]
    ends = run_here(tmp_path, "lm_tiny", [*asked, "optim.name=adamw8bit"])
    (found,) = [p for p in Audit.load(ends.run.audit).proofs if p.what == "torch.compile"]
    assert found.ok and found.effective.startswith("0 graphs")
