"""A loss that is a mean is refused before step 1; whatever else a loss may be is left alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import Workload
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Plan, RankVerdict
from paceline.records.rundir import RunDir
from paceline.strategies.base import Totals
from paceline.train import worker
from paceline.train.first_batch import FirstBatch
from tests.harness import alone, run_here, run_ranks

SIZE = 8
Loss = Callable[[Any], Tensor]


@dataclass
class FakeEngine:
    """Computes one loss, and notes how often it was asked."""

    compute: Loss
    module: nn.Module
    num_asked: int = 0
    beside: Callable[[Any], dict[str, Any]] = lambda batch: {}

    def evaluate(self, batch: Any) -> Totals:
        self.num_asked += 1
        return Totals(self.compute(batch), len(batch["x"]), self.beside(batch))


class Job(Workload):
    def units(self, batch: Any) -> int:
        return int((batch["y"] >= 0).sum())


@pytest.fixture(scope="module")
def made() -> Plan:
    job = load_job("lm_tiny", ["launch.device=cpu", f"train.micro_batch_size={SIZE}"])
    return make_plan(job, probe()).model_copy(update={"units_per_sample": 1})


@pytest.fixture
def plan(made: Plan) -> Iterator[Plan]:
    """With a group of this process only."""
    with alone():
        yield made


def make_batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, 4, (SIZE,))
    y[[1, 4, 5]] = -100  # cross_entropy's way to leave targets out
    return {"x": torch.randn(SIZE, 4), "y": y}


def ask(compute: Loss, plan: Plan, batch: Any | None = None) -> FakeEngine:
    engine = FakeEngine(compute, nn.BatchNorm1d(4))
    device = torch.device("cpu")
    given = make_batch() if batch is None else batch
    first = FirstBatch(engine, Job(), plan, device, given, SIZE)  # type: ignore[arg-type]
    first.require_summed_loss()
    return engine


def info_nce(batch: Any, reduction: str = "sum") -> Tensor:
    views = nn.functional.normalize(batch["x"], dim=1)
    logits = views @ torch.roll(views, 1, dims=1).T
    return cross_entropy(logits, torch.arange(len(logits)), reduction=reduction)


MEANS: dict[str, Loss] = {
    "cross entropy": lambda b: cross_entropy(b["x"], b["y"].clamp(min=0)),
    "squares": lambda b: b["x"].square().mean(),
    "an untrained head of zeros": lambda b: cross_entropy(0 * b["x"], b["y"].clamp(min=0)),
    "noise in the model": lambda b: (b["x"] + 0.02 * torch.randn_like(b["x"])).square().mean(),
    "a negative one": lambda b: -b["x"].square().mean(),
}
NO_MEANS: dict[str, Loss] = {
    "cross entropy": lambda b: cross_entropy(b["x"], b["y"], reduction="sum"),
    "weighted": lambda b: (b["x"].square().sum(1) * torch.arange(1, len(b["x"]) + 1)).sum(),
    "contrastive": info_nce,
    "contrastive, mean times n": lambda b: len(b["x"]) * info_nce(b, "mean"),
    "both signs": lambda b: b["x"].sum(),
    "nothing": lambda b: 0 * b["x"].sum(),
    "not a number": lambda b: b["x"].sum() * float("nan"),
    "no end": lambda b: b["x"].sum() * 0 + float("inf"),
    "grows like the root": lambda b: b["x"].square().sum().sqrt(),
    "grows like the square": lambda b: b["x"].square().sum().square(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused(name: str, plan: Plan) -> None:
    with pytest.raises(ConfigError, match="Job.loss returns a mean") as refused:
        ask(MEANS[name], plan)
    assert "return the sum and the count" in str(refused.value)


@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_left_alone(name: str, plan: Plan) -> None:
    assert ask(NO_MEANS[name], plan).num_asked in (3, 6)


BESIDE: dict[str, Callable[[Tensor], tuple[Any, Any]]] = {
    "mean": lambda x: (x.mean(), len(x)),
    "constant": lambda x: (3.0, len(x)),
    "sum": lambda x: (x.sum(), len(x)),
    "per pass": lambda x: (x.mean(), 1),
    "nothing": lambda x: (0, 0),
    "unknown": lambda x: (float("nan"), len(x)),
    "largest": lambda x: (x.max() + 100 * len(x), len(x)),
}


@pytest.mark.parametrize("compute", [NO_MEANS["cross entropy"], info_nce])
def test_a_metric_that_is_a_mean_is_told_where_the_loss_is_a_sum(compute: Loss, plan: Plan) -> None:
    def beside(batch: Any) -> dict[str, Any]:
        return {name: make(batch["x"].square()) for name, make in BESIDE.items()}

    engine = FakeEngine(compute, nn.BatchNorm1d(4), beside=beside)
    device = torch.device("cpu")
    first = FirstBatch(engine, Job(), plan, device, make_batch(), SIZE)  # type: ignore[arg-type]
    told = [note.partition(":")[0] for note in first.require_summed_loss()]
    means = [f"Job.loss returns a mean as '{name}'" for name in ("mean", "constant")]
    assert told == ([] if compute is info_nce else means)


def test_a_mean_over_units_that_samples_have_differently_many_of(plan: Plan) -> None:
    counted = plan.model_copy(update={"units_per_sample": None})
    with pytest.raises(ConfigError, match="returns a mean"):
        ask(lambda b: cross_entropy(5 * b["x"], b["y"]), counted)


def test_a_loss_whose_units_do_not_grow_with_the_batch_may_be_a_mean(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit a batch: its loss is divided by as much."""
    monkeypatch.setattr(Job, "units", lambda self, batch: 1)
    counted = plan.model_copy(update={"units_per_sample": None})
    assert ask(MEANS["squares"], counted).num_asked == 0


