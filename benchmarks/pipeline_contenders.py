"""What races in benchmarks/pipeline.py: one model of equal stages, trained by Paceline's pipeline,
and by the simplest script around torch.distributed.pipelining."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_overhead import Turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from paceline import Workload
from paceline.config.load import dump_config
from paceline.config.section import Positive, Section
from paceline.data.cursor import Order, StepSlice
from paceline.job import Job, load_job
from paceline.machine.facts import probe
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.schedules.orders import draw_schedule
from paceline.strategies.pipeline.by_torch import SEVERAL, SINGLE
from paceline.train.worker import RankRun

SEED, LR, CLIP, SAMPLES = 0, 1e-3, 1.0, 64


def set_turns(turns: Turns) -> None:
    global TURNS
    TURNS = turns


@dataclass(frozen=True)
class Setup:
    """`stuff`: what a block is made of, products or waits. There are two blocks a rank, so that one
    model serves schedules with one stage a rank and with two."""

    ranks: int
    microbatches: int
    stuff: str
    rows: int
    dim: int

    @property
    def model(self) -> dict[str, Any]:
        return {"blocks": 2 * self.ranks, "stuff": self.stuff, "rows": self.rows, "dim": self.dim}


LINEARS, WAIT_S = 24, 0.012  # in a block: matrix products; seconds of each third


class Model(Section):
    blocks: Positive = 4
    stuff: str = "products"
    rows: Positive = 64
    dim: Positive = 512


class Scale(nn.Module):
    """Before the blocks, so that the first one has a gradient of its inputs to compute too."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Products(nn.Module):
    """A forward, an input backward and a weight backward of the same matrix products."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(dim, dim) * dim**-0.5 for _ in range(LINEARS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight)
        return x


class WaitForInput(torch.autograd.Function):
    """Waits in forward, and in the backward of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return gradient


class WaitForWeight(torch.autograd.Function):
    """Waits in the backward of the weights: a branch of its own, so that halves can run apart."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return gradient


class Waits(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return WaitForInput.apply(x) + WaitForWeight.apply(self.weight)


class Stack(nn.Module):
    def __init__(self, blocks: int, stuff: str, dim: int) -> None:
        super().__init__()
        kind = {"products": Products, "waits": Waits}[stuff]
        self.stem = Scale(dim)
        self.blocks = nn.ModuleList(kind(dim) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Rows:
    """A sample is a matrix: one microbatch."""

    def __init__(self, rows: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, rows, dim, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]

    def batch(self, indices: Any) -> Tensor:
        TURNS.tick()
        return self.x[indices]


class Bench(Workload):
    Model = Model

    def build_model(self, config: Any) -> nn.Module:
        torch.manual_seed(SEED)
        return Stack(config.model.blocks, config.model.stuff, config.model.dim)

    def build_data(self, config: Any, split: str) -> Rows | None:
        return Rows(config.model.rows, config.model.dim) if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum(), len(batch)

    def flops(self, config: Any) -> float:
        return 1.0


class Part(nn.Module):
    """A stage as one writes it by hand."""

    def __init__(self, model: Stack, index: int, num_stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // num_stages
        own = list(model.blocks)[index * each : (index + 1) * each]
        self.layers = nn.Sequential(*([model.stem] if index == 0 else []), *own)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def by_hand(setup: Setup, name: str, rank: int, steps: int, folder: Path) -> list[float]:
    """torch.distributed.pipelining by its public API, and nothing else."""
    torch.manual_seed(SEED)
    model = Stack(setup.model["blocks"], setup.stuff, setup.dim)
    homes = draw_schedule(name, setup.ranks, setup.microbatches).homes[0]
    own = [index for index, home in enumerate(homes) if home == rank]
    has_first, has_last = 0 in own, len(homes) - 1 in own
    parts = [Part(model, index, len(homes)) for index in own]
    stages = [
        PipelineStage(part, index, len(homes), torch.device("cpu"))
        for part, index in zip(parts, own, strict=True)
    ]
    settings = {
        "n_microbatches": setup.microbatches,
        "loss_fn": lambda output, target: output.square().sum() / setup.microbatches,
        "scale_grads": False,
    }
    kind = SINGLE.get(name) or SEVERAL[name]
    schedule = kind(stages[0] if name in SINGLE else stages, **settings)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LR, fused=True)
    data, order = Rows(setup.rows, setup.dim), Order(SAMPLES, SEED)
    losses = []
    for step in range(steps):
        x = data.batch(order.at(StepSlice(setup.microbatches, 1, 1, 0).positions(step)))
        target = torch.zeros(setup.microbatches) if has_last else None
        made: list[Tensor] = []
        schedule.step(*([x] if has_first else []), target=target, losses=made, return_outputs=False)
        squared = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, squared.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(sum(float(loss.detach()) for loss in made))
    return losses if has_last else []


def load_bench(setup: Setup, name: str, steps: int) -> Job:
    overrides = [
        f"train.steps={steps}", f"train.micro_batch_size={setup.microbatches}",
        "optim.name=sgd", f"optim.lr={LR}", "optim.weight_decay=0", f"optim.clip={CLIP}",
        "optim.schedule.name=constant", "data.num_workers=0",
        f"launch.nproc={setup.ranks}", "launch.device=cpu",
        "strategy.name=pipeline", f"strategy.schedule={name}", "strategy.split=layers",
        f"strategy.microbatches={setup.microbatches}",
        *(f"model.{key}={value}" for key, value in setup.model.items()),
    ]  # fmt: skip
    return load_job(f"{__file__}:Bench", overrides)


def ours(setup: Setup, name: str, rank: int, steps: int, folder: Path) -> list[float]:
    job = load_bench(setup, name, steps)
    sys.modules["paceline_job_pipeline_contenders"].set_turns(TURNS)  # the copy that the job uses
    run = RunDir(folder)
    run.config.write_text(dump_config(job.config))
    RankRun(job, make_plan(job, probe()), run, RankId(rank, rank, setup.ranks)).execute()
    return [row.loss for row in read_training(run.training)] if rank == 0 else []


CONTENDERS: dict[str, Callable[[Setup, str, int, int, Path], list[float]]] = {
    "by hand": by_hand,
    "paceline": ours,
}
