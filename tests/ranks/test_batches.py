"""Batches by length and streams: what one process computes, on any ranks and after any stop."""

import re
from pathlib import Path

import pytest

from paceline.checkpoint.folder import CheckpointFolder
from paceline.errors import ConfigError, DataError, Outcome
from paceline.job import load_job
from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records import Attempt, RankVerdict
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow
from paceline.train.worker import RankRun
from tests.batch_job import BUCKETS, BY_LENGTH, SETTINGS, write_batch_job
from tests.harness import alone, machine, run_each, run_here, run_ranks

EVAL = ["train.eval_every=4"]
STREAM = ["data.stream_readers=4", "train.micro_batch_size=4", "train.global_batch_size=16"]
CASES = {
    "by length": ("Padded", [*BY_LENGTH, *EVAL]),
    "buckets": ("PerSample", BUCKETS),
    "weighted": ("Weighted", BUCKETS),
    "stream": ("Streamed", STREAM),
    "counted": ("Turned", [*STREAM, "data.stream_buffer=5"]),
}
KEPT = ["checkpoint.every=3", "checkpoint.mode=sync", "checkpoint.keep=9"]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["Padded", "Streamed", pytest.param("Weighted", marks=pytest.mark.nightly)]
)
def test_two_ranks_compute_what_one_does(kind: str, job: str, tmp_path: Path) -> None:
    """Batches of unequal shape under zero3 too: each rank takes equally many. And one rank resumes
    what two have begun."""
    [(name, more)] = [(name, more) for name, (of, more) in CASES.items() if of == kind]
    settings = [*SETTINGS, *more, *KEPT]
    two = [*settings, "launch.nproc=2"]
    cases = {"ddp": two, "zero3": [*two, "strategy.name=zero3"]}
    ends = run_each(tmp_path, f"{job}:{kind}", cases)
    one = run_here(tmp_path / "alone", f"{job}:{kind}", settings)
    assert_same(one.rows, ends["ddp"].rows, name)
    assert_same(one.rows, ends["zero3"].rows, "zero3")
    resume_from_3(ends["zero3"].run, f"{job}:{kind}", [*settings, "launch.nproc=1"])
    assert_same(one.rows, ends["zero3"].rows, "resumed")


@pytest.mark.parametrize("name", ["by length", "buckets", "stream", "counted"])
def test_a_run_that_is_resumed_takes_the_same_batches(name: str, job: str, tmp_path: Path) -> None:
    kind, more = CASES[name]
    settings = [*SETTINGS, *more, *KEPT, "launch.nproc=1"]
    whole = run_here(tmp_path / "run", f"{job}:{kind}", settings)
    before = whole.rows
    notes = resume_from_3(whole.run, f"{job}:{kind}", settings).notes
    assert_same(before, whole.rows)
    said = {"stream": "by the state of its source", "counted": "by counting"}.get(name)
    assert [note for note in notes if f"the stream was resumed {said}" in note] or said is None


def resume_from_3(run: RunDir, source: str, settings: list[str]) -> RankVerdict:
    """Another attempt on one rank, in this process, as if the run had ended after step 3."""
    folder = CheckpointFolder(run.root / "checkpoints")
    for step in [step for step in folder.steps() if step > 3]:
        folder.set_aside(step)
    archive_left_over(run)
    begin_attempt(run, resume=True)
    job = load_job(source, settings)
    with alone():
        verdict = RankRun(job, make_plan(job, machine()), run, RankId(0, 0, 1)).execute()
    assert Attempt.load(run.attempt).first_step == 4
    return verdict


