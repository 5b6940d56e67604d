"""The learning rate of every step; groups of parameters; what each optimizer keeps and moves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from paceline.config.training import OptimConfig, ScheduleConfig
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.plan.planner import make_plan
from paceline.records import Plan
from paceline.strategies.average import Average
from paceline.strategies.base import EngineParts
from paceline.strategies.blocks import measure_shape
from paceline.strategies.engine import ModuleEngine
from paceline.strategies.optim import (
    build_optimizer,
    describe_own_rates,
    freeze,
    learning_rate,
    optimizer_kind,
    parameter_groups,
    rate_of,
)
from paceline.strategies.optimizers import KINDS, optimizer_bytes
from paceline.strategies.update_rules import Lion
from paceline.workloads.base import Workload
from tests.harness import machine


def optim(**schedule: object) -> OptimConfig:
    return OptimConfig(lr=1.0, schedule=ScheduleConfig.model_validate(schedule))


def test_warm_up_cosine_floor() -> None:
    settings = optim(warmup_steps=4, floor=0.1)
    rates = [learning_rate(step, 104, settings) for step in range(1, 105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]  # step 1 uses the warm-up value, not 0
    assert rates[53] == pytest.approx(0.55)  # half-way: the middle of 1.0 and 0.1
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_without_warm_up_step_one_is_nearly_the_top() -> None:
    assert learning_rate(1, 1000, optim(floor=0.0)) == pytest.approx(1.0, abs=1e-5)


def test_constant_stays() -> None:
    settings = optim(name="constant", warmup_steps=2)
    assert [learning_rate(s, 10, settings) for s in (1, 2, 3, 10)] == [0.5, 1.0, 1.0, 1.0]


def test_linear_and_wsd() -> None:
    """Linear falls from the warm-up's end on, wsd in its last fifth: steps 81 to 100 of 100."""
    line = optim(name="linear", warmup_steps=20, floor=0.0)
    assert [learning_rate(s, 100, line) for s in (20, 60, 100)] == pytest.approx([1.0, 0.5, 0.0])
    wsd = optim(name="wsd", warmup_steps=10, floor=0.1)
    rates = [learning_rate(s, 100, wsd) for s in (5, 10, 80, 90, 100)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_schedule_may_end_before_or_after_the_run(name: str) -> None:
    early = optim(name=name, total_steps=50)
    rates = [learning_rate(s, 100, early) for s in (50, 51, 100)]
    assert rates == pytest.approx([0.1] * 3)
    late = optim(name=name, total_steps=400)
    assert learning_rate(100, 100, late) > 0.7
    assert learning_rate(100, 100, late) == learning_rate(100, 400, optim(name=name))


@pytest.mark.parametrize(("total", "warmup"), [(100, 0), (40, 10), (7, 0), (5, 0), (4, 3), (1, 0)])
def test_one_cycle_is_torchs(total: int, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=warmup / total if warmup else 0.3,
        cycle_momentum=False,
    )  # fmt: skip
    expected = []
    for step in range(total):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        if step + 1 < total:
            theirs.step()
    ours = optim(name="onecycle", warmup_steps=warmup)
    rates = [learning_rate(step, total, ours) for step in range(1, total + 1)]
    assert rates == pytest.approx(expected, rel=1e-9)
    assert learning_rate(total + 5, total, optim(name="onecycle", total_steps=total)) == (
        pytest.approx(1 / 250_000)
    )


def test_one_cycle_begins_at_its_top_where_that_is_step_one_or_comes_after_the_run() -> None:
    one = optim(name="onecycle", warmup_steps=1)
    assert learning_rate(1, 10, one) == 1.0 and learning_rate(10, 10, one) < 1e-5
    long = optim(name="onecycle", warmup_steps=20)
    rates = [learning_rate(step, 10, long) for step in range(1, 11)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(0.04) and rates[-1] < 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        self.head = nn.Linear(3, 5)


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in groups]


def test_only_matrices_decay() -> None:
    model = nn.Linear(3, 3)
    groups = parameter_groups(model, OptimConfig())
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert names_of(model, groups) == [["weight"], ["bias"]]


def test_the_first_pattern_that_fits_counts() -> None:
    asked = [
        {"match": "blocks.0.*", "lr_scale": 0.1, "weight_decay": 0.3},
        {"match": "blocks.*", "lr_scale": 0.5},
        {"match": "embed.*", "frozen": True},
    ]
    model, settings = Net(), OptimConfig.model_validate({"groups": asked})
    freeze(model, settings)
    groups = parameter_groups(model, settings)
    assert names_of(model, groups) == [
        ["blocks.0.weight"], ["blocks.0.bias"], ["blocks.1.weight"], ["blocks.1.bias"],
        ["head.weight"], ["head.bias"],
    ]  # fmt: skip
    assert [(g["lr_scale"], g["weight_decay"]) for g in groups] == [
        (0.1, 0.3), (0.1, 0.3), (0.5, 0.1), (0.5, 0.0), (1.0, 0.1), (1.0, 0.0),
    ]  # fmt: skip
    shapes = measure_shape(model)
    assert [p.name for p in shapes.frozen] == [
        "embed.weight"
    ] and not model.embed.weight.requires_grad


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = Net()
    groups = parameter_groups(model, OptimConfig(name="muon"))
    assert [g["is_hidden"] for g in groups] == [True, False, False]
    assert names_of(model, groups)[0] == ["blocks.0.weight", "blocks.1.weight"]


def test_every_name_has_its_kind() -> None:
    assert list(KINDS) == list(get_args(OptimConfig.model_fields["name"].annotation))


def stepped(name: str, model: nn.Module, **more: object) -> torch.optim.Optimizer:
    settings = OptimConfig.model_validate({"name": name, **more})
    kind, built_with = optimizer_kind(settings, fused=False)
    optimizer = kind(parameter_groups(model, settings), **built_with)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", [*KINDS, "sgd momentum"])
def test_what_is_kept_is_what_the_plan_counts(name: str) -> None:
    name, _, momentum = name.partition(" ")
    model, more = Net(), {"momentum": 0.9} if momentum else {}
    job = load_job("lm_tiny", [f"optim.name={name}", *(f"optim.{k}={v}" for k, v in more.items())])
    kept = [v for entry in stepped(name, model, **more).state.values() for v in entry.values()]
    real = sum(value.untyped_storage().nbytes() for value in kept if torch.is_tensor(value))
    assert real == optimizer_bytes(job.config, measure_shape(model).trainable)
    assert bool(real) == (name != "sgd" or bool(momentum))


def test_lion_by_hand() -> None:
    """m = 0.1 g after step 1: weights move by lr and shrink by lr x decay, whatever g is."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight.grad = torch.tensor([7.0, -0.001, 0.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1, 2.85])
    assert optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.07, -0.00001, 0.0])
    # m x 0.9 + g x 0.1 is 0.063 - 0.1: the sign of that, not of the momentum.
    weight.grad = torch.tensor([-1.0, 0.0, 0.0])
    before = weight[0].item()
    optimizer.step()
    assert weight[0].item() == pytest.approx(before * 0.95 + 0.1)


def test_muon_and_adamw_are_torchs_own() -> None:
    """One step of each, by torch's classes on a copy, and again after its state was loaded."""
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    ours = stepped("muon", model)
    hidden = [block.weight for block in twin.blocks]  # type: ignore[union-attr]
    rest = [p for p in twin.parameters() if all(p is not q for q in hidden)]
    decays = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in rest]
    theirs = [
        torch.optim.Muon(hidden, 3e-4, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decays, 3e-4, (0.9, 0.95)),
    ]
    for number in range(2):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.clone()
        for optimizer in theirs:
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q), name
        if number == 0:
            ours.load_state_dict(ours.state_dict())
            ours.step()


