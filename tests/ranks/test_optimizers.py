"""Every optimizer under every strategy that takes it: what one process computes, holds and keeps.

Adam and its kin divide a gradient by its own size, so their weights would pass with gradients
twice too large. Their moments would not: they are compared too, whole, with the averages.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.machine.topology import RankId
from paceline.plan.planner import estimate_rank, measure_model
from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.strategies.clock import HostClock
from paceline.strategies.optimizers import KINDS, Kind
from tests.harness import (
    HeldSource,
    RankEnds,
    build_engine,
    prepare_run,
    run_each,
    run_here,
    start_ranks,
)
from tests.jobs import BAD_SETTINGS, poisoned_sample, write_bad_job
from tests.legs import Leg, assert_same_state, read_all, run_legs
from tests.parity import BATCH, STEPS, assert_same_curve, tiny_model
from tests.ranks.test_checkpoint_any_to_any import JOB
from tests.skips import needs_deepspeed, needs_torchao

# Every row has groups of their own rate and decay, a frozen block, and an average.
GROUPS = (
    'optim.groups=[{match: "blocks.0.*", frozen: true},'
    ' {match: "*norm*", lr_scale: 0.5, weight_decay: 0.2}]'
)
COMMON = [
    *tiny_model(), *BATCH, f"train.steps={STEPS}", "optim.schedule.warmup_steps=2",
    "optim.schedule.name=linear", "optim.weight_decay=0.01", GROUPS, "optim.ema=0.8",
]  # fmt: skip
# A large eps: where a gradient is all but 0, Adam's update is the sign of rounding errors.
SETTINGS = {
    "adamw": ["optim.lr=0.01", "optim.eps=1e-3"],
    "adamw8bit": ["optim.lr=0.01", "optim.eps=1e-3"],
    "adam": ["optim.lr=0.01", "optim.eps=1e-3"],
    "sgd": ["optim.lr=0.1", "optim.momentum=0.9"],
    "lion": ["optim.lr=0.001"],
    "adafactor": ["optim.lr=0.01", "optim.eps=1e-3"],
    "muon": ["optim.lr=0.005", "optim.eps=1e-3"],
}
MICRO = "train.micro_batch_size=8"
ALONE = ["strategy.name=ddp", "train.micro_batch_size=16"]  # run_here: on one rank
STRATEGIES = {
    "ddp": ["strategy.name=ddp", MICRO],
    "zero1": ["strategy.name=zero1", "train.micro_batch_size=4"],
    "zero2": ["strategy.name=zero2", MICRO],
    "zero3": ["strategy.name=zero3", "train.micro_batch_size=4"],
    "pipeline": [
        "strategy.name=pipeline", "train.micro_batch_size=16", "strategy.microbatches=4",
    ],
    "dualpipe": [
        "strategy.name=pipeline", "train.micro_batch_size=16", "strategy.microbatches=4",
        "strategy.schedule=dualpipe",
    ],
}  # fmt: skip
CUT = ("zero2", "zero3")  # refused for what needs whole matrices: tests/unit/test_optim.py


def is_whole(kind: Kind) -> bool:
    return bool(kind.needs_whole) and not kind.gathers


MATRIX = [
    (optimizer, strategy)
    for optimizer, kind in KINDS.items()
    for strategy in STRATEGIES
    if not (is_whole(kind) and strategy in CUT)
]
QUICK = [("lion", "zero3"), ("muon", "zero2"), ("adafactor", "pipeline")]
# torch's Muon orthogonalises in bf16: where a gradient differs in its last bit an update may differ
# in its ninth. In fp32 it is the same algorithm, and shows whether ranks compute the same.
EXACT = """
import inspect
import torch.optim._muon as muon
from paceline.workloads.lm.workload import LanguageModel

text = inspect.getsource(muon)
its = text[text.index("def _zeropower_via_newtonschulz"):text.index("def _adjust_lr")]
assert "grad.bfloat16()" in its
exec(its.replace("grad.bfloat16()", "grad.clone()"), vars(muon))

class Exact(LanguageModel): pass
"""


def settings(optimizer: str, strategy: str = "ddp") -> list[str]:
    chosen = [*SETTINGS[optimizer], *STRATEGIES[strategy]]
    return [*COMMON, f"optim.name={optimizer}", *chosen, "launch.nproc=2"]


@pytest.fixture(autouse=True)
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What EXACT changes in this process is put back."""
    from torch.optim import _muon

    name = "_zeropower_via_newtonschulz"
    monkeypatch.setattr(_muon, name, getattr(_muon, name))


