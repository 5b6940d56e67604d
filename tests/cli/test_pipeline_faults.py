"""What a pipeline says when a rank of it dies or hangs: which stage, which microbatch."""

import pytest

from tests.cli.bench import SMALL, Bench, finish

JOB = """
import os, signal, time
import torch
from torch import nn
from paceline import Workload

class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), index / 64)

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.calls, self.linear = number, 0, nn.Linear(4, 4)
    def forward(self, x):
        self.calls += self.training and x.requires_grad
        if self.number == 1 and self.calls == 7:
            {trouble}
        return self.linear(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for n in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Job(Workload):
    def build_model(self, config): return Model()
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch): return model(batch).square().sum(), len(batch)
"""
PIPELINE = ["strategy.name=pipeline", "launch.nproc=2", "strategy.microbatches=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 5),
        ("raise ValueError('planted')", 5),
        ("time.sleep(600)", 6),
    ],
)
def test_a_rank_that_fails_is_named_with_its_stage_and_microbatch(
    trouble: str, code: int, bench: Bench
) -> None:
    (bench.folder / "job.py").write_text(JOB.replace("{trouble}", trouble))
    words = ["train", "job.py:Job", *SMALL, *PIPELINE, "launch.progress_s=3", "--out", "run"]
    ran = finish(bench.start(*words))
    assert ran.code == code, ran.err
    failure = bench.result()["failure"]
    assert failure["rank"] == 1
    # Step 1 has calls 1 to 4 of block 1: the seventh is the third microbatch of step 2.
    assert "stage 1, forward of microbatch 2" in failure["message"], failure