def test_the_average_moves_with_updates_only() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = Average(model, 0.9)
    nn.init.constant_(model.weight, 2.0)
    average.update()
    assert average.values["weight"].item() == pytest.approx(1.1)
    average.update(skipped=torch.tensor(1.0))
    assert average.values["weight"].item() == pytest.approx(1.1)
    average.update(skipped=torch.tensor(0.0))
    assert average.values["weight"].item() == pytest.approx(1.19)
    with average.in_place():
        assert model.weight.item() == pytest.approx(1.19)
    assert model.weight.item() == 2.0 and average.values["weight"].item() == pytest.approx(1.19)


def plan(*overrides: str, job: str = "lm_tiny") -> Plan:
    return make_plan(load_job(job, ["launch.device=cpu", *overrides]), machine())


@pytest.mark.parametrize(
    ("name", "strategy", "is_refused"),
    [
        ("adafactor", ["zero1"], False),
        ("adafactor", ["zero2"], True),
        ("adafactor", ["zero3"], True),
        ("adafactor", ["deepspeed"], True),
        ("adafactor", ["pipeline"], False),
        ("adafactor", ["pipeline", "strategy.inner=zero2"], True),
        ("muon", ["zero3"], False),
        ("muon", ["deepspeed"], True),
    ],
)
def test_what_needs_whole_matrices_is_refused_where_they_are_cut(
    name: str, strategy: list[str], is_refused: bool
) -> None:
    first, *more = strategy
    made = plan(f"optim.name={name}", f"strategy.name={first}", "launch.nproc=2", *more)
    told = [f for f in made.problems() if f.where == "optim.name"]
    assert bool(told) == is_refused
    assert all("whole" in f.what and "zero1" in f.hint for f in told)


