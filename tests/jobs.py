"""Small jobs as users write them, with a place for trouble."""

from pathlib import Path

# `{trouble}` stands where a line of the user's loss would.
LINE = """
import ctypes, os, resource, subprocess, sys, time
import torch
from torch import nn
from paceline import Workload

class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), index / 64)

class Job(Workload):
    def build_model(self, config): return nn.Linear(4, 1)
    def build_data(self, config, split): return Data() if split == "train" else None
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        {trouble}
        return model(batch).sum(), len(batch)
"""
# A sample whose loss or gradient is not finite.
BAD = """
import torch
from torch import nn
from paceline import Section, Workload
from pydantic import Field

class Data:
    fingerprint = "line"
    def __len__(self): return 64
    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 64), "id": torch.tensor(index)}

class Model(Section):
    poison: int = Field(-1, description="sample whose loss is bad")
    kind: str = Field("nan", description="nan loss, inf loss with a finite gradient, or grad")

class Bad(Workload):
    Model = Model
    def __init__(self): self.poison, self.kind = -1, "nan"
    def build_model(self, config):
        self.poison, self.kind = config.model.poison, config.model.kind
        return nn.Linear(4, 1)
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch):
        y = model(batch["x"]).squeeze(1)
        bad = (batch["id"] == self.poison).any()
        loss = (y ** 2).sum()
        if self.kind == "nan" and bad: loss = loss * float("nan")
        if self.kind == "inf": loss = loss + torch.where(bad, float("inf"), 0.0)
        if self.kind == "grad" and bad: y.register_hook(lambda g: g * float("nan"))
        return loss, len(y)
"""
BAD_STEPS = 8
BAD_SETTINGS = [
    f"train.steps={BAD_STEPS}", "train.micro_batch_size=4", "data.num_workers=0", "optim.lr=0.1",
    "launch.device=cpu", "train.log_every=3",
]  # fmt: skip


def write_line_job(folder: Path, trouble: str) -> str:
    (folder / "job.py").write_text(LINE.replace("{trouble}", trouble))
    return "job.py:Job"


def write_bad_job(folder: Path) -> str:
    (folder / "bad_job.py").write_text(BAD)
    return f"{folder / 'bad_job.py'}:Bad"


def poisoned_sample(rank: int, num_ranks: int = 2) -> int:
    """A sample that `rank` meets in step 5 of the bad job."""
    from paceline.data.cursor import Order, StepSlice

    return int(Order(64, 0).at(StepSlice(4, 1, num_ranks, rank).positions(4))[0])