def test_padding_is_reported_and_less_by_length(job: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.micro_batch_size=8"]
    plain = run_here(tmp_path / "plain", f"{job}:Padded", settings).rows
    by_length = run_here(tmp_path / "by", f"{job}:Padded", [*SETTINGS, *BY_LENGTH]).rows
    before, after = (sum(r.metrics["train/padding"] for r in rows) for rows in (plain, by_length))
    assert 0 < after < 0.5 * before < 8


def test_unequal_ends_are_agreed_by_all_ranks(job: str, tmp_path: Path) -> None:
    """Of four readers two have 18 samples and two have 9: enough for two steps."""
    settings = [
        *SETTINGS, *STREAM, "data.stream_repeat=false", "train.eval_every=50", "train.steps=50",
        "checkpoint.at_end=true", "checkpoint.every=50",
    ]  # fmt: skip
    ends = run_ranks(tmp_path, f"{job}:Ended", [*settings, "launch.nproc=2"])
    assert [(v.outcome, v.step) for v in ends.verdicts] == [(Outcome.OK, 2)] * 2
    says = "the stream has ended: reader 2 of 4 has no more"
    assert all(v.why_early.startswith(says) for v in ends.verdicts)
    assert ends.rows[-1].step == 2 and ends.rows[-1].val_loss is not None
    assert CheckpointFolder(ends.run.root / "checkpoints").steps() == [2]
    archive_left_over(ends.run)
    begin_attempt(ends.run, resume=True)
    resumed = load_job(f"{job}:Ended", [*settings, "launch.nproc=1"])
    with alone():
        plan = make_plan(resumed, machine())
        again = RankRun(resumed, plan, ends.run, RankId(0, 0, 1)).execute()
    assert (again.step, again.why_early) == (2, ends.verdicts[0].why_early)


def test_a_stream_may_be_longer_than_the_run(job: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, *STREAM, "data.stream_repeat=false", "train.steps=1"]
    [verdict] = run_here(tmp_path, f"{job}:Turned", settings).verdicts
    assert (verdict.outcome, verdict.step, verdict.why_early) == (Outcome.OK, 1, "")


def test_a_mean_is_noticed_though_ranks_have_batches_of_different_sizes(
    job: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="Mean.loss returns a mean"):
        run_ranks(tmp_path, f"{job}:Mean", [*SETTINGS, *BY_LENGTH, "launch.nproc=2"])


def test_a_stream_names_the_samples_of_a_bad_step(job: str, tmp_path: Path) -> None:
    [verdict] = run_here(tmp_path, f"{job}:Poisoned", SETTINGS).verdicts
    assert verdict.outcome is Outcome.NAN
    [note] = [note for note in verdict.notes if note.startswith("bad samples: ")]
    assert re.search(r"bad samples: \d+ is sample \d of part-\d, \d+ is sample", note)


def test_weights_may_add_up_to_any_number(job: str, tmp_path: Path) -> None:
    """The loss adds in fp32 what `units` adds in fp64: on either side of a half, 3.5."""
    ends = run_here(tmp_path, f"{job}:Halves", [*SETTINGS, "train.micro_batch_size=1"])
    assert [row.tokens_per_s * row.step_s for row in ends.rows if row.tokens_per_s] == [
        pytest.approx(3.5)
    ] * 8


def test_keys_that_only_a_stream_reads_are_noted(job: str, tmp_path: Path) -> None:
    more = ["data.stream_buffer=9", "data.timeout_s=5.0", "train.steps=1"]
    [verdict] = run_here(tmp_path, f"{job}:Padded", [*SETTINGS, *more]).verdicts
    says = "is set but has no effect: the data is no stream"
    assert verdict.notes == [f"data.stream_buffer {says}", f"data.timeout_s {says}"]


BAD: dict[str, tuple[list[str], type[Exception], str]] = {
    "Failing": ([], DataError, r"Failing.collate failed on sample \d+: AssertionError: 27 is too"),
    "Wide": ([], DataError, r"sample \d+ has shape \[.*\], and the first one \[.*of its batch"),
    "Narrow": (
        [],
        DataError,
        r"the loss failed on sample \d+, .* in batches of {tokens: shape \[8, 5",
    ),
    "Empty": ([], DataError, "the training data has 0 samples, and one step takes 8"),
    "ValStream": (EVAL, ConfigError, r"the validation data is a stream \(Files\)"),
    "Odd": ([], DataError, r"failed on sample 0 of part-\d, sample 1 of part-\d, .* in batches of"),
    "Streamed": (["data.buckets=4"], ConfigError, r"data.buckets=4: the data is a stream"),
    "Turned": (
        ["data.stream_repeat=false", "train.micro_batch_size=60"],
        DataError,
        "reader 0 of 1 has no more samples .*, before step 1",
    ),
    "Neither": ([], DataError, "returned a int, which has no length and is no stream"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_named(kind: str, job: str, tmp_path: Path) -> None:
    more, error, says = BAD[kind]
    with pytest.raises(error, match=says):
        run_here(tmp_path, f"{job}:{kind}", [*SETTINGS, *more])


def test_other_ranks_than_the_readers_are_for_are_refused(job: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="1 reader of the stream cannot be shared equally by"):
        run_ranks(tmp_path, f"{job}:Turned", [*SETTINGS, "launch.nproc=2", "data.stream_readers=1"])


PIPELINE = ["launch.nproc=2", "strategy.name=pipeline", "strategy.microbatches=2"]


@pytest.mark.parametrize("kind", ["Padded", pytest.param("Streamed", marks=pytest.mark.nightly)])
def test_a_pipeline_takes_batches_that_are_padded_to_different_lengths(
    kind: str, job: str, tmp_path: Path
) -> None:
    """Each has equally many samples; the shapes that stages exchange are learnt for each length."""
    settings = [*SETTINGS, "train.micro_batch_size=4", "train.global_batch_size=8"]
    settings += ["data.stream_readers=2"] if kind == "Streamed" else []
    one = run_here(tmp_path / "one", f"{job}:{kind}", settings)
    two = run_ranks(tmp_path / "two", f"{job}:{kind}", [*settings, *PIPELINE])
    assert_same(one.rows, two.rows)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_compiled_for_all_shapes(job: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, *BY_LENGTH]
    compiled = [*settings, "train.compile=default", "train.compile_dynamic=on"]
    one = run_here(tmp_path / "eager", f"{job}:Padded", settings)
    other = run_here(tmp_path / "compiled", f"{job}:Padded", compiled)
    assert_same(one.rows, other.rows)