def compare(rows: list[tuple[str, str]], folder: Path, *more: str) -> None:
    """All rows in one group of two ranks, to be quick; one process for each optimizer."""
    folder.mkdir(exist_ok=True)
    (folder / "exact.py").write_text(EXACT)
    more = (*more, f"workload={folder / 'exact.py'}:Exact")
    names = {f"{optimizer}, {strategy}": (optimizer, strategy) for optimizer, strategy in rows}
    cases = {name: [*settings(*row), *more] for name, row in names.items()}
    ended = run_each(folder / "two", "lm_tiny", cases)
    references: dict[str, RankEnds] = {}
    for name, (optimizer, _) in names.items():
        if optimizer not in references:
            alone = [*settings(optimizer), *more, *ALONE]
            references[optimizer] = run_here(folder / optimizer, "lm_tiny", alone)
        assert_same_state_and_curve(references[optimizer], ended[name], name)


def assert_same_state_and_curve(reference: RankEnds, ends: RankEnds, name: str) -> None:
    rows = list(zip(reference.rows, ends.rows, strict=True))
    assert len(rows) == STEPS, name
    assert rows[0][1].grad_norm == pytest.approx(rows[0][0].grad_norm, rel=1e-5), name
    for expected, found in rows:
        assert found.loss == pytest.approx(expected.loss, rel=1e-5), name
    wanted, kept = whole_state(reference), whole_state(ends)
    assert wanted.keys() == kept.keys(), name
    assert any(value.any() for key, value in kept.items() if key.startswith("optimizer:")), name
    for key, value in wanted.items():
        torch.testing.assert_close(
            kept[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{name} {key}: {m}"
        )
    first = ends.states[0].weights
    for other in ends.states[1:]:
        assert all(torch.equal(first[key], other.weights[key]) for key in first), name


def whole_state(ends: RankEnds) -> dict[str, Tensor]:
    """Weights, moments and averages of all ranks together."""
    source = HeldSource(piece for state in ends.states for piece in state.pieces)
    return {
        f"{section}:{name}": source.rows(section, name, 0, (*shape, 1)[0])
        for section in ("model", "optimizer")
        for name, shape in source.shapes(section).items()
    }


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    compare(QUICK, tmp_path)


@pytest.mark.slow
def test_a_frozen_backbone(tmp_path: Path) -> None:
    """All but the head: nothing before it takes part in a backward pass, recomputed or not."""
    frozen = '{match: "embedding.*", frozen: true}, {match: "blocks.*", frozen: true}'
    more = ("model.tied=false", f"optim.groups=[{frozen}]", "train.activation_checkpointing=full")
    compare([("adamw", name) for name in ("ddp", "zero3")], tmp_path, *more)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", KINDS)
def test_two_ranks_equal_one_whatever_the_strategy(optimizer: str, tmp_path: Path) -> None:
    compare([row for row in MATRIX if row[0] == optimizer and row not in QUICK], tmp_path)


@pytest.mark.nightly
def test_stages_that_are_sharded(tmp_path: Path) -> None:
    """Two stages, each cut over two ranks: what is gathered is gathered among those."""
    inner = ["strategy.inner=zero2", "strategy.stages=2", "train.micro_batch_size=8"]
    for name in ("lion", "muon"):
        compare([(name, "pipeline")], tmp_path / name, "model.tied=false", *inner, "launch.nproc=4")


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_takes_what_works_number_by_number(stage: int, tmp_path: Path) -> None:
    more = ["strategy.name=deepspeed", f"strategy.stage={stage}", "optim.ema=off", MICRO]
    cases = {name: [*settings(name), *more] for name in ("adam", "lion", "sgd")}
    ended = run_each(tmp_path / "two", "lm_tiny", cases)
    for name, ends in ended.items():
        alone = [*settings(name), *more[2:], "train.micro_batch_size=16"]
        reference = run_here(tmp_path / name, "lm_tiny", alone)
        assert_same_curve(reference, ends, name)


def test_a_wrong_gradient_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: Adam hides a gradient twice too large in its weights, not here."""
    from paceline.strategies import engine

    alone = [*settings("adam"), "train.micro_batch_size=16", "optim.clip=off", "optim.eps=1e-8"]
    right = run_here(tmp_path / "right", "lm_tiny", alone)
    normalise = engine.normalise
    monkeypatch.setattr(engine, "normalise", lambda loss, scale: 2 * normalise(loss, scale))
    wrong = run_here(tmp_path / "wrong", "lm_tiny", alone)
    assert wrong.rows[-1].loss == pytest.approx(right.rows[-1].loss, rel=1e-3), "hidden"
    with pytest.raises(AssertionError):
        assert_same_state_and_curve(right, wrong, "")


@pytest.mark.slow
def test_evaluation_by_the_average(tmp_path: Path) -> None:
    """As one process evaluates with it, whatever holds it, and not as with the weights."""
    recipe = tmp_path / "uneven.yaml"
    recipe.write_text("workload: uneven\nlaunch: {device: cpu}\ndata: {num_workers: 0}\n")
    common = ["train.steps=4", "train.eval_every=2", "train.eval_samples=9", "optim.ema=0.8"]
    common += ["optim.name=sgd", "optim.lr=0.3", "train.global_batch_size=8"]
    averaged = [*common, "train.eval_ema=true"]
    two = ["train.micro_batch_size=4", "launch.nproc=2"]
    cases = {name: [*averaged, *two, f"strategy.name={name}"] for name in ("ddp", "zero2", "zero3")}
    cut = ["strategy.name=pipeline", "train.micro_batch_size=8", "strategy.microbatches=4"]
    cases["pipeline"] = [*averaged, *two, *cut]
    alone = "train.micro_batch_size=8"
    one = run_here(tmp_path / "one", str(recipe), [*averaged, alone])
    plain = run_here(tmp_path / "plain", str(recipe), [*common, alone])
    expected = [row.val_loss for row in one.rows]
    assert [loss is None for loss in expected] == [True, False, True, False]
    assert expected[3] != pytest.approx(plain.rows[3].val_loss, rel=3e-4)
    assert [row.loss for row in one.rows] == [row.loss for row in plain.rows], "it only looks on"
    for name, ends in run_each(tmp_path / "two", str(recipe), cases).items():
        found = [row.val_loss for row in ends.rows]
        assert found[1] == pytest.approx(expected[1], rel=1e-5), name
        assert found[3] == pytest.approx(expected[3], rel=1e-5), name


def weigh(rows: dict[str, list[str]], group: RunDir, place: RankId) -> None:
    """One step by hand of each: gradients are there only between backward and the update."""
    from paceline.job import load_job

    for name, overrides in rows.items():
        run = RunDir(group.root / name)
        plan, job = Plan.load(run.plan), load_job("lm_tiny", overrides)
        engine, batches = build_engine(run, "lm_tiny", overrides)
        engine.forward_backward(batches, 0.01, HostClock())
        gradients = engine.held().gradients
        assert not engine.step(1e-3, HostClock()).skipped
        held = engine.held().model_copy(update={"gradients": gradients})
        model = measure_model(job.workload, job.config)
        planned = estimate_rank(plan, job.config, model, place.rank)
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(held, part) == getattr(planned, part), f"{name}: {part}"


def assert_bytes_as_planned(rows: list[tuple[str, str]], folder: Path) -> None:
    cases = {
        f"{optimizer}-{strategy}": settings(optimizer, strategy) for optimizer, strategy in rows
    }
    for name, overrides in cases.items():
        prepare_run(folder / name, "lm_tiny", overrides)
    start_ranks(RunDir(folder), 2, partial(weigh, cases))


def test_bytes_are_as_planned(tmp_path: Path) -> None:
    """With frozen weights, groups and an average; every rank, to the byte."""
    assert_bytes_as_planned([*QUICK, ("adam", "zero2"), ("sgd", "dualpipe")], tmp_path)


@pytest.mark.nightly
def test_bytes_are_as_planned_whatever_the_strategy(tmp_path: Path) -> None:
    assert_bytes_as_planned(MATRIX, tmp_path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("job") / "odd_job.py"
    file.write_text(JOB)
    return f"{file}:Odd"


def legs_of(optimizer: str) -> list[Leg]:
    """From ddp through what else takes it, and back."""
    more = (f"optim.name={optimizer}", *SETTINGS[optimizer], "optim.ema=0.8")
    between = ["zero1"] if is_whole(KINDS[optimizer]) else ["zero3", "zero1", "zero2"]
    return [Leg(name, 2, more) for name in ("ddp", *between, "ddp")]


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "lion" else pytest.mark.nightly)
        for name in KINDS
    ],
)
def test_a_checkpoint_goes_through_all(optimizer: str, job: str, tmp_path: Path) -> None:
    first, *others = run_legs(tmp_path, job, legs_of(optimizer))
    kept = read_all(first)
    assert "optimizer:ema/wide.weight" in kept and "optimizer:ema/still" not in kept
    for folder in others:
        assert_same_state(first, folder)


def test_the_state_of_another_optimizer_is_left_alone(job: str, tmp_path: Path) -> None:
    """AdamW's moments mean nothing to SGD, and without momentum it has none."""
    plain = ("optim.name=sgd", "optim.lr=0.01")
    folders = run_legs(tmp_path, job, [Leg("ddp", 1), Leg("ddp", 1, plain)])
    kept = [read_all(folder) for folder in folders]
    assert any(name.startswith("optimizer:exp_avg") for name in kept[0])
    assert not any(name.startswith("optimizer:") for name in kept[1])


# Its state: a tensor of the parameter's shape, a number of python, a number that its group keeps.
OWN = """
class Counting(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "total": 0.0, "kind": "counting"})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["total"] += 0.5
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                if "sum" not in state: state["sum"] = torch.zeros_like(p)
                state["sum"] += p.grad
                p.sub_(state["sum"], alpha=group["lr"] / state["seen"] * group["total"])
"""
BUILD = """
    def build_optimizer(self, model, config):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return Counting([
            {"params": [p for n, p in named if n.endswith("bias")], "lr": 10 * config.optim.lr},
            {"params": [p for n, p in named if not n.endswith("bias")]},
        ], lr=config.optim.lr)
"""


def write_own(folder: Path, build: str = BUILD, optimizer: str = OWN) -> str:
    (folder / "own_job.py").write_text(f"{JOB}{build}{optimizer}")
    return f"{folder / 'own_job.py'}:Odd"


def test_an_own_optimizer_and_its_state(tmp_path: Path) -> None:
    own = write_own(tmp_path)
    legs = [Leg(name, 2, ("optim.lr=0.01",)) for name in ("ddp", "zero3", "zero2", "ddp")]
    first, *others = run_legs(tmp_path / "run", own, legs)
    kept = read_all(first)
    assert int(kept["optimizer:seen:int/wide.weight"]) == 3
    assert float(kept["optimizer:total:float/:group1"]) == 1.5
    for folder in others:
        assert_same_state(first, folder)


def test_its_groups_keep_their_proportion(tmp_path: Path) -> None:
    """The schedule takes each group's rate down by the same share."""
    own = write_own(tmp_path)
    asked = ["optim.lr=0.01", "train.steps=1", "launch.device=cpu", "data.num_workers=0"]
    run_here(tmp_path / "run", own, asked)
    from paceline.job import load_job
    from paceline.strategies.base import EngineParts
    from paceline.strategies.optim import build_optimizer, set_rate

    job, plan, _ = prepare_run(tmp_path / "plan", own, asked)
    parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
    optimizer = build_optimizer(parts, load_job(own, asked).workload.build_model(job.config))
    set_rate(optimizer, 0.005)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.005])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("None", "build_optimizer returned a NoneType"),
        ("torch.optim.SGD([model.gain], lr=0.1)", "leaves out three, embed.weight, .* and 6 more"),
        ("torch.optim.SGD([*model.parameters()], lr=0.1)", "1 parameters that are not trained"),
        ("torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])", "a closure"),
        ("Listing([p for p in model.parameters() if p.requires_grad], {'lr': 0.1})",
         "past of embed.weight: a list"),
    ],
)  # fmt: skip
def test_an_own_optimizer_that_cannot_be_right(returned: str, says: str, tmp_path: Path) -> None:
    listing = """
class Listing(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]: self.state[p]["past"] = [1]
"""
    build = f"    def build_optimizer(self, model, config):\n        return {returned}\n"
    own = write_own(tmp_path, build, listing)
    asked = ["train.steps=1", "launch.device=cpu", "data.num_workers=0"]
    with pytest.raises(ConfigError, match=says):
        run_here(tmp_path / "run", own, asked)


