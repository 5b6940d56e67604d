"""Reports from run directories alone: finished, failed, still running, and hostile names."""

import json
import math
import re
from pathlib import Path

import pytest

from paceline.config.schema import LaunchConfig
from paceline.errors import Outcome
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.launch.ending import LaunchEnd, judge_end
from paceline.plan.planner import make_plan
from paceline.records import RankEnd, RankError, RankVerdict, Result
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.report.plots import Axes, Series, line_chart, thin, ticks
from paceline.run.conclude import Circumstances, conclude
from paceline.run.rank import TRAIN
from paceline.schedules.actions import Action, Kind
from paceline.train.heartbeat import ActionMark, StepMark, read_action
from tests.unit.test_plan import env as machine
from tests.unit.test_plan import plan as make_test_plan

HEADER = "step,loss,lr,grad_norm,step_s,samples_per_s,tokens_per_s,skipped,warmup,val_loss\n"
STEPS_HEADER = (
    "step,warmup,wall_s,data_s,forward_s,backward_s,optimizer_s,eval_s,other_s,unaccounted_s\n"
)
assert make_plan  # the plan of the fixture is a real one


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 2 ranks and 20 steps, written by hand."""
    made = RunDir.create("r", tmp_path / "run")
    plan = make_test_plan("launch.nproc=2", "name=fixture")
    plan.save(made.plan)
    machine().save(made.env)
    made.config.write_text("name: fixture\n")
    order = LaunchOrder(LaunchConfig(), plan.crew, machine(), 1, TRAIN, "lm")
    draw_plan(order, argv=[], hosts=["box"]).save(made.launch)
    lines = [
        f"{s},{5 / s},0.1,1.5,0.5,32,4096,0,{int(s <= 5)},{2.0 if s == 20 else ''}\n"
        for s in range(1, 21)
    ]
    made.training.write_text(HEADER + "".join(lines))
    for rank in (0, 1):
        made.rank(rank).mkdir(parents=True)
        rows = [f"{s},0,0.5,0.01,0.1,0.3,0.05,0,0.01,0.03\n" for s in range(1, 21)]
        made.steps(rank).write_text(STEPS_HEADER + "".join(rows))
        verdict(rank).save(made.verdict(rank))
    return made


def verdict(rank: int, **more: object) -> RankVerdict:
    facts = {
        "rank": rank, "host": "box", "outcome": Outcome.OK, "step": 20, "ended_at": 10.0 + rank,
        "flops_per_sample": 1e9, "flops_source": "counted",
        "peak_reserved_bytes": 2**20 * (rank + 1),
    }  # fmt: skip
    return RankVerdict.model_validate(facts | more)


def ended(codes: dict[int, int]) -> LaunchEnd:
    return LaunchEnd({r: RankEnd(rank=r, host="box", exit_code=c) for r, c in codes.items()})


def finish(run: RunDir, end: LaunchEnd | None = None) -> Result:
    ending = judge_end(run, 2, end or LaunchEnd())
    known = Circumstances(ending, "c", "k", {"unigram_entropy": 3.25}, 1.0, 11.0)
    result = conclude(run, make_test_plan("launch.nproc=2", "name=fixture"), machine(), known)
    result.save(run.result)
    write_report(run)
    return result


def test_a_finished_run(run: RunDir) -> None:
    result = finish(run)
    assert (result.outcome, result.exit_code, result.steps) == (Outcome.OK, 0, 20)
    assert result.final_loss == pytest.approx(0.25) and result.val_loss == 2.0
    assert result.window is not None and result.window.first_step == 6
    # 32 samples/s of 1 GFLOP over 2 ranks.
    assert result.tflops_per_rank == pytest.approx(0.016)
    assert result.mfu is None and "no stated peak" in result.mfu_note
    assert result.peak_reserved_bytes == 2**21
    page, summary = run.report.read_text(), run.summary.read_text()
    for text in ("4,096", "training.csv, steps 6 to 20", "rank 1", "byte-unigram entropy"):
        assert text in page and text in summary
    assert page.count("<svg") == 5, "all but memory: no telemetry was recorded"


def test_the_page_needs_nothing_from_outside(run: RunDir) -> None:
    finish(run)
    page = run.report.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:|#)", page)
    assert "<script" not in page and "http" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_the_rank_that_died_first_is_named_first(run: RunDir) -> None:
    lost = RankError(kind="RuntimeError", message="Connection reset by peer")
    verdict(0, outcome=Outcome.CRASHED, error=lost, ended_at=5.0).save(run.verdict(0))
    run.verdict(1).unlink()
    result = finish(run, ended({1: -9}))
    assert result.outcome is Outcome.CRASHED and result.exit_code == 5
    assert result.failure is not None
    assert (result.failure.rank, result.failure.message) == (
        1,
        "killed by SIGKILL\nhint: the kernel does that when memory runs out; see telemetry.csv",
    )
    assert result.failure.others == ["rank 0: RuntimeError: Connection reset by peer"]
    assert "killed by SIGKILL" in run.report.read_text()


def test_a_rank_that_died_in_a_pipeline_is_named_with_stage_and_microbatch(run: RunDir) -> None:
    marks = [ActionMark(run.action_mark(rank)) for rank in (0, 1)]
    marks[0].set(Action(Kind.BACKWARD, 0, 1))
    marks[1].set(Action(Kind.FORWARD, 1, 3))
    run.verdict(1).unlink()
    failure = finish(run, ended({1: -9})).failure
    assert failure is not None
    killed = "rank 1 died in stage 1, forward of microbatch 3: killed by SIGKILL"
    assert failure.message.startswith(killed)
    assert killed in run.report.read_text() and killed in run.summary.read_text()
    own = RankError(kind="ValueError", message="my bug")
    verdict(1, outcome=Outcome.CRASHED, error=own).save(run.verdict(1))
    failure = finish(run).failure
    assert failure is not None
    assert failure.message == "rank 1 died in stage 1, forward of microbatch 3: ValueError: my bug"
    marks[1].set(None)
    failure = finish(run).failure
    assert failure is not None and failure.message == "ValueError: my bug"


def test_a_damaged_mark_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "action"
    assert read_action(path) == ""
    for raw in (b"", b"F", b"Q" + bytes(16), b"\xff" * 17):
        path.write_bytes(raw)
        assert read_action(path) == ""


def test_a_users_error_comes_before_its_echo(run: RunDir) -> None:
    own = RankError(kind="ValueError", message="my bug")
    echo = RankError(kind="DistNetworkError", message="Connection reset by peer")
    verdict(1, outcome=Outcome.CRASHED, error=own, ended_at=6.0).save(run.verdict(1))
    verdict(0, outcome=Outcome.CRASHED, error=echo, ended_at=5.0).save(run.verdict(0))
    result = finish(run)
    assert result.failure is not None
    assert (result.failure.rank, result.failure.message) == (1, "ValueError: my bug")


def test_out_of_memory_and_interrupts_have_their_codes(run: RunDir) -> None:
    full = RankError(kind="OutOfMemoryError", message="CUDA out of memory")
    verdict(1, outcome=Outcome.OUT_OF_RESOURCES, error=full).save(run.verdict(1))
    assert finish(run).exit_code == 10
    assert finish(run, LaunchEnd(signal=2)).exit_code == 130


def test_a_word_in_a_message_does_not_make_it_an_echo(run: RunDir) -> None:
    own = RankError(kind="DataError", message="the data set failed: ConnectionResetError: x")
    verdict(1, outcome=Outcome.REFUSED_DATA, error=own).save(run.verdict(1))
    run.verdict(0).unlink()
    result = finish(run, ended({1: 4}))
    assert (result.outcome, result.exit_code) == (Outcome.REFUSED_DATA, 4)
    assert result.failure is not None and result.failure.rank == 1


def test_steps_of_a_run_that_was_cut_off_come_from_its_marks(run: RunDir) -> None:
    for rank, step in ((0, 27), (1, 26)):
        StepMark(run.step_mark(rank)).set(step)
        run.verdict(rank).unlink()
    result = finish(run, LaunchEnd(signal=15))
    assert (result.outcome, result.steps, result.failure) == (Outcome.PREEMPTED, 25, None)


def test_a_validation_loss_that_is_no_number_is_said_and_valid_json(run: RunDir) -> None:
    text = run.training.read_text().replace(",2.0\n", ",nan\n")
    run.training.write_text(text)
    result = finish(run)
    assert result.val_loss is None and "not finite" in result.notes[0]
    json.loads(run.result.read_text(), parse_constant=pytest.fail)


def test_a_bad_batch_is_listed_for_the_guilty_rank(run: RunDir) -> None:
    bad = {"outcome": Outcome.NAN, "bad_step": 7}
    verdict(0, **bad, bad_sample_ids=[1, 2]).save(run.verdict(0))
    verdict(1, **bad, bad_sample_ids=[3, 4], loss_was_finite=False).save(run.verdict(1))
    result = finish(run)
    assert (result.outcome, result.bad_step, result.bad_sample_ids) == (Outcome.NAN, 7, [3, 4])
    assert "step 7 was not finite" in run.summary.read_text()


def test_names_are_escaped(run: RunDir) -> None:
    evil = "<script>alert(1)</script>|x"
    plan = make_test_plan("launch.nproc=2", f"name='{evil}'")
    plan.save(run.plan)
    write_report(run)
    assert "<script>" not in run.report.read_text()
    assert "&lt;script&gt;" in run.report.read_text()
    assert "<script>" not in run.summary.read_text()


def test_a_run_without_a_result_or_with_half_a_line_is_shown(run: RunDir) -> None:
    with run.training.open("a") as file:
        file.write("21,0.2,0.")
    write_report(run)
    assert "no result yet" in run.report.read_text()
    run.training.unlink()
    for rank in (0, 1):
        run.steps(rank).unlink()
    write_report(run)
    assert "was recorded for this chart" in run.report.read_text()


def test_charts_break_where_values_do() -> None:
    chart = line_chart([Series("a", [(1, 1), (2, math.nan), (3, 2)], "c1")], Axes("x", "y"))
    assert chart.count("M") == 2 and "nan" not in chart.lower()
    assert len(thin([(float(n), 1.0) for n in range(5000)])) <= 400


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3) == [3]
