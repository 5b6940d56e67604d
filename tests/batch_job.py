"""Jobs whose samples differ in size, or come in turn: what one process computes all ranks must."""

from pathlib import Path

JOB = """
import torch
from torch import nn
from pydantic import Field
from paceline import DataConfig, Workload
from paceline.data import pad

def sentence(index):
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(2, 30, (), generator=generator))
    return {"tokens": torch.randint(1, 20, (length,), generator=generator)}

class Sentences:
    fingerprint = "sentences"
    def __init__(self, size, first=0):
        self.size, self.first = size, first
        self.lengths = [len(sentence(first + n)["tokens"]) for n in range(size)]
    def __len__(self): return self.size
    def __getitem__(self, index): return sentence(self.first + index)

class Files:
    def __init__(self, state): self.shards, self.state = [f"part-{k}" for k in range(6)], state
    def open(self, shard):
        first = 100 * int(shard[5:])
        return Counted(first, 9) if self.state else (sentence(n) for n in range(first, first + 9))

class Counted:
    def __init__(self, first, size): self.first, self.size, self.given = first, size, 0
    def __iter__(self):
        while self.given < self.size:
            self.given += 1
            yield sentence(self.first + self.given - 1)
    def state_dict(self): return {"given": self.given}
    def load_state_dict(self, state): self.given = state["given"]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x): return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 20)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks: x = block(x)
        return self.head(x)

class Padded(Workload):
    unit = "tokens"
    def build_model(self, config): return Net()
    def build_data(self, config, split):
        return Sentences(90) if split == "train" else Sentences(13, 500)
    def collate(self, samples): return pad(samples)
    def loss(self, model, batch):
        logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, self.units(batch)
    def units_per_sample(self, config): return None
    def units(self, batch): return int((batch["tokens"][:, 1:] != 0).sum())

class PerSample(Padded):
    unit = "samples"
    def loss(self, model, batch): return super().loss(model, batch)[0], len(batch["tokens"])
    def units_per_sample(self, config): return 1

WEIGHTS = torch.linspace(0.0, 2.0, 20)

class Weighted(Padded):
    def loss(self, model, batch):
        logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), WEIGHTS, reduction="sum")
        return loss, self.units(batch)
    def units(self, batch): return WEIGHTS[batch["tokens"][:, 1:]].sum()

class Halves(Padded):
    def loss(self, model, batch): return super().loss(model, batch)[0], 3.4999998
    def units(self, batch): return 3.5

class Mean(PerSample):
    def loss(self, model, batch):
        loss, count = super().loss(model, batch)
        return loss / count, count

class Streamed(Padded):
    state = True
    def build_data(self, config, split): return Files(self.state) if split == "train" else None

class Turned(Streamed):
    state = False

class Ended(Streamed):
    def build_data(self, config, split):
        return super().build_data(config, split) if split == "train" else Sentences(13, 500)

class ValStream(Padded):
    def build_data(self, config, split): return Sentences(90) if split == "train" else Files(True)

class Failing(Padded):
    def collate(self, samples):
        assert all(len(sample["tokens"]) != 27 for sample in samples), "27 is too long"
        return pad(samples)

class Wide(Padded):
    def build_data(self, config, split): return Ragged()

class Narrow(Padded):
    def build_model(self, config): return nn.Sequential(nn.Embedding(20, 8), nn.Linear(7, 20))
    def build_data(self, config, split): return [{"tokens": torch.ones(5).long()}] * 64

class Odd(Streamed):
    def build_model(self, config): return nn.Sequential(nn.Embedding(20, 8), nn.Linear(7, 20))

class Poisoned(Turned):
    def loss(self, model, batch):
        loss, units = super().loss(model, batch)
        bad = (batch["tokens"][:, 0] == 7).any() & torch.tensor(model.training)
        return torch.where(bad, torch.nan, loss), units

class Empty(Padded):
    def build_data(self, config, split): return []

class Neither(Padded):
    def build_data(self, config, split): return 3

class Ragged:
    def __len__(self): return 64
    def __getitem__(self, index):
        return {"tokens": torch.full((5 + (index > 40), 2)[: 1 + (index > 40)], 3)}
"""
SETTINGS = [
    "optim.name=sgd", "optim.lr=0.1", "optim.schedule.name=constant", "train.steps=8",
    "train.log_every=2", "data.num_workers=0", "launch.device=cpu", "checkpoint.at_end=false",
]  # fmt: skip
BY_LENGTH = [
    "data.batch_by=length", "data.batch_length=96", "data.buckets=4", "train.global_batch_size=4",
]  # fmt: skip
BUCKETS = ["data.buckets=4", "train.micro_batch_size=4", "train.global_batch_size=16"]


def write_batch_job(folder: Path) -> str:
    (folder / "batch_job.py").write_text(JOB)
    return str(folder / "batch_job.py")