@pytest.mark.parametrize(
    ("groups", "where", "what", "hint"),
    [
        ('[{match: "blocksX.*"}]', "optim.groups[0]", "matches none of the", "names: blocks."),
        ('[{match: "*"}, {match: "tail*"}]', "optim.groups[1]", "earlier groups", "first"),
        ('[{match: "tail*", frozen: true, lr_scale: 2.0}]', "optim.groups[0]", "no effect", ""),
    ],
)
def test_groups_that_do_nothing_are_told(groups: str, where: str, what: str, hint: str) -> None:
    found = {f.where: f for f in plan(f"optim.groups={groups}").findings}
    assert what in found[where].what and hint in found[where].hint


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ('[{match: "x", lr: 3.0}]', r"optim.groups\[0\].lr in .* is not a key there"),
        ("[{lr_scale: 3.0}]", r"optim.groups\[0\].match in .* is required"),
        ('[{match: "x", lr_scale: 0.0}]', r"optim.groups\[0\].lr_scale in .* is 0.0"),
        ("3", "optim.groups=3 in .* it wants list of"),
    ],
)
def test_groups_that_are_written_wrong(groups: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_job("lm_tiny", [f"optim.groups={groups}"])


def test_nothing_left_to_train() -> None:
    with pytest.raises(ConfigError, match="optim.groups freezes all"):
        plan('optim.groups=[{match: "*", frozen: true}]')


def test_what_is_frozen_has_no_gradient_and_no_state() -> None:
    whole, part = plan(), plan('optim.groups=[{match: "blocks.*", frozen: true}]')
    frozen = part.model.num_frozen
    assert frozen > 0 and part.state_bytes.parameters == whole.state_bytes.parameters
    assert whole.state_bytes.gradients - part.state_bytes.gradients == 4 * frozen
    assert part.flops_per_sample.value is None, "the workload's count has all weights' gradients"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_average_is_counted(strategy: str) -> None:
    asked = (f"strategy.name={strategy}", "launch.nproc=2")
    without, kept = plan(*asked), plan(*asked, "optim.ema=0.99")
    more = kept.state_bytes.optimizer - without.state_bytes.optimizer
    assert more == without.state_bytes.parameters


def test_deepspeed_keeps_no_average() -> None:
    made = plan("optim.ema=0.99", "strategy.name=deepspeed", "launch.nproc=2")
    assert "optim.ema" in [f.where for f in made.problems()]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optim.momentum=0.9"], "optim.momentum"),
        (["optim.name=sgd", "optim.beta1=0.8"], "optim.beta1"),
        (["optim.name=lion", "optim.eps=1e-6"], "optim.eps"),
        (["optim.name=adafactor", "optim.beta2=0.8"], "optim.beta2"),
        (["optim.schedule.decay=0.5"], "optim.schedule.decay"),
        (["optim.schedule.name=onecycle", "optim.schedule.floor=0.5"], "optim.schedule.floor"),
        (["train.eval_ema=true", "train.eval_every=5"], "train.eval_ema"),
    ],
)
def test_keys_of_other_optimizers_are_named(overrides: list[str], key: str) -> None:
    assert key in [f.where for f in plan(*overrides).findings if f.severity == "warning"]


