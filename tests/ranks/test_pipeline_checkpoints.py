"""What a pipeline wrote, other pipelines and other strategies read, and the other way round: every
number, bit for bit. The legs are those of test_checkpoint_any_to_any.py."""

from pathlib import Path

import pytest
import torch

from tests.legs import (
    SAMPLES,
    Leg,
    assert_same_state,
    read_all,
    run_chain,
    run_legs,
)

# A tied head, a frozen weight, buffers of the model and of a block, sizes that nothing divides.
JOB = """
import torch
from torch import nn
from paceline import Workload

class Data:
    fingerprint = "odd"
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": (torch.arange(5) * (index + 3)) % 13}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
        self.register_buffer("mask", torch.tensor([True, False] * 3 + [True]))
    def forward(self, x): return x + torch.tanh(self.inner(self.norm(x))) * self.mask

class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.still = nn.Parameter(torch.randn(7), requires_grad=False)
        self.wide, self.back = nn.Linear(7, 31), nn.Linear(31, 7, bias=False)
    def forward(self, h): return h + self.back(torch.tanh(self.wide(h))) * self.gain + self.still

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.tail = Tail()
        self.head = nn.Linear(7, 13)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        gain = 1.0 + self.seen  # as it was: the last stage must have been given it, too
        if self.training: self.seen.fill_(3)
        h = self.embed(x)
        for block in self.blocks: h = block(h)
        return self.head(self.tail(h)) * gain

class Odd(Workload):
    def build_model(self, config): return Net()
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch):
        y, target = model(batch["x"]), batch["x"].roll(1, 1)
        return nn.functional.cross_entropy(y.flatten(0, 1).float(), target.flatten(),
                                           reduction="sum") / 5, len(y)
"""
V = ("zbv", "interleaved_1f1b")


def leg(schedule: str, ranks: int, dp: int = 1, inner: str = "ddp") -> Leg:
    stages = ranks // dp * (2 if schedule in V else 1)
    return Leg(
        "pipeline", ranks,
        (
            f"strategy.schedule={schedule}", f"strategy.stages={stages}", f"strategy.inner={inner}",
            f"train.micro_batch_size={SAMPLES // dp}", f"strategy.microbatches={8 // dp}",
        ),
    )  # fmt: skip


FOUR, TWO = leg("1f1b", 4), leg("1f1b", 2)
SOME = [[TWO, leg("dualpipe", 2), Leg("zero3", 2), leg("zbv", 2)]]
TIED = [
    [TWO, leg("dualpipe", 2), Leg("ddp", 2), leg("zbv", 2), Leg("zero3", 2), leg("gpipe", 2)],
    [FOUR, leg("dualpipe", 4), leg("interleaved_1f1b", 4), leg("1f1b", 4, dp=2)],
]
UNTIED = [
    [Leg("zero3", 4), leg("1f1b", 4, 2, "zero3"), leg("dualpipe", 4, 2, "zero2"), FOUR],
    [TWO, Leg("zero1", 2)],
    [leg("zbv", 4, 2, "zero3"), leg("dualpipe", 4, 2, "zero3"), leg("dualpipe", 4)],
]


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = tmp_path / "odd_job.py"
    file.write_text(JOB if request.param == "tied" else JOB.replace("self.head.weight =", "_ ="))
    return f"{file}:Odd"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("job", "groups"),
    [
        pytest.param("tied", SOME, marks=pytest.mark.slow, id="some"),
        pytest.param("tied", TIED, marks=pytest.mark.nightly, id="tied"),
        pytest.param("untied", UNTIED, marks=pytest.mark.nightly, id="untied"),
    ],
    indirect=["job"],
)
def test_from_four_stages_to_any_other(job: str, groups: list[list[Leg]], tmp_path: Path) -> None:
    """AdamW's state too; each leg then takes a step, and ends where the first does."""
    first = run_legs(tmp_path / "first", job, [FOUR])[0]
    found = read_all(first)
    is_tied = "model:head.weight" not in found
    assert is_tied == (groups is not UNTIED)
    assert "model:tail.still" in found and "model:seen" in found
    assert len([name for name in found if ":exp_avg/" in name]) == 38 + (not is_tied)  # 8 x 4 + 6
    for folder in run_chain(tmp_path / "others", job, groups, first).values():
        assert_same_state(first, folder)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["tied"], indirect=True)
def test_the_same_pipeline_goes_on_bit_for_bit(job: str, tmp_path: Path) -> None:
    for schedule in ("1f1b", "zbv", "dualpipe"):
        same = leg(schedule, 2)
        first = run_legs(tmp_path / schedule, job, [same])[0]
        again = run_legs(tmp_path / f"{schedule}, again", job, [same], first)[0]
        ended, resumed = (torch.load(folder / "next.pt") for folder in (first, again))
        assert all(torch.equal(resumed[name], weight) for name, weight in ended.items()), schedule
