"""A job that measures all that a job can: sums beside the loss, its own evaluation, hooks."""

from pathlib import Path

# 11 validation samples: no number of ranks that is tried divides them. A text says which sample it
# is, so that `metrics` sees who came twice, or out of order.
JOB = """
import json
import torch
from torch import nn
from paceline import Items, Section, Workload
from paceline.metrics import accuracy
from pydantic import Field

class Data:
    fingerprint = "points"
    def __init__(self, size, first): self.size, self.first = size, first
    def __len__(self): return self.size
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(self.first + index))
        return {"x": x, "y": (x[0] > 0).long() + (x[1] > 0.5).long(), "id": torch.tensor(index)}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x): return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks: x = block(x)
        return self.head(x)

class Model(Section):
    poison: int = Field(-1, description="the validation sample whose margin is NaN")

class Plain(Workload):
    Model = Model
    poison = -1
    def build_model(self, config):
        self.poison = config.model.poison
        return Net()
    def build_data(self, config, split): return Data(64, 0) if split == "train" else Data(11, 1000)
    def loss(self, model, batch):
        logits = model(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
        top = logits.max(-1).values
        rare = batch["y"] == 2
        return loss, len(logits), {
            "accuracy": accuracy(logits, batch["y"]), "margin": top.sum(),
            "rare": (top[rare].sum(), rare.sum()),
        }

class Late(Plain):
    calls = 0
    def loss(self, model, batch):
        loss, units, more = super().loss(model, batch)
        self.calls += model.training
        return loss, units, more | ({"late": loss} if self.calls > 4 else {})

class Own(Plain):
    def evaluate(self, model, batch):
        assert not model.training and not torch.is_grad_enabled()
        logits = model(batch["x"])
        margin = torch.where(batch["id"] == self.poison, torch.nan, logits.max(-1).values)
        return {
            "accuracy": accuracy(logits, batch["y"]), "margin": (margin.sum(), len(margin)),
            "ids": Items([f"sample {i}" for i in batch["id"].tolist()]),
            "logits": Items(logits), "labels": Items(batch["y"]),
        }
    def metrics(self, found):
        assert found["ids"] == [f"sample {n}" for n in range(len(found["ids"]))], found["ids"]
        right = found["logits"].argmax(-1) == found["labels"]
        seen, twice = len(found["ids"]), 2 * found["margin"]
        return {"seen": seen, "right": right.float().mean(), "twice": twice}

class Twice(Own):
    def evaluate(self, model, batch):
        model(batch["x"])
        return super().evaluate(model, batch)

class Misnamed(Own):
    def metrics(self, found): return {"f1": found["f1_sum"]}

class Needy(Own):
    def metrics(self, found):
        if len(found["ids"]) < 11: raise ValueError("only one class present")
        return super().metrics(found)

class Everywhere(Own):
    hook_ranks = "all"
    def tell(self, what, step, more):
        with open(f"{self.prepared['log']}.{torch.distributed.get_rank()}", "a") as file:
            file.write(json.dumps([what, step, more]) + "\\n")
    def prepare(self, config, say): return {"log": config.name}
    def on_step(self, step, record): self.tell("step", step, record["train/accuracy"])
    def on_eval(self, step, metrics): self.tell("eval", step, metrics["val/accuracy"])
    def on_checkpoint(self, step, path): self.tell("checkpoint", step, path.name)

class Raising(Own):
    def on_step(self, step, record):
        if step == 3: raise ValueError("no room")
"""
SETTINGS = [
    "optim.name=sgd", "optim.lr=0.1", "optim.schedule.name=constant", "train.steps=6",
    "train.eval_every=3", "train.global_batch_size=12", "train.log_every=2", "data.num_workers=0",
    "launch.device=cpu", "checkpoint.at_end=false",
]  # fmt: skip


def write_metric_job(folder: Path) -> str:
    """Return the file's name; its classes are Plain, Late, Own and so on."""
    (folder / "metric_job.py").write_text(JOB)
    return str(folder / "metric_job.py")