def test_a_vetoed_step_leaves_the_average(tmp_path: Path) -> None:
    """Step 5 is vetoed: after it the average is what it was after step 4."""
    job, sample = write_bad_job(tmp_path), poisoned_sample(rank=0, num_ranks=1)
    averages = []
    for steps in (4, 5):
        more = [f"train.steps={steps}", "optim.ema=0.9", "optim.schedule.name=constant"]
        asked = [*BAD_SETTINGS, f"model.poison={sample}", "train.max_skips=1", *more]
        ends = run_here(tmp_path / str(steps), job, asked)
        assert [row.step for row in ends.rows if row.skipped] == [5][: steps - 4]
        averages.append(ends.states[0].slot("ema"))
    assert averages[0].keys() == {"weight", "bias"}
    assert all(torch.equal(averages[1][name], value) for name, value in averages[0].items())


@needs_torchao
@pytest.mark.slow
def test_moments_in_8_bits_are_sharded_and_as_many_as_planned(tmp_path: Path) -> None:
    """At a width of whole blocks: each rank its rows of codes and scales, to the byte."""
    wide = ["model.dim=256", "model.num_layers=1", "optim.groups=[]", "optim.ema=off"]
    cases = {s: [*settings("adamw8bit", s), *wide] for s in ("ddp", "zero3")}
    ended = run_each(tmp_path / "two", "lm_tiny", cases)
    for a, b in zip(ended["ddp"].rows, ended["zero3"].rows, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-3)
    (codes,) = {
        piece.value.shape
        for piece in ended["zero3"].states[0].pieces
        if piece.name == "exp_avg_codes/blocks.0.attention.out.weight"
    }
    assert codes == (128, 256), "half of the rows"
    for name, overrides in cases.items():
        prepare_run(tmp_path / "held" / name, "lm_tiny", overrides)
    start_ranks(RunDir(tmp_path / "held"), 2, partial(weigh, cases))
