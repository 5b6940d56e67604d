"""Pipelines of models that are not ours: of transformers, and of a user's own file. What cannot be
cut is an error that says so, or a NaN; it is never another model."""

import math
from pathlib import Path

import pytest
import torch

from paceline.data.cursor import Order, StepSlice
from paceline.errors import ConfigError, Outcome
from tests.harness import run_each, run_here
from tests.pipeline_parity import BATCH, ONE, SGD, assert_same, pipeline, slow

LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 321, "max_position_embeddings": 64,
}  # fmt: skip
MORE = ["data.synthetic_samples=64", "train.compile=off", "train.eval_every=off"]
JOB = """
import torch
from torch import nn
from paceline import Section, Workload
from pydantic import Field

class Data:
    fingerprint = "own"
    def __init__(self, kind): self.kind = kind
    def __len__(self): return 64
    def __getitem__(self, index):
        sample = {"x": torch.arange(6) * (index + 3) % 13, "id": torch.tensor(index)}
        return (sample | {"name": "text"}) if self.kind == "words" else sample

class Block(nn.Module):
    def __init__(self, frozen, kind):
        super().__init__()
        self.inner, self.norm, self.kind = nn.Linear(8, 8), nn.LayerNorm(8), kind
        self.inner.requires_grad_(not frozen)
        if kind == "batch norm": self.batch = nn.BatchNorm1d(6)
    def forward(self, x, scale=1.0):
        if self.kind == "batch norm": x = self.batch(x)
        x = x + torch.tanh(self.inner(self.norm(x))) * scale
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.kind == "turned" else x

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        blocks = [Block(kind == "frozen" and n in (0, 2), kind) for n in range(4)]
        if kind == "twice": blocks = [b for b in blocks for _ in (0, 1)]
        if kind == "woven": blocks = blocks[:2] * 2
        if kind == "shared": blocks[3].inner.weight = blocks[0].inner.weight
        if kind == "late": self.blocks = nn.ModuleList(blocks)
        self.embed = nn.Embedding(13, 8)
        self.place = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8))
        if kind != "late": self.blocks = nn.ModuleList(blocks)
        if kind == "after": self.last = nn.Parameter(torch.ones(8))
        self.head = self.embed if kind == "same module" else nn.Linear(8, 13)
        self.register_buffer("scale", torch.tensor(0.7))
        if kind == "frozen": self.embed.requires_grad_(False)
        if kind == "cold":
            for block in blocks[:2]: block.requires_grad_(False)
            self.embed.requires_grad_(False)
            self.place.requires_grad_(False)
    def forward(self, x):
        h = start = self.embed(x)
        h += self.place
        if self.kind == "draws": h = h * torch.rand(h.shape)
        order = self.blocks[::-1] if self.kind == "backwards" else self.blocks
        for block in order: h = block(h, scale=self.scale)
        if self.kind == "skip": h = h + 0.1 * start
        if self.kind == "weak skip": h = h * (1 + (start > 0).float().mean())
        if self.kind == "after": h = h * self.last
        return h @ self.head.weight.T if self.kind == "same module" else self.head(h)

class Model(Section):
    kind: str = Field("plain", description="what is special about it")
    poison: int = Field(-1, description="a sample whose loss is NaN")

class Own(Workload):
    Model = Model
    def build_model(self, config):
        self.poison = config.model.poison
        return Net(config.model.kind)
    def build_data(self, config, split):
        return Data(config.model.kind) if split == "train" else None
    def loss(self, model, batch):
        target = batch["x"].roll(1, 1).flatten()
        loss = nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), target, reduction="sum")
        bad = (batch["id"] == self.poison).any()
        return loss / 6 * torch.where(bad, float("nan"), 1.0), len(batch["x"])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own_job.py").write_text(JOB)
    return f"{tmp_path / 'own_job.py'}:Own"


def of_kind(kind: str, schedule: str = "1f1b") -> list[str]:
    return [*SGD, f"model.kind={kind}", *pipeline(schedule)]


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_llama_of_transformers(is_tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    keys = {**LLAMA, "tie_word_embeddings": str(is_tied).lower()}
    job = [*SGD, *MORE, "model.hf=llama", "data.seq_len=16"]
    job += [f"model.hf_config.{key}={value}" for key, value in keys.items()]
    reference = run_here(tmp_path / "one", "tinyllama_fsdp", [*job, *ONE])
    cases = {s: [*job, *pipeline(s)] for s in ("1f1b", "zbv", "dualpipe")}
    for name, ends in run_each(tmp_path / "two", "tinyllama_fsdp", cases).items():
        assert_same(reference, ends, name)


@pytest.mark.nightly
def test_a_masked_autoencoder(tmp_path: Path) -> None:
    """Encoder and decoder are two lists of blocks, with code of their own between them."""
    pytest.importorskip("transformers")
    job = [*SGD, *MORE, "model.hf_config.num_hidden_layers=3"]
    job += ["model.hf_config.decoder_num_hidden_layers=2"]
    reference = run_here(tmp_path / "one", "mae_tiny", [*job, *ONE])
    cases = {s: [*job, *pipeline(s)] for s in ("1f1b", "zbv", "dualpipe")}
    cases["inside the encoder"] = [*job, *pipeline("1f1b"), "strategy.split=[1,4]"]
    cases["inside the decoder"] = [*job, *pipeline("1f1b"), "strategy.split=[4,1]"]
    for name, ends in run_each(tmp_path / "two", "mae_tiny", cases).items():
        assert_same(reference, ends, name)


@pytest.mark.parametrize(
    ("kind", "schedules"),
    [
        ("plain", ("1f1b", "zbv", "dualpipe")),
        slow("frozen", ("1f1b", "zbv", "dualpipe")),
        slow("same module", ("1f1b", "zbv", "dualpipe")),
        slow("twice", ("gpipe", "1f1b", "interleaved_1f1b")),
        slow("turned", ("1f1b", "zbv", "dualpipev", "dualpipe")),
    ],
)
def test_a_users_own_model(kind: str, schedules: tuple[str, ...], own: str, tmp_path: Path) -> None:
    """With values from its own constructor, and a forward that writes into the embedding. `frozen`:
    a part of a stage; `twice`: each block is called two times; `same module` under two names;
    `turned`: what is sent is a view, and not dense."""
    reference = run_here(tmp_path / "one", own, [*SGD, *ONE, f"model.kind={kind}"])
    cases = {s: of_kind(kind, s) for s in schedules}
    for name, ends in run_each(tmp_path / "two", own, cases).items():
        assert_same(reference, ends, name)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        slow("backwards", r"belongs to another stage, and this one calls it"),
        slow("woven", r"belongs to another stage, and this one calls it"),
        slow("late", r"belongs to another stage|an earlier stage has computed"),
        ("skip", r"stage 1 uses what an earlier stage has computed"),
        slow("weak skip", r"stage 1 uses what an earlier stage has computed"),
        slow("after", r"stage 1 uses what an earlier stage has computed"),
        slow("draws", r"draws random numbers before its blocks"),
        ("words", r"cuts a batch by samples"),
    ],
)
def test_what_cannot_be_cut_is_an_error(kind: str, what: str, own: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=what):
        run_each(tmp_path / "run", own, {"case": of_kind(kind)})


@pytest.mark.slow
def test_copies_keep_the_same_statistics(own: str, tmp_path: Path) -> None:
    """DualPipe's two copies of a stage see other microbatches."""
    (ends,) = run_each(tmp_path / "run", own, {"case": of_kind("batch norm", "dualpipe")}).values()
    means = [state.weights["blocks.0.batch.running_mean"] for state in ends.states]
    assert means[0].abs().sum() > 0 and torch.equal(means[0], means[1])


