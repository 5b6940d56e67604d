"""Metrics are what one process finds, whatever the ranks and the strategy; what is best and when to
stop follow from them."""

import json
import math
from pathlib import Path

import pytest

from paceline.checkpoint.folder import BEST, CheckpointFolder
from paceline.errors import ConfigError, DataError, JobError, Outcome
from paceline.job import load_job
from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records import RankVerdict
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.train.worker import RankRun
from tests.docs import write_files
from tests.harness import RankEnds, alone, machine, run_each, run_here, run_ranks
from tests.metric_job import SETTINGS, write_metric_job
from tests.skips import needs_deepspeed

TRAINED = {"train/accuracy", "train/margin"}
OWN = {"val/accuracy", "val/margin", "val/seen", "val/right", "val/twice"}
TWO = ["launch.nproc=2", "train.micro_batch_size=2"]
CASES = {
    "ddp": [],
    "zero3": ["strategy.name=zero3"],
    "pipeline": ["strategy.name=pipeline", "train.micro_batch_size=4", "strategy.microbatches=2"],
}
REFUSED = Outcome.REFUSED_CONFIG
KEPT = ["checkpoint.every=1", "checkpoint.mode=sync"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_metric_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def reference(job: str, tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    folder = tmp_path_factory.mktemp("reference") / "run"
    return run_here(folder, f"{job}:Own", [*SETTINGS, "train.micro_batch_size=12"])


def test_one_process_has_every_number(reference: RankEnds) -> None:
    assert [set(row.metrics) - {"train/rare"} for row in reference.rows] == [
        TRAINED | OWN if row.step % 3 == 0 else TRAINED for row in reference.rows
    ]
    has_rare = {"train/rare" in row.metrics for row in reference.rows}
    assert has_rare == {True, False}, "a step without a sample of that class has an empty cell"
    last = reference.rows[-1]
    assert last.val_loss is None, "its evaluation says nothing of the loss"
    assert last.metrics["val/seen"] == 11
    assert last.metrics["val/right"] == pytest.approx(last.metrics["val/accuracy"])
    assert last.metrics["val/accuracy"] * 11 == pytest.approx(
        round(last.metrics["val/accuracy"] * 11)
    )
    assert last.metrics["val/twice"] == pytest.approx(2 * last.metrics["val/margin"])


def assert_same(expected: list[TrainingRow], found: list[TrainingRow], name: str) -> None:
    for one, several in zip(expected, found, strict=True):
        assert several.loss == pytest.approx(one.loss, rel=1e-5), name
        assert several.metrics == pytest.approx(one.metrics, rel=1e-5), name


def test_two_ranks_find_what_one_process_finds(
    job: str, reference: RankEnds, tmp_path: Path
) -> None:
    cases = {name: [*SETTINGS, *TWO, *more] for name, more in CASES.items()}
    for name, ends in run_each(tmp_path, f"{job}:Own", cases).items():
        assert_same(reference.rows, ends.rows, name)


def test_three_ranks_of_which_one_runs_out(job: str, reference: RankEnds, tmp_path: Path) -> None:
    """11 samples one by one over 3 ranks: in the last round the third has none left, and runs a
    forward pass all the same, for the others gather its part of the weights."""
    three = [*SETTINGS, "launch.nproc=3", "train.micro_batch_size=1", "strategy.name=zero3"]
    assert_same(reference.rows, run_ranks(tmp_path, f"{job}:Own", three).rows, "zero3")


@needs_deepspeed
@pytest.mark.nightly
def test_deepspeed_finds_them_too(job: str, reference: RankEnds, tmp_path: Path) -> None:
    settings = [*SETTINGS, *TWO, "strategy.name=deepspeed", "strategy.stage=2"]
    assert_same(reference.rows, run_ranks(tmp_path, f"{job}:Own", settings).rows, "deepspeed")


@pytest.mark.nightly
def test_a_pipeline_says_that_it_runs_the_model_once(job: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Twice.evaluate in a pipeline, which can run the"):
        run_ranks(tmp_path, f"{job}:Twice", [*SETTINGS, *TWO, *CASES["pipeline"]])


def test_without_an_evaluation_of_its_own_it_is_what_the_loss_says(
    job: str, tmp_path: Path
) -> None:
    one = [*SETTINGS, "train.micro_batch_size=12"]
    plain, own = (run_here(tmp_path / name, f"{job}:{name}", one) for name in ("Plain", "Own"))
    last = plain.rows[-1]
    assert last.val_loss is not None
    assert {"val/accuracy", "val/margin", "val/rare", *TRAINED} <= set(last.metrics)
    assert last.metrics["val/accuracy"] == own.rows[-1].metrics["val/accuracy"]


def test_what_is_not_a_number_on_one_rank_is_named_and_decides_nothing(
    job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*SETTINGS, "train.micro_batch_size=4", "model.poison=9", *KEPT]
    says = "val/margin is not finite: rank 0, samples 8 to 10"
    ends = run_here(tmp_path / "other", f"{job}:Own", [*settings, "train.best=val/accuracy:max"])
    assert math.isnan(ends.rows[-1].metrics["val/margin"]) and says in caplog.text
    with pytest.raises(DataError, match=f"{says}; it decides which checkpoint is the best"):
        run_here(tmp_path / "deciding", f"{job}:Own", [*settings, "train.best=val/margin:max"])


def test_all_ranks_end_where_what_decides_is_no_number_on_one(job: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, *TWO, "model.poison=9", "train.best=val/margin:max"]
    with pytest.raises(AssertionError, match="val/margin is not finite: rank 0, samples 8 to 9"):
        run_ranks(tmp_path, f"{job}:Own", settings)
    verdicts = [RankVerdict.load(RunDir(tmp_path).verdict(rank)) for rank in (0, 1)]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.REFUSED_DATA] * 2


def test_a_name_that_is_not_measured_is_refused_before_step_1(job: str, tmp_path: Path) -> None:
    """With those that are."""
    settings = [*SETTINGS, "train.micro_batch_size=12", "train.best=val/wer"]
    with pytest.raises(ConfigError, match=r"no val/wer.*\n.*val/accuracy, val/margin, val/right"):
        run_here(tmp_path, f"{job}:Own", settings)
    assert RankVerdict.load(RunDir(tmp_path).verdict(0)).step == 0


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_refuse_it(job: str, case: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, *TWO, *CASES[case], "train.best=val/wer"]
    with pytest.raises(AssertionError, match=r"no val/wer"):
        run_ranks(tmp_path, f"{job}:Own", settings)
    verdicts = [RankVerdict.load(RunDir(tmp_path).verdict(rank)) for rank in (0, 1)]
    assert [(verdict.outcome, verdict.step) for verdict in verdicts] == [(REFUSED, 0)] * 2


def test_a_mistake_in_metrics_shows_before_step_1(job: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="f1_sum"):
        run_here(tmp_path, f"{job}:Misnamed", [*SETTINGS, "train.micro_batch_size=12"])
    verdict = RankVerdict.load(RunDir(tmp_path).verdict(0))
    assert verdict.step == 0 and verdict.error is not None
    assert verdict.error.place.startswith("metric_job.py:")


def test_metrics_that_few_samples_do_not_have_are_left_to_the_evaluation(
    job: str, tmp_path: Path
) -> None:
    settings = [*SETTINGS, "train.micro_batch_size=4", "train.best=val/right:max"]
    ends = run_here(tmp_path, f"{job}:Needy", settings)
    assert ends.rows[-1].metrics["val/seen"] == 11
    assert any("raised ValueError on the first batch" in n for n in ends.verdicts[0].notes)


@pytest.mark.nightly
def test_torchmetrics_fits_in(tmp_path: Path) -> None:
    """The recipe of docs/your-job.md on two ranks: called on rank 0 alone, it waits for nobody."""
    pytest.importorskip("torchmetrics")
    write_files("your-job", tmp_path)
    settings = [
        "train.steps=4", "train.eval_every=4", "train.global_batch_size=64", "launch.nproc=2",
        "launch.device=cpu", "data.num_workers=0", "checkpoint.at_end=false",
    ]  # fmt: skip
    theirs = run_ranks(tmp_path / "two", f"{tmp_path}/with_torchmetrics.py:Measured", settings)
    ours = run_here(tmp_path / "one", f"{tmp_path}/f1.py:Scored", [*settings, "launch.nproc=1"])
    found, expected = theirs.rows[-1].metrics, ours.rows[-1].metrics
    assert 0 < found["val/f1"] < 1 and found["val/f1"] == pytest.approx(expected["val/f1"])
    assert -1 < found["val/mcc"] < 1


STOPPING = ["train.best=val/seen:max", "train.stop_after=2", "train.eval_every=1"]


@pytest.mark.slow
def test_it_stops_when_nothing_improves_and_counts_on_after_a_resume(
    job: str, tmp_path: Path
) -> None:
    """`val/seen` is always 11: best at the first evaluation, no better at the next two."""
    settings = [*SETTINGS, "train.micro_batch_size=12", *STOPPING, *KEPT]
    whole = run_here(tmp_path / "whole", f"{job}:Own", settings)
    [verdict] = whole.verdicts
    assert (verdict.outcome, verdict.step) == (Outcome.OK, 3)
    assert verdict.why_early == (
        "val/seen has not improved in 2 evaluations: the best is val/seen 11 at step 1"
        " (train.stop_after)"
    )
    assert CheckpointFolder(whole.run.root / "checkpoints").state(3).num_worse == 2

    cut = run_here(tmp_path / "cut", f"{job}:Own", [*settings, "train.steps=2"])
    assert cut.verdicts[0].why_early == ""
    resumed = resume_here(cut.run, f"{job}:Own", settings)
    assert (resumed.step, resumed.why_early) == (3, verdict.why_early)
    # Killed after that checkpoint and before its end, it takes no further step.
    again = resume_here(cut.run, f"{job}:Own", settings)
    assert (again.step, again.why_early) == (3, verdict.why_early)
    assert [row.step for row in read_training(cut.run.training)] == [1, 2, 3]


def test_who_names_the_best_finds_its_weights(job: str, tmp_path: Path) -> None:
    """Without `checkpoint.every` too: after an early end the last weights are not the best."""
    settings = [*SETTINGS, "train.micro_batch_size=12", *STOPPING, "checkpoint.at_end=true"]
    ends = run_here(tmp_path / "run", f"{job}:Own", settings)
    folder = CheckpointFolder(ends.run.root / "checkpoints")
    assert sorted(folder.steps()) == [1, 3] and folder.pointer(BEST) == 1


def resume_here(run: RunDir, source: str, settings: list[str]) -> RankVerdict:
    """Another attempt in the same directory, in this process."""
    archive_left_over(run)
    begin_attempt(run, resume=True)
    job = load_job(source, settings)
    with alone():
        return RankRun(job, make_plan(job, machine()), run, RankId(0, 0, 1)).execute()


def told(run: Path, rank: int) -> list[list[object]]:
    return [json.loads(line) for line in Path(f"{run}.{rank}").read_text().splitlines()]


def test_hooks_are_told_of_all_on_the_ranks_that_ask(
    job: str, reference: RankEnds, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    more = [f"name={log}", "checkpoint.every=2"]
    ends = run_ranks(tmp_path / "run", f"{job}:Everywhere", [*SETTINGS, *TWO, *more])
    for rank in (0, 1):
        found = told(log, rank)
        by_kind = {
            kind: [(step, more) for what, step, more in found if what == kind]
            for kind in ("step", "eval", "checkpoint")
        }
        assert [s for s, _ in by_kind["step"]] == [1, 2, 3, 4, 5, 6]
        assert [m for _, m in by_kind["step"]] == pytest.approx(
            [row.metrics["train/accuracy"] for row in ends.rows]
        )
        assert by_kind["eval"] == [
            (3, pytest.approx(reference.rows[2].metrics["val/accuracy"])),
            (6, pytest.approx(reference.rows[5].metrics["val/accuracy"])),
        ]
        assert by_kind["checkpoint"] == [(2, "step_2"), (4, "step_4"), (6, "step_6")]


def test_a_sum_that_comes_late_is_refused(job: str, tmp_path: Path) -> None:
    """Ranks agree on names once, in the first window of 2 steps."""
    with pytest.raises(ConfigError, match=r"also returned late, .* in the first 2 steps"):
        run_here(tmp_path, f"{job}:Late", [*SETTINGS, "train.micro_batch_size=12"])


def test_a_hook_that_raises_is_named(job: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^Raising.on_step raised ValueError: no room at step 3$"):
        run_here(tmp_path, f"{job}:Raising", [*SETTINGS, "train.micro_batch_size=12"])
