"""Every strategy computes what one process computes: SGD, fp32, the same global batch.

SGD and not AdamW: AdamW divides the gradient by its own size and hides a wrong scale.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.harness import (
    HeldSource,
    RankEnds,
    RankState,
    alone,
    prepare_run,
    run_each,
    run_here,
    run_ranks,
)
from tests.parity import BATCH, SGD, assert_same, assert_same_curve, tiny_model

# One row a strategy and a way of splitting the batch.
ROWS = {
    "ddp": ["strategy.name=ddp", "train.micro_batch_size=8"],
    "ddp, accumulation": ["strategy.name=ddp", "train.micro_batch_size=2"],
    "ddp, small buckets, static graph": [
        "strategy.name=ddp",
        "train.micro_batch_size=8",
        "strategy.bucket_mb=0.01",
        "strategy.static_graph=true",
    ],
    "ddp, accumulation, static graph": [
        "strategy.name=ddp",
        "train.micro_batch_size=2",
        "strategy.static_graph=true",
    ],
    "ddp, loader workers": [
        "strategy.name=ddp",
        "train.micro_batch_size=8",
        "data.num_workers=2",
    ],
    "zero0 is ddp": ["strategy.name=zero0", "train.micro_batch_size=8"],
    "zero1": ["strategy.name=zero1", "train.micro_batch_size=8"],
    "zero1, accumulation": ["strategy.name=zero1", "train.micro_batch_size=2"],
    "zero2": ["strategy.name=zero2", "train.micro_batch_size=8"],
    "zero2, accumulation": ["strategy.name=zero2", "train.micro_batch_size=2"],
    "zero3": ["strategy.name=zero3", "train.micro_batch_size=8"],
    "fsdp, accumulation": ["strategy.name=fsdp", "train.micro_batch_size=2"],
    "zero3, deferred": [
        "strategy.name=zero3",
        "train.micro_batch_size=2",
        "strategy.accumulate=defer",
    ],
    "zero3, prefetch, recomputed": [
        "strategy.name=zero3",
        "train.micro_batch_size=8",
        "strategy.forward_prefetch=1",
        "strategy.backward_prefetch=1",
        "train.activation_checkpointing=full",
    ],
    "zero2, selective": [
        "strategy.name=zero2",
        "train.micro_batch_size=8",
        "train.activation_checkpointing=selective",
    ],
    "zero3, fused": [
        "strategy.name=zero3",
        "train.micro_batch_size=8",
        "strategy.exchange=fused",
    ],
    "zero3, fused, accumulation, recomputed": [
        "strategy.name=zero3",
        "train.micro_batch_size=2",
        "strategy.exchange=fused",
        "train.activation_checkpointing=full",
    ],
    "zero2, fused, accumulation, selective": [
        "strategy.name=zero2",
        "train.micro_batch_size=2",
        "strategy.exchange=fused",
        "train.activation_checkpointing=selective",
    ],
    "ddp, recomputed, eager attention": [
        "strategy.name=ddp",
        "train.micro_batch_size=8",
        "train.activation_checkpointing=full",
        "attention.impl=eager",
    ],
}
# Both ranks see all samples: in parts of two, and with accumulation of one.
PIPELINE = ["strategy.name=pipeline", "train.micro_batch_size=16", "strategy.microbatches=8"]
TWICE = ["strategy.name=pipeline", "train.micro_batch_size=8", "strategy.microbatches=8"]
ROWS |= {
    "pipeline, 1f1b": [*PIPELINE, "strategy.schedule=1f1b"],
    "pipeline, gpipe, accumulation": [*TWICE, "strategy.schedule=gpipe"],
    "pipeline, dualpipe, accumulation": [*TWICE, "strategy.schedule=dualpipe"],
    "pipeline, interleaved_zb": [
        *PIPELINE,
        "strategy.schedule=interleaved_zb",
        "strategy.stages_per_rank=1",
        "train.activation_checkpointing=full",
    ],
}
# The quick suite takes one row of each kind.
QUICK = (
    "ddp",
    "ddp, accumulation, static graph",
    "zero1, accumulation",
    "zero2",
    "fsdp, accumulation",
    "zero3, fused",
    "pipeline, dualpipe, accumulation",
)
HYBRIDS = ("zero2_hybrid", "zero3_hybrid")


def compare(rows: Iterable[str], reference: RankEnds, folder: Path) -> None:
    """All rows in one group of two ranks, to be quick."""
    common = [*tiny_model(), *SGD, *BATCH, "launch.nproc=2"]
    ended = run_each(folder, "lm_tiny", {row: [*common, *ROWS[row]] for row in rows})
    for row, ends in ended.items():
        assert_same(reference, ends, row)


def test_two_ranks_equal_one(reference: RankEnds, tmp_path: Path) -> None:
    compare(QUICK, reference, tmp_path)


@pytest.mark.slow
def test_two_ranks_equal_one_with_every_option(reference: RankEnds, tmp_path: Path) -> None:
    compare([row for row in ROWS if row not in QUICK], reference, tmp_path)


def four_ranks(name: str) -> list[str]:
    """Hybrids as 2 x 2: two copies, each cut in two."""
    hybrid = ["strategy.shard_size=2"] if name in HYBRIDS else []
    batch = [*BATCH, "train.micro_batch_size=2", "launch.nproc=4"]
    return [*tiny_model(), *SGD, *batch, f"strategy.name={name}", *hybrid]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(HYBRIDS, marks=pytest.mark.slow, id="hybrids"),
        pytest.param(("zero1", "zero2", "zero3"), marks=pytest.mark.nightly, id="others"),
    ],
)
def test_four_ranks_equal_one(names: list[str], reference: RankEnds, tmp_path: Path) -> None:
    ended = run_each(tmp_path, "lm_tiny", {name: four_ranks(name) for name in names})
    for name, ends in ended.items():
        assert_same(reference, ends, name)


def test_bf16_computes_nearly_the_same(reference: RankEnds, tmp_path: Path) -> None:
    """bf16 has 8 bits: 1 % of the loss, over weights that stay fp32."""
    overrides = [*tiny_model(), *SGD, *BATCH, "train.micro_batch_size=8", "precision.mode=bf16"]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*overrides, "launch.nproc=2"])
    for expected, found in zip(reference.rows, ends.rows, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    assert ends.rows[0].loss != reference.rows[0].loss, "it was computed in fp32"
    assert {w.dtype for w in ends.states[0].weights.values()} == {torch.float32}


def test_a_wrong_gradient_scale_is_caught(
    reference: RankEnds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: twice the gradient departs from the reference at once."""
    from paceline.strategies import engine

    right = engine.normalise
    monkeypatch.setattr(engine, "normalise", lambda loss, scale: 2 * right(loss, scale))
    overrides = [*tiny_model(), *SGD, *BATCH, "train.micro_batch_size=16", "optim.clip=off"]
    ends = run_here(tmp_path / "run", "lm_tiny", overrides)
    with pytest.raises(AssertionError):
        assert_same_curve(reference, ends)


