"""Runs of every version so far are reported, compared and swept over by this one."""

import shutil
from pathlib import Path

import pytest

from paceline import __version__
from paceline.compare import compare_sides, open_side
from paceline.errors import DataError, Outcome
from paceline.records import Audit, Env, Plan, Result
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord
from paceline.records.words import number
from paceline.report import write_report
from paceline.stats.figures import measure_run
from paceline.sweep.folder import SweepDir, load_manifest, save_manifest
from paceline.sweep.judge import judge_sweep
from paceline.sweep.outputs import write_outputs

RUNS = Path(__file__).parents[1] / "data" / "runs"
VERSIONS = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
SWEPT = [version for version in VERSIONS if (RUNS / version / "sweep").is_dir()]
EVERY_RUN = sorted(path.parent for path in RUNS.rglob("result.json"))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_every_version_before_this_one_is_here() -> None:
    _, minor, _ = numbers(__version__)
    assert {f"0.{number}.0" for number in range(1, minor)} <= set(VERSIONS)


@pytest.mark.parametrize("folder", EVERY_RUN, ids=lambda path: str(path.relative_to(RUNS)))
def test_a_report_is_written(folder: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(folder, tmp_path / "run"))
    write_report(run)
    result, page = Result.load(run.result), run.report.read_text()
    assert (result.outcome, result.steps) == (Outcome.OK, 8)
    # Up to 0.6 result.json left out a fixed number of steps; the page says so.
    fixed = numbers(folder.relative_to(RUNS).parts[0]) <= (0, 6, 0)
    assert result.window is not None and (result.window.warmup == "fixed") == fixed
    assert ("after a fixed warm-up" in page) == fixed
    assert number(result.tokens_per_s or 0.0) in page and page.count("<svg") >= 6
    plan = Plan.load(run.plan)
    assert plan.crew.world_size == plan.world_size and not plan.on_gpu
    assert plan.exchange.sent == (plan.state_bytes.gradients if plan.world_size > 1 else 0) or (
        plan.pipeline is not None
    )
    assert Env.load(run.env).host == "box"
    assert not run.audit.is_file() or Audit.load(run.audit).mismatches == []


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_are_compared_with_their_repeats_and_with_another_version(version: str) -> None:
    sides = [open_side(str(RUNS / version / name)) for name in ("ddp1", "ddp2")]
    sides.append(open_side(str(RUNS / VERSIONS[0] / "ddp1")))
    if version == VERSIONS[0]:
        del sides[-1]
    found = compare_sides(sides, None, 0.02)
    assert found.metric == "tokens_per_s"
    for side in found.sides:
        figures = measure_run(RunDir(Path(side.name)))
        assert figures is not None and side.values == [figures.tokens_per_s]
        assert side.windows == [f"training.csv, steps {figures.first_step} to 8"]
        assert side.tail_loss is not None and side.peak_bytes


@pytest.mark.parametrize("version", SWEPT)
def test_a_sweep_is_told_again(version: str, tmp_path: Path) -> None:
    folder = SweepDir(shutil.copytree(RUNS / version / "sweep", tmp_path / "sweep"))
    record, rows = SweepRecord.load(folder.record), load_manifest(folder.manifest)
    assert len(rows) == 4 and {row["status"] for row in rows} == {"success"}
    write_outputs(folder, record, rows, judge_sweep(record, folder, rows))
    summary = folder.summary.read_text()
    assert all(cell.name in summary for cell in record.cells)
    # What an old manifest says is kept when rows of this version are added.
    before = folder.manifest.read_text().splitlines()[0].split("\t")
    save_manifest(folder.manifest, rows)
    after = folder.manifest.read_text().splitlines()[0].split("\t")
    assert set(before) <= set(after) and load_manifest(folder.manifest) == rows
    side = open_side(f"{folder.root}:{record.cells[0].name}")
    assert len(side.runs) == 2


def test_what_a_newer_version_wrote_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    newer = Result.SCHEMA + 1
    path.write_text(f'{{"schema": {newer}}}')
    with pytest.raises(DataError, match=f"has schema {newer}.*\nhint: read it with the version"):
        Result.load(path)
    path.write_text('{"schema": 2}')
    with pytest.raises(DataError, match="is damaged"):
        Result.load(path)
