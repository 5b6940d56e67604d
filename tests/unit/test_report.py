"""Reports from run directories alone: finished, failed, still running, and hostile names."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from paceline.compare import Side, compare_sides
from paceline.errors import Outcome
from paceline.launch.ending import LaunchEnd
from paceline.records import BestMetric, Overlap, RankError, Result
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.report.plots import Axes, Series, line_chart, smooth, stacked_bars, thin, ticks
from paceline.schedules.actions import Action, Kind
from paceline.stats.figures import measure_run
from paceline.stats.stability import explain_spread
from paceline.train.heartbeat import ActionMark, StepMark, read_action
from tests.machines import plan as make_test_plan
from tests.reported import ended, finish, verdict, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "run")


def test_a_finished_run(run: RunDir) -> None:
    result = finish(run)
    assert (result.outcome, result.exit_code, result.steps) == (Outcome.OK, 0, 20)
    assert result.final_loss == pytest.approx(0.25) and result.val_loss == 2.0
    assert result.window is not None and (result.window.first_step, result.window.last_step) == (
        2,
        20,
    )
    # 32 samples/s of 1 GFLOP over 2 ranks.
    assert result.tflops_per_rank == pytest.approx(0.016)
    assert result.mfu is None and "no stated peak" in result.mfu_note
    assert result.peak_reserved_bytes == 2**21
    page, summary = run.report.read_text(), run.summary.read_text()
    for text in ("4,096", "training.csv, steps 2 to 20", "rank 1", "byte-unigram entropy"):
        assert text in page and text in summary
    cards = page.partition("<h2>Plan</h2>")[0]
    assert cards.count("steps 2 to 20") == 1, "the window is said once, not on every card"
    assert "samples/s" not in cards, "a job in tokens has one rate"
    assert page.count('class="tile"') == 5


def test_why_a_run_is_not_steady_is_said_once(run: RunDir) -> None:
    calm = finish(run).stability
    assert calm is not None and not calm.problems
    assert "p90/p50 1.00; drift +0.0%" in run.summary.read_text()
    result = Result.load(run.result)
    unrest = calm.model_copy(update={"p90_over_p50": 1.78, "problems": [explain_spread(1.78)]})
    result.model_copy(update={"stability": unrest}).save(run.result)
    write_report(run)
    summary = run.summary.read_text()
    assert "step time p90/p50 is 1.78; drift" in summary and summary.count("p90/p50") == 1


def test_exposed_communication_is_that_of_the_last_rank(run: RunDir) -> None:
    """Rank 0 came early and waited for rank 1: that is no time of the exchange."""
    for rank, seconds in ((0, 0.075), (1, 0.010)):
        made = {"rank": rank, "step": 3, "communication_s": seconds, "exposed_s": seconds}
        Overlap(**made, compute_s=0.1).save(run.overlap(rank))
    finish(run)
    expected = "| exposed communication | 10 ms | of 10 ms in collectives, on rank 1 in step 3 |"
    assert expected in run.summary.read_text()


def test_metrics_have_a_row_and_a_chart_and_an_early_end_its_reason(run: RunDir) -> None:
    head, *lines = run.training.read_text().splitlines()
    cells = {10: ("0.5", "0.6"), 20: ("0.7", "0.55")}
    more = [f"{line},{','.join(cells.get(n, ('', '')))}" for n, line in enumerate(lines, 1)]
    named = f"{head},train/accuracy,val/accuracy"
    run.training.write_text("\n".join([named, *more]) + "\n")
    run.config.write_text("train: {log_every: 5, best: 'val/accuracy:max'}\n")
    for rank in (0, 1):
        verdict(rank, why_early="val/accuracy has not improved").save(run.verdict(rank))
    result = finish(run)
    assert result.metrics == {"train/accuracy": 0.7, "val/accuracy": 0.55}
    assert result.best == BestMetric(step=10, name="val/accuracy", value=0.6)
    assert result.why_early == "val/accuracy has not improved"
    page, summary = run.report.read_text(), run.summary.read_text()
    row = "| val/accuracy | 0.55 | training 0.7; best 0.6 at step 10 |"
    assert row in summary and "val/accuracy has not improved" in summary
    assert "<h2>accuracy</h2>" in page
    assert "train/accuracy: from 0.5 at step 10 to 0.7 at 20" in page
    assert "val/accuracy has not improved" in page


def test_the_loss_is_one_chart_with_switches_that_need_no_script(run: RunDir) -> None:
    lines = run.training.read_text().splitlines()
    val = [f"{line}{1.5 if n in (5, 10, 15) else ''}" for n, line in enumerate(lines)]
    run.training.write_text("\n".join(val) + "\n")
    finish(run)
    page = run.report.read_text()
    hero = page[page.index('class="card hero"') : page.index('class="charts"')]
    assert hero.count('type="checkbox"') == 2 and hero.count("<label") == 2
    assert {"linear", "log", "seen"} == set(re.findall(r'<svg class="(\w+)"', hero))
    # Steps 5, 10, 15 and 20: a line with four dots, on either axis.
    for line in re.findall(r'<path class="line c2" d="([^"]+)"', hero):
        assert (line.count("M"), line.count("L")) == (1, 3)
    assert [d.count("h0") for d in re.findall(r'<path class="dots c2" d="([^"]+)"', hero)] == [4, 4]
    assert '<g class="raw">' in hero and '<g class="smooth">' in hero and "<desc>training" in hero
    assert re.search(r"<title>step 20: training 0\.25, training, mean of 7 steps [\d.]+,", hero)


def test_a_loss_that_has_no_logarithm_has_no_log_axis(run: RunDir) -> None:
    run.training.write_text(run.training.read_text().replace("\n20,0.25", "\n20,-0.25"))
    write_report(run)
    page = run.report.read_text()
    assert '<label for="smooth"' in page and '<label for="log"' not in page
    assert 'class="ys log"' not in page


TELEMETRY = (
    "time,source,utilisation_percent,memory_bytes,clock_mhz,power_w,temperature_c,rss_bytes\n"
)


def test_memory_is_that_of_all_ranks(run: RunDir) -> None:
    for rank, source in ((0, "host,50,9999999999"), (1, "rank,,")):
        rows = [f"{100 + s},{source},,,,{(rank + 1) * s * 2**20}\n" for s in range(1, 6)]
        run.telemetry_of(rank).write_text(TELEMETRY + "".join(rows))
    finish(run)
    figures = re.findall(r"<figcaption>([^<]+)<span>([^<]*)", run.report.read_text())
    assert figures[:2] == [("rank 0", "at most 5 MiB"), ("rank 1", "at most 10 MiB")]


def test_memory_of_many_ranks_is_a_band(run: RunDir) -> None:
    make_test_plan("launch.nproc=12", "name=fixture").save(run.plan)
    for rank in range(12):
        rows = [f"{100 + s},rank,,,,,,{(rank + 1) * 2**30}\n" for s in range(3)]
        run.telemetry_of(rank).write_text(TELEMETRY + "".join(rows))
    write_report(run)
    page = run.report.read_text()
    assert "median of 12, between the least and the most" in page
    assert page.count('<path class="band c1"') == 1 and "at most" not in page


def test_a_gpus_memory_and_utilisation_are_drawn(run: RunDir) -> None:
    plan = make_test_plan("launch.nproc=2", "name=fixture")
    device = plan.device.model_copy(update={"value": "cuda"})
    plan.model_copy(update={"device": device}).save(run.plan)
    sources = (f"host,5,1,,,,{2**20}", f"gpu0,93,{2**30},,,,", f"gpu1,7,{2**31},,,,")
    rows = [f"{100 + s},{source}\n" for s in range(3) for source in sources]
    run.telemetry.write_text(TELEMETRY + "".join(rows))
    write_report(run)
    page = run.report.read_text()
    captions = re.findall(r"<figcaption>(gpu\d)<span>([^<]*)", page)
    assert captions == [("gpu0", "at most 1 GiB"), ("gpu1", "at most 2 GiB")]
    assert "seconds 0: gpu0 93, gpu1 7" in page


def test_train_report_and_compare_tell_one_rate_from_one_window(run: RunDir) -> None:
    """The slow steps 1 to 8 are more than `observe.warmup_steps` marks: 12 of 0.5 s are left."""
    slow = {f"{s},{5 / s},0.1,1.5,0.5,32,": f"{s},{5 / s},0.1,1.5,2,8," for s in range(1, 9)}
    text = run.training.read_text()
    for before, after in slow.items():
        text = text.replace(f"\n{before}", f"\n{after}")
    run.training.write_text(text)
    result, figures = finish(run), measure_run(run)
    assert figures is not None and str(result.window) == str(figures.window)
    assert str(result.window) == "training.csv, steps 9 to 20"
    assert result.samples_per_s == figures.samples_per_s == 32
    assert result.steps_per_s == 2 and result.step_s is not None and result.step_s.p90 == 0.5
    side = compare_sides([Side("a", [run], []), Side("b", [run], [])], "samples_per_s", 0.02)
    assert (side.sides[0].value, side.sides[0].windows) == (32, [str(result.window)])
    assert "Speed is of training.csv, steps 9 to 20," in run.summary.read_text()


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
    assert result.bad_ranks == [1]
    assert "step 7 was not finite" in run.summary.read_text()


def test_names_are_escaped(run: RunDir) -> None:
    evil = "<script>alert(1)</script>|x"
    plan = make_test_plan("launch.nproc=2", f"name='{evil}'")
    plan.save(run.plan)
    write_report(run)
    assert "<script>" not in run.report.read_text()
    assert "&lt;script&gt;" in run.report.read_text()
    assert "<script>" not in run.summary.read_text()


def test_a_loss_of_an_earlier_step_says_so(run: RunDir) -> None:
    """Ranks ended after step 20, and one took the rows from 17 on with it."""
    run.training.write_text("".join(run.training.read_text().splitlines(keepends=True)[:17]))
    result = finish(run)
    assert (result.steps, result.final_loss, result.final_loss_step) == (20, 5 / 16, 16)
    assert "| loss | 0.3125 | of step 16 |" in run.summary.read_text()
    assert "of step 16" in run.report.read_text()


def test_a_run_that_was_killed_has_the_figures_of_its_files(run: RunDir) -> None:
    """Neither it nor its supervisor could write a result: training.csv has 20 steps of 0.5 s."""
    write_report(run)
    said = run.summary.read_text()
    assert "| last step | 20 | of 200 planned |" in said
    assert "| loss | 0.2500 | validation 2.0000 |" in said  # 5 / 20
    assert "| throughput | 4,096 tokens/s | step p50 500 ms; p90 500 ms |" in said
    assert "Speed is of training.csv, steps 2 to 20" in said
    resume = f"paceline train --resume {run.root}"
    assert (
        f"| to resume it | {resume} | if it runs no more; from step 1, as it has no checkpoint |"
        in said
    )
    assert resume in run.report.read_text() and "0.2500" in run.report.read_text()
    run.checkpoint_log.write_text(
        "step,reason,mode,state,num_bytes,stall_s,duration_s,outcome,error\n"
        "10,every,async,full,100,0.1,0.2,ok,\n"
    )
    write_report(run)
    assert "if it runs no more; from its checkpoint of step 10" in run.summary.read_text()


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
    (line,) = re.findall(r'class="line c1" d="([^"]+)"', chart)
    assert line.count("M") == 2 and "nan" not in chart.lower()


def test_a_long_line_is_thinned_and_a_spike_in_it_is_still_seen() -> None:
    points = [(float(n), 100.0 if n == 777 else 1.0) for n in range(5000)]
    made = thin(Series("a", points, "c1"))
    assert len(made.points) <= 400 and max(y for _, y in made.points) < 10
    assert max(high for _, _, high in made.band) == 100 and min(low for _, low, _ in made.band) == 1


def test_smoothing_keeps_a_straight_line_and_needs_numbers() -> None:
    straight = 2.0 * np.arange(100)
    line, num_steps = smooth(straight)
    assert num_steps == 7 and line[50] == 100.0
    assert line[0] == 3.0, "the mean of steps 0 to 3"
    assert smooth(straight[:10])[1] == 0
    assert smooth(np.append(straight, math.nan))[1] == 0


def test_bars_of_many_ranks_are_the_slowest_and_the_fastest() -> None:
    rows = {f"rank {n}": {"forward": 1.0 + n, "comm": 0.0} for n in range(40)}
    made = stacked_bars(rows)
    shown = re.findall(r"<span>rank (\d+)</span>", made)
    assert shown == [str(n) for n in (*range(39, 31, -1), *range(7, -1, -1))]
    assert "<span>comm</span>" not in made, "a phase that took no time has no colour to explain"


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3) == [3]
    assert ticks(-1.7e308, 1.7e308) == [-1.7e308], "the span is too large for a float"
