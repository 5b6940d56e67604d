"""A run with a pipeline: what conclude measures of it, and what its pages and timeline.json say."""

import json
import re
from pathlib import Path

import pytest

from paceline.job import load_job
from paceline.launch.archive import archive_rank, begin_attempt
from paceline.launch.ending import LaunchEnd, judge_end
from paceline.machine.topology import RankId
from paceline.records import Plan, Result
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.run.conclude import Circumstances, conclude
from paceline.schedules.actions import Action, Kind
from paceline.schedules.orders import draw_schedule
from paceline.schedules.requirements import AUTO_STAGES
from paceline.schedules.timeline import Times
from paceline.train.heartbeat import read_action
from paceline.train.worker import RankRun
from tests.machines import machine
from tests.machines import plan as make_test_plan
from tests.pipelined import plan_of, write_run
from tests.reported import verdict

SLOW_LINK = Times([0.002, 0.002, 0.002, 0.003], 0.0025, 0.002, transfer_s=0.0008)


def piped(folder: Path, name: str, times: Times | None) -> tuple[RunDir, Result]:
    """A finished run of 4 ranks; without times its passes were never written."""
    schedule = draw_schedule(name, 4, 8)
    update = {"pipeline": plan_of(schedule, AUTO_STAGES[name])}
    plan = make_test_plan("launch.nproc=4", "name=piped").model_copy(update=update)
    run = RunDir.create("r", folder / "run")
    plan.save(run.plan)
    machine().save(run.env)
    run.config.write_text("name: piped\n")
    for rank in range(4):
        run.rank(rank).mkdir(parents=True)
        verdict(rank).save(run.verdict(rank))
    if times is not None and plan.pipeline is not None:
        write_run(run, plan.pipeline, times)
    return run, finish(run, plan)


def finish(run: RunDir, plan: Plan) -> Result:
    ending = judge_end(run, plan.world_size, LaunchEnd())
    known = Circumstances(ending, "c", "k", {}, 1.0, 11.0)
    result = conclude(run, plan, machine(), known)
    result.save(run.result)
    write_report(run)
    return Result.load(run.result)


def test_the_measured_pass_is_drawn_above_the_simulated_one(tmp_path: Path) -> None:
    run, result = piped(tmp_path, "1f1b", SLOW_LINK)
    facts = result.pipeline
    assert facts is not None and facts.num_passes == 4
    page = run.report.read_text()
    headings = re.findall(r'class="heading"[^>]*>([^<:]+):', page)
    assert headings == [
        f"measured, step {facts.step}",
        "simulated with the same stages, transfers free",
    ]
    assert "http" not in page and "<script" not in page
    assert ".gantt rect.pass" in page, "the chart's own style sheet is in the page"
    for cell in ("4 / 4", "3 / 3", "2 / 2", "1 / 1", "4 MiB"):
        assert re.search(rf"<td [^>]*>{cell}</td>", page)
    first = json.loads(run.timeline.read_text())["traceEvents"][0]
    assert (first["ph"], first["name"], first["args"]) == ("M", "process_name", {"name": "rank 0"})


def test_where_it_loses_against_its_formula_it_says_why(tmp_path: Path) -> None:
    run, result = piped(tmp_path, "1f1b", SLOW_LINK)
    assert result.pipeline is not None and result.pipeline.idle > 3 / 11 + 0.03
    for text in (run.report.read_text(), run.summary.read_text()):
        assert "The formula, (P-1)/(M+P-1), says 27.3%" in text
        # Stage 3 takes 3 + 4.5 ms, the others 2 + 4.5: 7.5 / 6.75 = 1.11
        assert "points more than the formula" in text and "the slowest takes 1.11 times" in text
        assert re.search(r"[\d.]+ points are transfers \(800 µs where a rank sat waiting", text)


def test_a_pipeline_that_keeps_its_promise_is_not_explained_away(tmp_path: Path) -> None:
    run, result = piped(tmp_path, "1f1b", Times(0.002, 0.002, 0.002))
    assert result.pipeline is not None
    assert "Ranks were idle 27.3% of the pass" in run.summary.read_text()
    assert "more than the formula" not in run.summary.read_text()


@pytest.mark.parametrize("damage", ["absent", "half a line"])
def test_without_passes_a_note_says_so(damage: str, tmp_path: Path) -> None:
    run, result = piped(tmp_path, "1f1b", None if damage == "absent" else SLOW_LINK)
    if damage == "half a line":
        run.passes(2).write_text(run.passes(2).read_text()[:-9])
        run.timeline.unlink()
        result = finish(run, Plan.load(run.plan))
    assert result.pipeline is None
    assert "no pass of the pipeline was measured on all its ranks" in result.notes
    assert "<h2>Pipeline</h2>" not in run.report.read_text() and not run.timeline.exists()


def test_the_next_attempt_does_not_find_the_passes_of_the_last(tmp_path: Path) -> None:
    run, _ = piped(tmp_path, "1f1b", SLOW_LINK)
    archive_rank(run, 1, 2)
    assert not run.passes(2).exists()
    assert (run.past_attempt(1) / "ranks" / "rank2" / run.passes(2).name).is_file()


@pytest.mark.parametrize("has_pipeline", [True, False])
def test_only_ranks_of_a_pipeline_mark_their_actions(has_pipeline: bool, tmp_path: Path) -> None:
    run, _ = piped(tmp_path, "1f1b", None)
    begin_attempt(run, resume=False)
    plan = Plan.load(run.plan)
    plan = plan if has_pipeline else plan.model_copy(update={"pipeline": None})
    rank = RankRun(load_job("lm_tiny", []), plan, run, RankId(2, 2, 4))
    with rank._observed():
        rank.clock.on_action(Action(Kind.INPUT, 2, 5))
        seen = read_action(run.action_mark(2))
        rank.clock.on_action(None)
    assert seen == ("stage 2, backward of the inputs of microbatch 5" if has_pipeline else "")
    assert read_action(run.action_mark(2)) == ""
    assert run.action_mark(2).exists() == has_pipeline
