"""A run directory as numbers: rates, windows, timing points."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.records import Attempt
from paceline.records.rundir import RunDir
from paceline.stats.figures import METRICS, RunFigures, measure_run
from tests.machines import plan
from tests.reported import HEADER, STEPS_HEADER


def write_run(folder: Path, step_s: Sequence[float], *, compile: str = "off") -> RunDir:
    """A run of 8 samples and 80 tokens a step; in each step 10 ms of data, 20 forward, 30 backward
    and `step` ms of optimizer; the loss of step n is 1 / n."""
    run = RunDir.create("r", folder / "run")
    run.config.write_text("train:\n  log_every: 5\n")
    plan(f"train.compile={compile}").save(run.plan)
    run.rank(0).mkdir(parents=True)
    training, steps = [HEADER], [STEPS_HEADER]
    for n, seconds in enumerate(step_s, 1):
        rates = f"{8 / seconds!r},{80 / seconds!r}"
        training.append(f"{n},{1 / n},0.1,1,{seconds!r},{rates},0,{int(n <= 5)},\n")
        steps.append(f"{n},0,{seconds!r},0.01,0.02,0.03,{n / 1000},0.5,0.1,0\n")
    run.training.write_text("".join(training))
    run.steps(0).write_text("".join(steps))
    return run


def measured(run: RunDir) -> RunFigures:
    figures = measure_run(run)
    assert figures is not None
    return figures


def test_rates_are_work_over_time(tmp_path: Path) -> None:
    """After the first step: 30 steps of 0.1 s and one of 1 s, 31 * 8 samples in 4 s = 62."""
    figures = measured(write_run(tmp_path, [5.0, *[0.1] * 20, 1.0, *[0.1] * 10]))
    assert (figures.first_step, figures.last_step) == (2, 32)
    assert figures.samples_per_s == pytest.approx(62)
    assert figures.tokens_per_s == pytest.approx(620)
    assert figures.num_compile_steps == 0  # the plan compiles nothing: the slow step counts
    assert (figures.step_s_p50, figures.step_s_p90) == (pytest.approx(0.1), pytest.approx(0.1))


def test_compile_steps_are_set_apart(tmp_path: Path) -> None:
    """5 s and 1 s less a usual step each: 4.9 + 0.9 = 5.8 s beyond. 8 samples in 0.1 s = 80."""
    slow = [5.0, *[0.1] * 20, 1.0, *[0.1] * 10]
    figures = measured(write_run(tmp_path, slow, compile="default"))
    assert figures.num_compile_steps == 2
    assert figures.compile_s == pytest.approx(5.8)
    assert figures.samples_per_s == pytest.approx(80)


def test_the_tail_is_as_many_points_as_are_asked_for(tmp_path: Path) -> None:
    """The last two are at 235 and 240: 60 + (185.5 + 190.5) / 2 = 248."""
    figures = measure_run(write_run(tmp_path, [0.1] * 240), tail_points=2)
    assert figures is not None and figures.tail_points_used == 2
    assert figures.tail_mean_iter_p50_ms == pytest.approx(248)


MIB = 2**20
GROWTHS = {
    "a leak": (lambda n: 1000 + n, True),  # 60 MiB a minute
    "noise": (lambda n: 1000 + 40 * (n % 3), False),
    "one jump": (lambda n: 1000 + 500 * (n > 130), False),
    "none": (lambda n: 1000, False),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_memory_that_grows_is_a_leak(name: str, tmp_path: Path) -> None:
    """240 samples, one a second: of the last 192 the median of 19 at each end, 173 s apart."""
    size, is_leak = GROWTHS[name]
    run = write_run(tmp_path, [0.1] * 40)
    head = "time,source,utilisation_percent,memory_bytes,clock_mhz,power_w,temperature_c,rss_bytes"
    rows = [f"{n},gpu0,,{size(n) * MIB},,,,\n{n},host,,,,,,{500 * MIB}\n" for n in range(240)]
    run.telemetry.write_text(head + "\n" + "".join(rows))
    figures = measured(run)
    assert {growth.name for growth in figures.growth} == {"GPU 0", "rank 0"}
    assert bool(figures.unrest) == is_leak
    if is_leak:
        assert figures.unrest == ["memory grows: GPU 0 +60.0 MiB a minute, +173 MiB in all"]


def test_a_single_run_has_gates(tmp_path: Path) -> None:
    slow = measured(write_run(tmp_path, [0.1, 0.1, 0.1, 0.2] * 30))
    assert slow.unrest == ["step time p90/p50 is 2.00"] and slow.growth == ()
    late = measured(write_run(tmp_path / "late", [0.1 + 0.0005 * n for n in range(120)]))
    assert any("slower at the end of the window" in why for why in late.unrest)


def test_timing_points_are_running_medians(tmp_path: Path) -> None:
    """iter of step n = 10 + 20 + 30 + n ms, without evaluation. Points at 5, 10, ..., 240.
    Up to step 100 the median of n is that of 1..s, (s + 1) / 2; then of s-99..s, s - 49.5. The last
    20 points are at 145, ..., 240: their mean is 60 + (95.5 + 190.5) / 2 = 203, and 20 numbers that
    are 5 apart have the sample deviation 5 * sqrt(20 * 21 / 12) = 29.58."""
    figures = measured(write_run(tmp_path, [0.1] * 240))
    assert [point.step for point in figures.points] == list(range(5, 241, 5))
    first, last = figures.points[0], figures.points[-1]
    assert first.iter_ms_p50 == pytest.approx(63)
    assert last.phases_ms_p50 == pytest.approx(
        {"data_wait": 10, "fwd": 20, "bwd": 30, "comm": 0, "step": 190.5}
    )
    assert figures.tail_points_used == 20
    assert figures.tail_mean_iter_p50_ms == pytest.approx(203)
    assert figures.tail_std_iter_p50_ms == pytest.approx(5 * math.sqrt(35))
    assert figures.value("tail_mean_iter_p50_ms") == figures.tail_mean_iter_p50_ms
    # the other 28: 20 up to step 100, with mean 60 + (3 + 50.5) / 2, and 8 from 105 to 140, 60 + 73
    whole = (20 * 203 + 20 * 86.75 + 8 * 133) / 48
    assert figures.all_mean_iter_p50_ms == pytest.approx(whole)


def test_a_pipeline_that_waits_is_not_faster_for_it(tmp_path: Path) -> None:
    """100 ms a step: 5 of data, 15 forward, 20 backward, 55 waiting for other stages, 5 optimizer.
    Without the phase `comm` it would count as 45."""
    run = write_run(tmp_path, [0.1] * 10)
    header = "step,warmup,wall_s,data_s,forward_s,backward_s,comm_s,optimizer_s,unaccounted_s\n"
    rows = [f"{n},0,0.1,0.005,0.015,0.02,0.055,0.005,0\n" for n in range(1, 11)]
    run.steps(0).write_text(header + "".join(rows))
    assert measured(run).tail_mean_iter_p50_ms == pytest.approx(100)


def test_one_point_has_no_deviation(tmp_path: Path) -> None:
    figures = measured(write_run(tmp_path, [0.1] * 7))
    assert (figures.tail_points_used, figures.tail_std_iter_p50_ms) == (1, 0.0)


def test_no_point_no_figure(tmp_path: Path) -> None:
    figures = measured(write_run(tmp_path, [0.1] * 4))
    assert (figures.tail_mean_iter_p50_ms, len(figures.points)) == (None, 0)
    assert figures.samples_per_s == pytest.approx(80)


def test_tail_loss_is_that_of_the_last_fifth(tmp_path: Path) -> None:
    """Of 30 steps the last 6; of 10 the last 5."""
    figures = measured(write_run(tmp_path / "a", [0.1] * 30))
    assert figures.tail_loss == pytest.approx(sum(1 / n for n in range(25, 31)) / 6)
    assert len(figures.losses) == 30
    figures = measured(write_run(tmp_path / "b", [0.1] * 10))
    assert figures.tail_loss == pytest.approx(sum(1 / n for n in range(6, 11)) / 5)


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [*[9.0] * 20, *[0.1] * 20])
    Attempt(number=2, resume=True, started_at=100.0, first_step=21, last_step=40).save(run.attempt)
    figures = measured(run)
    assert figures.first_step == 22
    assert figures.samples_per_s == pytest.approx(80)
    assert figures.points[0].step == 25
    assert len(figures.losses) == 40


def test_startup_from_heartbeats(tmp_path: Path) -> None:
    """Step 11 begins 1 s after step 1. The beat at 107.05 fell into it, so step 1 began before
    106.05; the beat at 105.95 fell into step 1."""
    run = write_run(tmp_path, [0.1] * 20)
    Attempt(number=1, resume=False, started_at=100.0, first_step=1, last_step=20).save(run.attempt)
    beats = [(90.0, 1), (103.0, 0), (105.95, 1), (107.05, 11)]  # the first is of another attempt
    lines = [json.dumps({"time": time, "step": step}) + "\n" for time, step in beats]
    run.heartbeat(0).write_text("".join(lines) + '{"time": 1')
    assert measured(run).startup_s == pytest.approx(5.95)


def test_nothing_to_measure(tmp_path: Path) -> None:
    assert measure_run(write_run(tmp_path / "a", [])) is None
    assert measure_run(write_run(tmp_path / "b", [0.1])) is None
    run = RunDir.create("r", tmp_path / "c")
    run.config.write_text("train:\n  log_every: 5\n")
    assert measure_run(run) is None


def test_metrics_are_figures() -> None:
    assert set(METRICS) <= set(RunFigures.__dataclass_fields__)
