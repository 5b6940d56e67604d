"""A loss or gradient that is not finite: all ranks agree, nothing is applied, the samples are
named (F45)."""

import math
from pathlib import Path

import pytest
import torch

from paceline.errors import Outcome
from tests.harness import run_here, run_ranks
from tests.jobs import BAD, poisoned_sample, write_bad_job
from tests.jobs import BAD_SETTINGS as COMMON
from tests.jobs import BAD_STEPS as STEPS


@pytest.fixture
def job(tmp_path: Path) -> str:
    return write_bad_job(tmp_path)


@pytest.mark.parametrize("kind", ["nan", "inf", "grad"])
def test_one_rank_stops_both_and_nothing_is_applied(job: str, kind: str, tmp_path: Path) -> None:
    sample = poisoned_sample(rank=1)
    overrides = [*COMMON, "launch.nproc=2", f"model.poison={sample}", f"model.kind={kind}"]
    ends = run_ranks(tmp_path / "run", job, overrides)
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.NAN}
    assert {verdict.bad_step for verdict in ends.verdicts} == {5}
    assert sample in ends.verdicts[1].bad_sample_ids
    if kind != "grad":
        assert [v.loss_was_finite for v in ends.verdicts] == [True, False]
    for state in ends.states:
        assert all(torch.isfinite(weight).all() for weight in state.weights.values())
    assert torch.equal(ends.states[0].weights["weight"], ends.states[1].weights["weight"])
    bad = next(row for row in ends.rows if row.step == 5)
    assert bad.skipped and not bad.overflowed and not math.isfinite(bad.grad_norm)


@pytest.mark.parametrize("log_every", [1, 3, 100])
def test_the_vetoed_step_leaves_no_trace(job: str, log_every: int, tmp_path: Path) -> None:
    """With skips allowed, the run goes on as if the bad step's gradient had been nothing."""
    sample = poisoned_sample(rank=1)
    skips = [
        "train.max_skips=1", "launch.nproc=2", f"model.poison={sample}",
        f"train.log_every={log_every}",
    ]  # fmt: skip
    ends = run_ranks(tmp_path / "run", job, [*COMMON, *skips])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.OK}
    assert [row.step for row in ends.rows if row.skipped] == [5]
    assert all(math.isfinite(row.loss) for row in ends.rows if row.step != 5)
    counts = ends.states[0].slot("step").values()
    assert {float(count) for count in counts} == {STEPS - 1}


def test_the_last_step_is_judged_too(job: str, tmp_path: Path) -> None:
    from paceline.data.cursor import Order, StepSlice

    sample = int(Order(64, 0).at(StepSlice(4, 1, 1, 0).positions(STEPS - 1))[0])
    ends = run_here(tmp_path / "run", job, [*COMMON, f"model.poison={sample}"])
    assert ends.verdicts[0].outcome is Outcome.NAN and ends.verdicts[0].bad_step == STEPS


def test_a_loss_that_counts_wrongly_is_caught(tmp_path: Path) -> None:
    from paceline.errors import ConfigError

    file = tmp_path / "bad_job.py"
    file.write_text(BAD.replace("return loss, len(y)", "return loss, 2 * len(y)"))
    with pytest.raises(ConfigError, match="summed 8 samples, but the workload promised 4"):
        run_here(tmp_path / "run", f"{file}:Bad", COMMON)


def test_a_loss_that_counts_wrongly_is_caught_where_sizes_vary(tmp_path: Path) -> None:
    from paceline.errors import ConfigError

    file = tmp_path / "bad_job.py"
    varying = "\n    def units_per_sample(self, config): return None\n"
    varying += "    def units(self, batch): return 2 * len(batch['id'])\n"
    file.write_text(BAD + varying)
    with pytest.raises(ConfigError, match="summed 4 samples, but the workload promised 8"):
        run_here(tmp_path / "run", f"{file}:Bad", COMMON)


def test_a_bad_loss_whose_gradient_is_cut_off_is_noticed(tmp_path: Path) -> None:
    """relu passes no gradient where it is 0, so no NaN reaches a weight; the loss is inf all the
    same, and is found when losses are gathered."""
    file = tmp_path / "bad_job.py"
    cut = "        if bad: loss = torch.relu(-(y ** 2) - 1).sum() * float('inf')\n"
    file.write_text(BAD.replace("        return loss, len(y)", cut + "        return loss, len(y)"))
    sample = poisoned_sample(rank=1)
    settings = ["launch.nproc=2", f"model.poison={sample}", "model.kind=none"]
    ends = run_ranks(tmp_path / "run", f"{file}:Bad", [*COMMON, *settings])
    assert {verdict.outcome for verdict in ends.verdicts} == {Outcome.NAN}
    assert {verdict.bad_step for verdict in ends.verdicts} == {5}
    assert sample in ends.verdicts[1].bad_sample_ids
