"""Batches by length and streams: what one process computes, on any ranks and after any stop."""

from pathlib import Path

import pytest

from paceline.checkpoint.folder import CheckpointFolder
from paceline.errors import ConfigError, DataError
from paceline.job import load_job
from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.run.flow import require_feasible
from paceline.train.worker import RankRun
from tests.batch_job import BUCKETS, BY_LENGTH, SETTINGS, write_batch_job
from tests.harness import alone, machine, run_each, run_here

EVAL = ["train.eval_every=4"]
STREAM = ["data.stream_readers=4", "train.micro_batch_size=4", "train.global_batch_size=16"]
CASES = {
    "by length": ("Padded", [*BY_LENGTH, *EVAL]),
    "buckets": ("PerSample", BUCKETS),
    "stream": ("Streamed", STREAM),
    "counted": ("Turned", [*STREAM, "data.stream_buffer=5"]),
}
ZERO3 = ["strategy.name=zero3"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_batch_job(tmp_path_factory.mktemp("job"))


def assert_same(expected: list[TrainingRow], found: list[TrainingRow], name: str = "") -> None:
    for one, other in zip(expected, found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5), name
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4), name
        assert other.val_loss == (one.val_loss and pytest.approx(one.val_loss, rel=1e-5)), name
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5), name
        num_samples = [row.samples_per_s * row.step_s for row in (one, other)]
        assert num_samples[1] == pytest.approx(num_samples[0]), name


@pytest.mark.parametrize("kind", ["Padded", "Streamed"])
def test_two_ranks_compute_what_one_does(kind: str, job: str, tmp_path: Path) -> None:
    """Batches of unequal shape under zero3 too: each rank takes equally many."""
    own = {name: more for name, (of, more) in CASES.items() if of == kind}
    two = {name: [*SETTINGS, *more, "launch.nproc=2"] for name, more in own.items()}
    two |= {f"{name}, zero3": [*more, *ZERO3] for name, more in two.items()}
    ends = run_each(tmp_path, f"{job}:{kind}", two)
    for name, more in own.items():
        one = run_here(tmp_path / f"{name}, alone", f"{job}:{kind}", [*SETTINGS, *more])
        assert_same(one.rows, ends[name].rows, name)
        assert_same(one.rows, ends[f"{name}, zero3"].rows, "zero3")


def test_padding_is_reported_and_less_by_length(job: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.micro_batch_size=8"]
    plain = run_here(tmp_path / "plain", f"{job}:Padded", settings).rows
    by_length = run_here(tmp_path / "by", f"{job}:Padded", [*SETTINGS, *BY_LENGTH]).rows
    before, after = (sum(r.metrics["train/padding"] for r in rows) for rows in (plain, by_length))
    assert 0 < after < 0.5 * before < 8


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_resumed_takes_the_same_batches(name: str, job: str, tmp_path: Path) -> None:
    kind, more = CASES[name]
    settings = [*SETTINGS, *more, "launch.nproc=1", "checkpoint.every=3", "checkpoint.mode=sync"]
    source = f"{job}:{kind}"
    whole = run_here(tmp_path / "run", source, settings)
    before, folder = whole.rows, CheckpointFolder(whole.run.root / "checkpoints")
    folder.set_aside(6)
    resume(whole.run, source, settings)
    assert_same(before, list(read_training(whole.run.training)))


def resume(run: RunDir, source: str, settings: list[str]) -> RankRun:
    archive_left_over(run)
    begin_attempt(run, resume=True)
    job = load_job(source, settings)
    with alone():
        rank = RankRun(job, make_plan(job, machine()), run, RankId(0, 0, 1))
        rank.execute()
    return rank