@pytest.mark.parametrize(
    "more", [{"name": "text"}, {"edges": torch.ones(3)}, {"scalar": torch.tensor(1.0)}]
)
def test_a_batch_that_cannot_be_cut_is_not_asked(plan: Plan, more: dict[str, Any]) -> None:
    assert ask(MEANS["squares"], plan, make_batch() | more).num_asked == 0


def test_a_loss_that_cannot_be_evaluated_is_left_to_training(plan: Plan) -> None:
    def fails(batch: Any) -> Tensor:
        raise AttributeError("in evaluation this model returns boxes")

    whole = plan.model_copy(update={"model": plan.model.model_copy(update={"num_trainable": 8})})
    assert ask(fails, whole).num_asked == 1
    with pytest.raises(AttributeError, match="boxes"):
        ask(fails, plan)  # others hold the rest of the model, and wait


def test_generators_and_buffers_are_as_before(plan: Plan) -> None:
    module = nn.BatchNorm1d(4)
    drawn: list[Tensor] = []

    def draws(batch: Any) -> Tensor:
        drawn.append(torch.rand(1))
        module.running_mean.add_(1)  # type: ignore[union-attr,operator]
        return batch["x"].square().sum()

    batch = make_batch()
    before = torch.get_rng_state()
    engine = FakeEngine(draws, module)
    device = torch.device("cpu")
    first = FirstBatch(engine, Job(), plan, device, batch, SIZE)  # type: ignore[arg-type]
    first.require_summed_loss()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert len(set(map(float, drawn))) == 1, "all passes draw alike"


NET = """
import torch
from torch import nn
from paceline import Section, Workload
from pydantic import Field

class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        x = torch.rand(4, generator=torch.Generator().manual_seed(index))
        return {"x": x + 0.1 * torch.rand(4), "y": (x.sum() > 2).long()}

class Model(Section):
    reduction: str = Field("sum", description="how losses are put together")
    spare: bool = Field(False, description="have a layer that the loss does not use")
    detach: bool = Field(False, description="cut the loss off")

class Net(nn.Module):
    def __init__(self, spare):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 2)
        if spare: self.spare = nn.Linear(8, 2)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks: x = torch.relu(block(x))
        return self.last(x)

class Job(Workload):
    Model = Model
    def build_model(self, config):
        self.reduction, self.detach = config.model.reduction, config.model.detach
        return Net(config.model.spare)
    def build_data(self, config, split): return Data()
    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction=self.reduction)
        return loss.detach() if self.detach else loss, len(batch["y"])
"""
SHORT = ["train.steps=4", "train.eval_every=2", "data.num_workers=0", "launch.device=cpu"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(NET)
    return f"{file}:Job"


def test_no_bit_of_a_run_depends_on_it(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, BatchNorm and data that draws random numbers."""
    asked = run_here(tmp_path / "asked", job, SHORT)
    monkeypatch.setattr(worker, "is_worth_asking", lambda workload, plan: False)
    monkeypatch.setattr(worker, "try_evaluation", lambda *parts: [])
    unasked = run_here(tmp_path / "unasked", job, SHORT)
    pairs = zip(asked.rows, unasked.rows, strict=True)
    assert all((a.loss, a.grad_norm) == (b.loss, b.grad_norm) for a, b in pairs)
    weights = unasked.states[0].weights
    assert all(torch.equal(weights[n], w) for n, w in asked.states[0].weights.items())


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_two_ranks_refuse_a_mean(job: str, strategy: str, tmp_path: Path) -> None:
    mean = [*SHORT, "launch.nproc=2", f"strategy.name={strategy}", "model.reduction=mean"]
    with pytest.raises(AssertionError, match="Job.loss returns a mean"):
        run_ranks(tmp_path / "run", job, mean)


def test_a_pipeline_says_that_it_did_not_ask(job: str, tmp_path: Path) -> None:
    """Its parts are cut smaller still, which BatchNorm would not take."""
    two = [*SHORT, "launch.nproc=2", "strategy.name=pipeline", "strategy.microbatches=2"]
    ends = run_ranks(tmp_path / "run", job, two)
    assert any("whether the loss is a sum" in note for note in ends.verdicts[0].notes)


SPARE = [*SHORT, "model.spare=true"]
MISSED = "no gradient reached spare.weight, spare.bias"


def test_parameters_without_a_gradient_are_named(job: str, tmp_path: Path) -> None:
    [verdict] = run_here(tmp_path / "run", job, SPARE).verdicts
    assert any(note.startswith(f"{MISSED} in the first batch") for note in verdict.notes)
    [verdict] = run_here(tmp_path / "all_used", job, SHORT).verdicts
    assert not any("no gradient" in note for note in verdict.notes)


def test_ddp_names_the_parameters_that_it_waited_for(job: str, tmp_path: Path) -> None:
    """It ends with their numbers, among much else."""
    with pytest.raises(AssertionError, match="Expected to have finished reduction"):
        run_ranks(tmp_path / "run", job, [*SPARE, "launch.nproc=2"])
    error = RankVerdict.load(RunDir(tmp_path / "run").verdict(0)).error
    assert error is not None
    assert error.message.startswith(f"{MISSED}, and DDP waits")
    assert "\nhint: some parameters" in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["launch.nproc=2"],
        ["launch.nproc=2", "strategy.name=pipeline", "strategy.microbatches=2"],
    ],
)
def test_a_loss_that_is_cut_off_is_refused(job: str, more: list[str], tmp_path: Path) -> None:
    cut = [*SHORT, "model.detach=true", *more]
    with pytest.raises(AssertionError, match="Job.loss returned a loss without a gradient"):
        run_ranks(tmp_path / "run", job, cut)