def test_rank_0_decides_where_the_seed_does_not(tmp_path: Path) -> None:
    """A model whose weights depend on the rank: all start with rank 0's."""
    job = tmp_path / "ranked.py"
    job.write_text(
        "import torch, torch.distributed as dist\nfrom torch import nn\n"
        "from paceline import Workload\n"
        "class Data:\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index): return torch.ones(4)\n"
        "class Ranked(Workload):\n"
        "    def build_model(self, config):\n"
        "        model = nn.Linear(4, 4)\n"
        "        rank = dist.get_rank() if dist.is_initialized() else 0\n"
        "        nn.init.constant_(model.weight, float(rank))\n"
        "        return model\n"
        "    def build_data(self, config, split): return Data() if split == 'train' else None\n"
        "    def loss(self, model, batch): return model(batch).sum(), len(batch)\n"
    )
    still = ["train.steps=1", "optim.name=sgd", "optim.lr=1e-9", "data.num_workers=0"]
    two = ["launch.nproc=2", "launch.device=cpu", "strategy.name=zero3"]
    ends = run_ranks(tmp_path / "run", f"{job}:Ranked", [*still, *two])
    for state in ends.states:
        assert state.weights["weight"].abs().max() < 1e-6


def test_state_survives_a_round_trip(tmp_path: Path) -> None:
    """What one engine holds, another takes, bit for bit."""
    from paceline.strategies import find_strategy
    from paceline.strategies.base import EngineParts

    job, plan, _ = prepare_run(tmp_path / "run", "lm_tiny", [*tiny_model(), "launch.nproc=1"])
    parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
    trained = run_here(tmp_path / "trained", "lm_tiny", [*tiny_model(), "train.steps=3"])
    with alone():
        first = find_strategy("single").build(parts)
        first.load(HeldSource(trained.states[0].pieces))
        found = RankState.of(first)
    assert all(torch.equal(found.weights[n], w) for n, w in trained.states[0].weights.items())
    kept = trained.states[0].optimizer
    assert kept.keys() == found.optimizer.keys()
    assert all(torch.equal(found.optimizer[name], value) for name, value in kept.items())
    assert {float(count) for count in found.slot("step").values()} == {3}