@pytest.mark.slow
def test_a_weight_used_twice_cannot_have_its_backward_split(own: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"uses a weight twice[^$]*strategy.schedule=1f1b"):
        run_each(tmp_path / "run", own, {"case": of_kind("twice", "zbv")})


@pytest.mark.parametrize(
    ("kind", "what"),
    [("cold", r"stages \[0\] have nothing to train"), ("shared", "a weight inside a block")],
)
def test_what_cannot_be_cut_is_refused(kind: str, what: str, own: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        run_each(tmp_path / "run", own, {"case": [*of_kind(kind), "strategy.split=[2,2]"]})


def test_a_bad_sample_is_vetoed_on_all_ranks(own: str, tmp_path: Path) -> None:
    """Only the last stage sees the loss, of one microbatch; the step is taken by no rank."""
    bad = int(Order(64, 0).at(StepSlice(BATCH, 1, 1, 0).positions(1))[3])
    more = [f"model.poison={bad}", "train.max_skips=1"]
    reference = run_here(tmp_path / "one", own, [*SGD, *ONE, *more])
    cases = {s: [*of_kind("plain", s), *more] for s in ("1f1b", "zbv", "dualpipe")}
    cases["the end"] = [*of_kind("plain"), f"model.poison={bad}"]
    ended = run_each(tmp_path / "two", own, cases)
    stopped = ended.pop("the end")
    assert {(v.outcome, v.bad_step) for v in stopped.verdicts} == {(Outcome.NAN, 2)}
    assert all(bad in verdict.bad_sample_ids for verdict in stopped.verdicts)
    for name, ends in ended.items():
        assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}, name
        assert [row.step for row in ends.rows if row.skipped] == [2], name
        assert not math.isfinite(ends.rows[1].grad_norm)
        for state in ends.states:
            for key, weight in reference.states[0].weights.items():
                torch.testing.assert_close(state.weights[key], weight, rtol=1e-4, atol=1e-6)
