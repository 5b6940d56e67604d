"""fp16: the loss scale is found, agreed on by all ranks, kept and restored."""

import math
from pathlib import Path

import pytest
import torch

from paceline.errors import Outcome
from paceline.strategies.precision import GROWTH_STEPS, LossScale
from tests.harness import HeldSource, RankState, alone, prepare_run, run_here, run_ranks
from tests.parity import BATCH, SGD, tiny_model

FP16 = [*tiny_model(), *SGD, *BATCH, "precision.mode=fp16", "train.micro_batch_size=8"]
SHORT = ["train.steps=12"]


def test_the_scale_halves_on_overflow_and_grows_with_patience() -> None:
    scale = LossScale(4.0, torch.device("cpu"))
    scale.update(torch.tensor(1.0))
    assert float(scale.value) == 2.0
    for _ in range(GROWTH_STEPS):
        scale.update(torch.tensor(0.0))
    assert float(scale.value) == 4.0
    for _ in range(5):
        scale.update(torch.tensor(1.0))
    assert float(scale.value) == 1.0, "a scale below 1 would lose what it should keep"


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_fp16_learns_what_fp32_learns(strategy: str, tmp_path: Path) -> None:
    two = ["launch.nproc=2", f"strategy.name={strategy}"]
    fp32 = [*tiny_model(), *SGD, *BATCH, *SHORT, "train.micro_batch_size=16"]
    expected = run_here(tmp_path / "one", "lm_tiny", fp32)
    ends = run_ranks(tmp_path / "two", "lm_tiny", [*FP16, *SHORT, *two])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}
    assert not any(row.skipped for row in ends.rows)
    for a, b in zip(expected.rows, ends.rows, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-2)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=2e-2), "not scaled back"
    assert ends.rows[0].grad_norm != expected.rows[0].grad_norm, "it was computed in fp32"
    assert ends.states[0].loss_scale == 65536


def test_overflow_is_skipped_and_not_counted(tmp_path: Path) -> None:
    """A start far too high: the first steps overflow on purpose, and max_skips is 0."""
    high = ["precision.loss_scale=1e8", "launch.nproc=2", "strategy.name=zero2", *SHORT]
    ends = run_ranks(tmp_path / "run", "lm_tiny", [*FP16, *high])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}
    skipped = [row.step for row in ends.rows if row.skipped]
    assert skipped and skipped == list(range(1, len(skipped) + 1)) and len(skipped) < 12
    assert [row.step for row in ends.rows if row.overflowed] == skipped, "which is no fault"
    assert ends.rows[-1].loss < ends.rows[0].loss
    scales = {state.loss_scale for state in ends.states}
    assert scales == {1e8 / 2 ** len(skipped)}
    assert all(math.isfinite(float(w.abs().sum())) for w in ends.states[0].weights.values())


def test_the_scaler_is_saved_and_restored(tmp_path: Path) -> None:
    from paceline.strategies import find_strategy
    from paceline.strategies.base import EngineParts

    trained = run_here(
        tmp_path / "run", "lm_tiny", [*FP16, "train.steps=3", "precision.loss_scale=1024.0"]
    )
    job, plan, _ = prepare_run(tmp_path / "two", "lm_tiny", [*FP16, "launch.nproc=1"])
    parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
    with alone():
        engine = find_strategy("single").build(parts)
        assert RankState.of(engine).loss_scale == 65536
        engine.load(HeldSource(trained.states[0].pieces))
        found = RankState.of(engine)
    assert found.loss_scale == 1024
    assert [int(steps) for steps in found.slot("good_steps").values()] == [3]
