"""Communication hooks: the same curve for fewer bytes, as planned; a NaN leaves no trace."""

from pathlib import Path

import pytest

from paceline.errors import Outcome
from paceline.records import Audit, Plan
from paceline.strategies.ddp import plan_exchange
from paceline.strategies.shape import ParameterShape
from tests.harness import run_here, run_ranks
from tests.jobs import BAD, BAD_SETTINGS, poisoned_sample
from tests.parity import BATCH, SGD, assert_same_weights, tiny_model

STEPS = 12
TWO = [*tiny_model(), *SGD, *BATCH, f"train.steps={STEPS}", "launch.nproc=2"]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_a_hook_sends_less_and_learns_the_same(hook: str, tmp_path: Path) -> None:
    start = ["strategy.powersgd_start=2"] if hook == "powersgd" else []
    settings = [*TWO, "train.micro_batch_size=8", f"strategy.comm_hook={hook}", *start]
    ends = run_ranks(tmp_path / "two", "lm_tiny", settings)
    one = [*tiny_model(), *SGD, *BATCH, f"train.steps={STEPS}", "train.micro_batch_size=16"]
    reference = run_here(tmp_path / "one", "lm_tiny", one)
    close = 5e-2 if hook == "powersgd" else 1e-3
    for expected, found in zip(reference.rows, ends.rows, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=close)
    with pytest.raises(AssertionError):  # it was really compressed
        assert_same_weights(reference, ends)
    first, second = (state.weights for state in ends.states)
    assert all(first[name].equal(second[name]) for name in first), "replicas differ"
    proof = next(p for p in Audit.load(ends.run.audit).proofs if p.what == "DDP hook")
    assert proof.ok, proof
    exchange = Plan.load(ends.run.plan).exchange
    if hook != "powersgd":  # by step 3 it has only begun
        assert proof.effective.startswith(f"{3 * exchange.sent:,} of {3 * exchange.plain:,} bytes")


def test_powersgd_forgets_a_bad_step(tmp_path: Path) -> None:
    """Its error memory would bring the NaN back for ever."""
    file = tmp_path / "bad_job.py"
    file.write_text(
        BAD.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))")
    )
    sample = poisoned_sample(rank=1)
    settings = [
        "launch.nproc=2", f"model.poison={sample}", "train.max_skips=1",
        "strategy.comm_hook=powersgd", "strategy.powersgd_start=2",
    ]  # fmt: skip
    ends = run_ranks(tmp_path / "run", f"{file}:Bad", [*BAD_SETTINGS, *settings])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}
    assert [row.step for row in ends.rows if row.skipped] == [5]


def test_powersgd_keeps_its_buckets_in_order(tmp_path: Path) -> None:
    """Many small buckets: over gloo their later collectives met in another order and aborted."""
    settings = [
        *TWO, "train.micro_batch_size=8", "strategy.comm_hook=powersgd",
        "strategy.powersgd_start=2", "strategy.bucket_mb=0.02",
    ]  # fmt: skip
    ends = run_ranks(tmp_path / "run", "lm_tiny", settings)
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}


def test_powersgd_bytes_are_worked_out() -> None:
    """64 x 32 at rank 2: (64 + 32) x 2 = 192 numbers for 2048; a vector of 10 goes whole."""
    from paceline.strategies.ddp import DDPSettings

    parameters = [ParameterShape((64, 32), 4, True, 0), ParameterShape((10,), 4, True, 0)]
    config = DDPSettings(comm_hook="powersgd", powersgd_rank=2)
    exchange = plan_exchange(parameters, config)
    assert (exchange.plain, exchange.sent) == (4 * 2058, 4 * (192 + 10))


def test_a_hook_that_saves_nothing_says_so() -> None:
    from paceline.strategies.ddp import DDPSettings

    parameters = [ParameterShape((64, 32), 2, True, 0)]
    exchange = plan_exchange(parameters, DDPSettings(comm_hook="fp16"))
    assert exchange.sent == exchange.plain and "saves nothing" in exchange.because