OWN = """
import torch
from torch import nn
from paceline import Workload

class Own(Workload):
    def build_model(self, config): return nn.Linear(3, 3)
    def build_data(self, config, split): return None
    def loss(self, model, batch): return model(batch).sum(), len(batch)
    def build_optimizer(self, model, config):
        return torch.optim.RMSprop(model.parameters(), lr=config.optim.lr)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Own"


@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [("ddp", False), ("zero1", True), ("zero3", False), ("deepspeed", True)],
)
def test_an_own_optimizer_is_refused_where_it_cannot_be_used(
    own: str, strategy: str, is_refused: bool
) -> None:
    made = plan(f"strategy.name={strategy}", "launch.nproc=2", "optim.momentum=0.5", job=own)
    told = [f for f in made.problems() if f.where == "Own.build_optimizer"]
    assert bool(told) == is_refused
    assert made.optimizer.value == "Own.build_optimizer" and not made.fused_optimizer.value
    assert "optim.momentum" not in [f.where for f in made.findings], "it may read any key"


class Fixed(Workload):
    def build_optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_rate_that_no_group_takes_is_told() -> None:
    def told(lr: str) -> list[str]:
        made = EngineParts(
            load_job("lm_tiny", [f"optim.lr={lr}"]).config, plan(), Fixed(), torch.device("cpu")
        )
        return describe_own_rates(build_optimizer(made, Net()), made.workload, made.config)

    [note] = told("1e-9")
    assert note.startswith("Fixed.build_optimizer built its groups with lr 0.5, and optim.lr is 1e")
    assert told("0.5") == []


class Curve(Workload):
    def learning_rate(self, step: int, config: Any) -> float | None:
        return {1: 0.5, 2: None, 3: float("nan"), 4: -1.0}[step]


def test_the_workload_may_say_the_rate() -> None:
    config, job = load_job("lm_tiny", []).config, Curve()
    assert rate_of(1, 10, config, job) == 0.5
    assert rate_of(2, 10, config, job) == learning_rate(2, 10, config.optim)
    for step in (3, 4):
        with pytest.raises(ConfigError, match=f"Curve.learning_rate returned .* for step {step}"):
            rate_of(step, 10, config, job)


class Counting(Workload):
    def build_optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config.optim.lr / config.train.steps)

    def learning_rate(self, step: int, config: Any) -> float:
        return float(step / config.train.steps)


@pytest.mark.parametrize("asked", [["train.steps=auto", "train.epochs=2"], ["train.steps=auto"]])
def test_a_schedule_of_ones_own_knows_how_many_steps_there_are(asked: list[str]) -> None:
    config = load_job("lm_tiny", [*asked, "optim.lr=1"]).config
    assert rate_of(5, 20, config, Counting()) == 0.25
    parts = EngineParts(config, plan("train.steps=50"), Counting(), torch.device("cpu"))
    assert build_optimizer(parts, Net()).param_groups[0]["lr"] == 0.02


def test_a_number_of_that_name_is_told(own: str) -> None:
    file = Path(own.rpartition(":")[0])
    file.write_text(f"{OWN}    def __init__(self): self.learning_rate = 0.1\n")
    assert "Own.learning_rate" in [f.where for f in plan(job=own).problems()]


def test_the_page_shows_an_optimizer_that_works() -> None:
    """The class in docs/optimizers.md has all of a model's parameters, and its own warm-up."""
    page = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"torch": torch, "Workload": Workload}
    exec(code, names)
    config, job = load_job("lm_tiny", ["optim.lr=0.1"]).config, names["MyWorkload"]()
    model = Net()
    optimizer = job.build_optimizer(model, config)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 7
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert [job.learning_rate(step, config) for step in (5, 10, 30)] == [0.05, 0.1, 0.1]


def test_a_step_in_which_nothing_has_a_gradient_is_no_crash() -> None:
    """A loss may have a gradient, and reach no parameter: a note of the run names them."""
    engine: Any = SimpleNamespace(
        optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0),
        veto_on_device=False, average=None, zero=torch.tensor(0.0),
    )  # fmt: skip
    skipped = ModuleEngine._update(engine, 0.1, [], torch.tensor(0.0), torch.tensor(1.0))
    assert skipped == 0
