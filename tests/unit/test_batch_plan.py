"""What cannot work with batches of unequal shape is refused before anything starts."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.plan.planner import make_plan
from paceline.records import Plan
from paceline.run.flow import require_feasible
from tests.batch_job import BUCKETS, BY_LENGTH, write_batch_job
from tests.harness import machine

COMPILED = ["train.compile=default"]
PIPELINE = ["strategy.name=pipeline", "launch.nproc=2", "strategy.microbatches=2"]
REFUSED = {
    "pipeline": ([*BY_LENGTH, *PIPELINE], r"data.batch_by: a pipeline cuts each batch into 2 equ"),
    "buckets": ([*BUCKETS, *PIPELINE], "data.buckets: a pipeline cuts each batch"),
    "static": ([*BY_LENGTH, *COMPILED], r"compile_dynamic: the model is compiled for each shape"),
    "graphs": (
        [*BY_LENGTH, "train.compile=reduce-overhead", "train.compile_dynamic=on"],
        "train.compile: a graph is recorded for each shape",
    ),
    "no budget": (["data.batch_by=length"], "batch_length does not say how long"),
    "unequal": ([*BY_LENGTH, "launch.nproc=3"], "4 is not a multiple of micro_batch_size 1 x 3"),
}


@pytest.fixture
def job(tmp_path: Path) -> str:
    return write_batch_job(tmp_path)


def plan_of(source: str, *settings: str) -> Plan:
    plan = make_plan(load_job(source, ["launch.device=cpu", *settings]), machine())
    require_feasible(plan)
    return plan


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, job: str) -> None:
    settings, says = REFUSED[case]
    with pytest.raises(ConfigError, match=says):
        plan_of(f"{job}:Padded", *settings)


def test_what_works_is_planned_in_batches(job: str) -> None:
    plan = plan_of(f"{job}:Padded", *BY_LENGTH, "launch.nproc=2", "train.micro_batch_size=4")
    assert (plan.batch.global_size, plan.batch.grad_accum, plan.batch.counts) == (4, 2, "batches")
    assert str(plan.batch) == "4 batches per step = 2 accumulation x 2 dp, each at most 96 long"
    idle = [finding for finding in plan.findings if "no effect" in finding.what]
    assert [finding.where for finding in idle] == ["train.micro_batch_size"]
    plan_of(f"{job}:Padded", *BY_LENGTH, *COMPILED, "train.compile_dynamic=on")


def test_epochs_are_counted_in_batches(job: str) -> None:
    """Each sample once: 90 samples in 4 buckets, whose last batch may be smaller."""
    by_samples = plan_of(f"{job}:Padded", *BUCKETS, "train.epochs=4")
    assert 4 * 90 / 16 <= by_samples.steps <= 4 * (90 / 16 + 1)
    assert plan_of(f"{job}:Padded", *BY_LENGTH, "train.epochs=4").steps > 4
    with pytest.raises(ConfigError, match=r"has no length\nhint: .*stream_repeat=false"):
        plan_of(f"{job}:Streamed", "train.epochs=1")
    with pytest.raises(DataError, match="train.epochs=1 of 0 samples is less than one step"):
        plan_of(f"{job}:Empty", "train.epochs=1")
