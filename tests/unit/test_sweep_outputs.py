"""The output files of a sweep: exact columns, hostile names, nothing done, phases."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.sweep_talk import _say_answer
from paceline.config.load import read_draft
from paceline.records.swept import SweepRecord, SweptPhase
from paceline.records.words import size
from paceline.report.sweep_plots import front, staircase
from paceline.stats.figures import Course
from paceline.sweep.flow import SweepEnd
from paceline.sweep.folder import Row, SweepDir
from paceline.sweep.judge import SweepJudgement
from paceline.sweep.outputs import tell, write_outputs
from tests.sweeps import draw_cell, draw_figures, draw_record, draw_row, draw_sweep, judge_rows

SETTINGS = (
    "zero_stage,micro_batch,world_size,global_batch,deterministic,log_every_steps,"
    "validation_every_steps,checkpoint_every_steps,num_workers,prefetch_factor,"
    "dataset_manifest_path,timing_rank_scope,precision_mode_req,precision_mode_effective,attn_impl_req,attn_impl_effective,"
    "torch_compile_enabled,gpu_name,gpu_cc"
)
TAIL = "tail_mean_iter_p50_ms"
HEADERS = {
    "per_run_metrics.csv": f"mode,group,repeat,{SETTINGS},timing_points,tail_points_used,"
    "last_step,last_iter_p50_ms,last_fwd_p50_ms,last_bwd_p50_ms,tail_mean_iter_p50_ms,"
    "tail_std_iter_p50_ms,all_mean_iter_p50_ms,all_std_iter_p50_ms,tail_steps_per_sec,"
    "tail_samples_per_sec,phase,run_dir,samples_per_s,tokens_per_s,window_first_step,"
    "window_last_step,num_compile_steps,compile_s,step_s_p50,step_s_p90,p90_over_p50,drift,"
    "standard_error,peak_bytes,startup_s,tail_loss,final_loss",
    "timing_points.csv": "mode,group,repeat,index,step,data_wait_ms_p50,fwd_ms_p50,"
    "bwd_ms_p50,comm_ms_p50,step_ms_p50,iter_ms_p50,train_log",
    "group_summary.csv": f"group,mode,runs,{SETTINGS},{TAIL}_mean,{TAIL}_std,{TAIL}_min,"
    f"{TAIL}_max,tail_steps_per_sec_mean,tail_steps_per_sec_std,tail_samples_per_sec_mean,"
    "tail_samples_per_sec_std,speedup_vs_baseline,verdict,is_winner,metric,value,low,high,"
    "speedup,speedup_low,speedup_high,runs_compared,variation,peak_bytes,p90_over_p50,drift,"
    "tail_loss,flagged",
    "skipped_runs.tsv": "mode,group,repeat,reason,run_dir,train_log,phase,outcome,exit_code,"
    "last_step,detail".replace(",", "\t"),
}
HEADERS["ranked_groups.csv"] = HEADERS["group_summary.csv"]
OTHERS = ("best_config.json", "best_overrides.txt", "summary.md", "report.html")
Sweep = tuple[SweepDir, SweepRecord, list[Row], SweepJudgement]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    made = draw_sweep(tmp_path / "sweep")
    write_outputs(*made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> SweepDir:
    made = SweepDir(tmp_path / "sweep")
    made.runs.mkdir(parents=True)
    return made


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def best_of(folder: SweepDir) -> dict[str, object]:
    found: dict[str, object] = json.loads(folder.best.read_text(), parse_constant=pytest.fail)
    return found


@pytest.mark.parametrize(("num_failed", "said"), [(1, "1 run failed"), (2, "2 runs failed")])
def test_failures_are_counted_in_words(sweep: Sweep, num_failed: int, said: str) -> None:
    folder, record, rows, judged = sweep
    end = SweepEnd(record, judged, "", num_failed)
    lines = _say_answer(end, tell(folder, record, rows, judged))
    assert lines[-1] == f"{said}: see skipped_runs.tsv"


@pytest.mark.parametrize("name", HEADERS)
def test_columns_stand_in_the_order_that_is_documented(sweep: Sweep, name: str) -> None:
    assert (sweep[0].root / name).read_text().splitlines()[0] == HEADERS[name]


def test_a_row_of_numbers(sweep: Sweep) -> None:
    folder, _, _, _ = sweep
    first = read_table(folder.per_run)[0]
    # 8 samples a step at 100 samples/s: 80 ms.
    assert (first["tail_mean_iter_p50_ms"], first["tail_steps_per_sec"]) == ("80", "12.5")
    assert first["tail_samples_per_sec"] == first["samples_per_s"] == "100"
    assert first["gpu_name"] == first["tokens_per_s"] == "n/a", "what the workload lacks"
    point = read_table(folder.points)[1]
    assert (point["index"], point["step"], point["iter_ms_p50"]) == ("1", "40", "80")
    assert point["train_log"].endswith("_r1/train.log")


def test_groups_in_the_order_of_the_standings(sweep: Sweep) -> None:
    folder, _, _, judgement = sweep
    ranked, drawn = read_table(folder.ranked), read_table(folder.groups)
    assert judgement.standings is not None
    assert [row["group"] for row in ranked] == [r.group.name for r in judgement.standings.rows]
    assert sorted(map(str, ranked)) == sorted(map(str, drawn)) and ranked != drawn
    best, base = ranked[0], drawn[0]
    assert (best["verdict"], best["is_winner"], base["is_winner"]) == ("faster", "true", "false")
    assert float(best["low"]) < float(best["value"]) < float(best["high"])
    # The iteration of 16 samples takes longer than the baseline's of 8: slower by the old column.
    assert float(best["speedup_vs_baseline"]) < 1 < float(best["speedup_low"])
    assert best["runs"] == best["runs_compared"] == "3"
    assert [row["group"] for row in ranked if row["flagged"]] == [*judgement.flagged]


def test_what_was_left_out_and_why(sweep: Sweep) -> None:
    rows = read_table(sweep[0].skipped)
    assert [row["reason"] for row in rows] == ["refused"] * 2 + ["run_failed"] * 4
    assert "does not fit" in rows[0]["detail"] and rows[0]["run_dir"] == "n/a"
    assert (rows[2]["outcome"], rows[2]["exit_code"], rows[2]["last_step"]) == (
        "crashed",
        "5",
        "17",
    )


def test_a_success_without_figures_says_what_is_missing(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0"]})
    rows = [draw_row(folder, record.cells[0].name, repeat) for repeat in (1, 2)]
    folder.run(rows[0]).train_log.unlink()
    write_outputs(folder, record, rows, judge_rows(record, rows, {}))
    reasons = [row["reason"] for row in read_table(folder.skipped)]
    assert reasons == ["train_log_missing", "no_timing_points"]


def test_the_best_is_pasteable(sweep: Sweep) -> None:
    folder, record, _, _ = sweep
    line = folder.best_overrides.read_text()
    assert line.count("\n") == 1 and "train.steps" not in line
    words = shlex.split(line)
    assert words[:2] == ["train.grad_accum=1", "strategy.name=ddp"]
    assert not read_draft(record.recipe, words).problems
    best = best_of(folder)
    assert best["overrides"] == words and best["verdict"] == "faster"
    assert best["fingerprints"] == {
        "config_fingerprint": "c0", "code_fingerprint": "k0", "data_fingerprint": "d0",
        "hardware_fingerprint": "h0",
    }  # fmt: skip
    assert f"paceline train lm_tiny {line.strip()}" in folder.summary.read_text()


def test_what_won_of_a_class_is_a_call_from_python(tmp_path: Path) -> None:
    folder, record, rows, judgement = draw_sweep(tmp_path / "sweep")
    record = record.model_copy(update={"recipe": "python:Cell"})
    write_outputs(folder, record, rows, judgement)
    told = folder.summary.read_text()
    words = shlex.split(folder.best_overrides.read_text())
    assert f"paceline.train(Cell, {', '.join(map(repr, words))})" in told
    assert "paceline train" not in told
    assert "paceline.train(Cell, " in folder.report.read_text()


def test_hostile_names_stay_text(folder: SweepDir) -> None:
    evil = "<script>alert('1')</script>|`x`\t$(rm -rf .) \"q\", [z](http://x)"
    cell = draw_cell({"name": evil})
    record = draw_record({"name": [evil]}, cells=[cell], overrides=["run.name=it's; rm -rf /"])
    rows = [draw_row(folder, cell.name, 1)]
    judgement = judge_rows(record, rows, {rows[0]["run_dir"]: draw_figures(10.0)})
    judgement = replace(judgement, flagged={}, notes=[evil])
    write_outputs(folder, record, rows, judgement)
    assert shlex.split(folder.best_overrides.read_text()) == [*record.overrides, f"name={evil}"]
    assert read_table(folder.groups)[0]["group"] == " ".join(cell.name.split())
    page, summary = folder.report.read_text(), folder.summary.read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    text = "\n".join(line for line in summary.splitlines() if not line.startswith("    "))
    assert "<script" not in text and "|`" not in text


def test_refusals_and_causes_stay_in_their_cell(folder: SweepDir) -> None:
    cell = draw_cell({"data.num_workers": "0"}, refusal="first\tline\nsecond line")
    record = draw_record({"data.num_workers": ["0"]}, cells=[cell])
    write_outputs(folder, record, [], judge_rows(record, [], {}))
    assert read_table(folder.skipped)[0]["detail"] == "first line second line"


@pytest.mark.parametrize("failed", [0, 2])
def test_a_sweep_that_measured_nothing_has_all_files(folder: SweepDir, failed: int) -> None:
    record = draw_record(baseline="name=ddp,micro_batch_size=4,num_workers=0", target="speedup>=2")
    bad = {"status": "failed", "outcome": "interrupted", "exit_code": "130"}
    rows = [draw_row(folder, record.cells[0].name, n, **bad) for n in range(failed)]
    write_outputs(folder, record, rows, judge_rows(record, rows, {}))
    for name in (*HEADERS, *OTHERS):
        assert (folder.root / name).is_file(), name
    assert folder.groups.read_text().count("\n") == 1
    assert best_of(folder)["winner"] is None and folder.best_overrides.read_text() == ""
    assert "There is no answer" in folder.summary.read_text()
    assert "There is no answer" in folder.report.read_text()


def test_runs_of_a_group_that_disagree_are_mixed(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0"]})
    name = record.cells[0].name
    rows = [draw_row(folder, name, n, num_workers=str(n), peak_bytes="n/a") for n in (1, 2)]
    figures = {row["run_dir"]: draw_figures(10.0) for row in rows}
    write_outputs(folder, record, rows, replace(judge_rows(record, [], {}), figures=figures))
    group = read_table(folder.groups)[0]
    assert (group["num_workers"], group["micro_batch"]) == ("mixed", "8")
    assert group["speedup_vs_baseline"] == group["peak_bytes"] == group["verdict"] == "n/a"


def test_what_is_no_number_is_null_in_json_and_n_a_in_tables(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0"]})
    rows = [draw_row(folder, record.cells[0].name, 1)]
    figures = {rows[0]["run_dir"]: draw_figures(10.0, tail_loss=float("nan"))}
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    assert read_table(folder.per_run)[0]["tail_loss"] == "n/a"
    best = best_of(folder)
    assert best["low"] is None and best["runs"] == 1, "one run has no interval"
    assert "no interval from 1 run" in folder.summary.read_text()


def test_the_summary_answers_first_and_explains(sweep: Sweep) -> None:
    text = sweep[0].summary.read_text()
    for part in (
        "Fastest of those with a sound loss (1 put aside) is"
        " name=ddp,micro_batch_size=8,num_workers=2: 122 samples/s (95% interval",
        "Target speedup&gt;=1.08: met",
        "by it the smallest batch wins",
        "step time p90/p50 up to 2.0",
        "21% slower at the end of the window",
        "r2: run_failed, outcome crashed, exit code 5, last step 17",
        "8 GiB of state does not fit",
        "the machine was shared",
        "docs/statistics.md",
    ):
        assert part in text, part
    assert text.index("## Answer") < text.index("## Standings") < text.index("## Unsteady")


def test_a_tie_is_said(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0", "2"]})
    rows = [draw_row(folder, cell.name, n) for cell in record.cells for n in (1, 2, 3)]
    rates = [100.0, 101.0, 99.0]
    figures = {r["run_dir"]: draw_figures(rates[n % 3]) for n, r in enumerate(rows)}
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    assert "2 cells cannot be told apart from the best" in folder.summary.read_text()
    assert [row["is_winner"] for row in read_table(folder.ranked)] == ["true", "true"]


def test_what_cannot_be_told_apart_is_not_crowned(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0", "2"]})
    rows = [draw_row(folder, cell.name, n) for cell in record.cells for n in (1, 2, 3)]
    rates = [100.0, 108.0, 99.0]
    figures = {r["run_dir"]: draw_figures(rates[n % 3] + n) for n, r in enumerate(rows)}
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    page, summary = folder.report.read_text(), folder.summary.read_text()
    assert re.findall(r'class="mark-sign">(.)<', page) == ["≈", "≈"]
    levels = re.findall(r'style="--level: (\d+)"', page)
    assert len(levels) == 2 and len(set(levels)) == 1, "nor by a stronger colour"
    assert "not told apart from 1 other" in page and '<p class="soft">fastest</p>' not in page
    rows_of_summary = [line for line in summary.splitlines() if line.startswith("| ")]
    assert not any("★" in line for line in rows_of_summary)
    assert sum("≈ (chosen)" in line for line in rows_of_summary) == 1


def test_losses_of_cells_are_drawn_and_equal_ones_are_one_line(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0", "2"], "seed": ["1", "2"]})
    rows = [draw_row(folder, cell.name, n) for cell in record.cells for n in (1, 2)]
    figures = {
        row["run_dir"]: draw_figures(
            100.0 + n, losses=(5.0, 3.0, 2.0) if row["group"].endswith("1") else (5.0, 4.0, 3.9)
        )
        for n, row in enumerate(rows)
    }
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    page = folder.report.read_text()
    losses = page[page.index("<h2>Losses</h2>") : page.index("<h2>All cells</h2>")]
    assert len(re.findall(r'<path class="line c\d"', losses)) == 2
    keys = re.findall(r"</i>([^<]+)</span>", losses)
    assert sorted(sorted(key.split("; ")) for key in keys) == [
        ["num_workers=0,seed=1", "num_workers=2,seed=1"],
        ["num_workers=0,seed=2", "num_workers=2,seed=2"],
    ]


def test_throughput_in_the_scatter_begins_at_zero(sweep: Sweep) -> None:
    page = sweep[0].report.read_text()
    chart = page[page.index("<h2>Throughput against memory") : page.index("<h2>Cells by")]
    assert '<span style="top: 100.00%">0</span>' in chart and "throughput from 0" in chart


def test_a_flagged_cell_that_leads_is_not_called_fastest(folder: SweepDir) -> None:
    record = draw_record({"data.num_workers": ["0", "2"]})
    rows = [draw_row(folder, cell.name, n) for cell in record.cells for n in (1, 2, 3)]
    slow, fast = (cell.name for cell in record.cells)
    figures = {
        row["run_dir"]: draw_figures(130.0 + n, losses=(9.0, 8.0))
        if row["group"] == fast
        else draw_figures(100.0 + n)
        for n, row in enumerate(rows)
    }
    judgement = judge_rows(record, rows, figures)
    assert list(judgement.flagged) == [fast]
    write_outputs(folder, record, rows, judgement)
    said = "Only one cell is left to compare (1 put aside for the loss), so nothing is: "
    assert f"{said}{slow}" in folder.summary.read_text()
    table = {row["group"]: row for row in read_table(folder.ranked)}
    assert (table[slow]["is_winner"], table[fast]["is_winner"]) == ("true", "false")


def test_every_run_is_linked_and_nothing_else(sweep: Sweep) -> None:
    folder, _, rows, _ = sweep
    page = folder.report.read_text()
    links = re.findall(r'href="([^"]*)"', page)
    assert links.pop(0) == "data:,"
    assert sorted(links) == sorted(f"{row['run_dir']}/report.html" for row in rows)
    assert all((folder.root / link).is_file() for link in links)
    assert "<script" not in page and "http" not in page and "src=" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_the_grid_marks_by_letters_too(sweep: Sweep) -> None:
    page = sweep[0].report.read_text()
    assert page.count('<table class="matrix">') == 2, "one for each value of the third axis"
    marks = re.findall(r'class="mark-sign">(.)<', page)
    assert sorted(marks) == sorted(["★", "!", "F", "F", "R", "R", "–"])


@pytest.mark.parametrize(("goal", "strong"), [("max", "0.9"), ("min", "0.5")])
def test_the_grid_shows_what_the_sweep_compares_by(
    goal: str, strong: str, folder: SweepDir
) -> None:
    record = draw_record({"optim.lr": ["0.1", "0.2"]}, metric=f"val/accuracy:{goal}")
    rows = [draw_row(folder, cell.name, n) for cell in record.cells for n in (1, 2, 3)]
    figures = {
        row["run_dir"]: draw_figures(100 - n, courses={"val/accuracy": Course(value, value, value)})
        for n, (row, value) in enumerate(zip(rows, 3 * [0.5] + 3 * [0.9], strict=True))
    }
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    page = folder.report.read_text()
    assert "<h2>Cells by val/accuracy</h2>" in page and "the stronger the better" in page
    levels = dict(
        re.findall(r'<td style="--level: (\d+)" title="[^:]*: ([\d.]+) val/accuracy', page)
    )
    assert {value: int(level) for level, value in levels.items()}[strong] == max(map(int, levels))


def test_phases_show_a_configuration_once(folder: SweepDir) -> None:
    axes = {"data.num_workers": ["0", "2"]}
    pilot = [c.model_copy(update={"name": f"A:{c.name}"}) for c in draw_record(axes).cells]
    final = [c.model_copy(update={"name": f"B:{c.name}"}) for c in draw_record(axes).cells]
    phases = [
        SweptPhase(name=name, cells=[c.name for c in cells], repeats=2, steps=steps)
        for name, cells, steps in (("A", pilot, 20), ("B", final, 60))
    ]
    record = draw_record(axes, cells=[*pilot, *final], phases=phases, baseline="num_workers=0")
    rows = [
        draw_row(folder, c.name, n, steps_asked="20" if c in pilot else "60")
        for c in record.cells
        for n in (1, 2)
    ]
    figures = {r["run_dir"]: draw_figures(100.0 + n) for n, r in enumerate(rows)}
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    names = [row["group"] for row in read_table(folder.ranked)]
    assert [name[:2] for name in names] == ["B:", "B:", "A:", "A:"]
    page = folder.report.read_text()
    assert page.count('class="dot') == 2 + 4, "two spots, four intervals"
    matrix = page[page.index('<table class="matrix">') :].partition("</table>")[0]
    assert "B:num_workers=2" in matrix and "A:" not in matrix
    by_name = {row["group"]: row["speedup_vs_baseline"] for row in read_table(folder.groups)}
    assert by_name["A:num_workers=0"] == by_name["B:num_workers=0"] == "1"
    assert best_of(folder)["overrides"] == ["train.grad_accum=1", "data.num_workers=2"]


def test_the_front_is_what_nothing_beats() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (3.0, 9.0), (1.0, 3.0), (4.0, 9.0)]
    assert front(points) == [(1.0, 5.0), (3.0, 9.0)]
    assert staircase(front(points)) == [(1.0, 5.0), (3.0, 5.0), (3.0, 9.0)]
    assert front([]) == staircase([]) == []


def test_sizes_have_no_exponent() -> None:
    assert (size(1020 * 2**20), size(1.5 * 2**30)) == ("1,020 MiB", "1.5 GiB")


def test_by_iteration_time_less_is_better_and_the_page_still_shows_rates(folder: SweepDir) -> None:
    record = draw_record({"train.micro_batch_size": ["4", "8"]}, metric="tail_mean_iter_p50_ms")
    rows = [draw_row(folder, c.name, n, global_batch="16") for c in record.cells for n in (1, 2, 3)]
    # 80 ms for 8 samples against 128 ms for 16.
    rates = {row["run_dir"]: (100.0, 8) if n < 3 else (125.0, 16) for n, row in enumerate(rows)}
    figures = {place: draw_figures(rate, batch) for place, (rate, batch) in rates.items()}
    write_outputs(folder, record, rows, judge_rows(record, rows, figures))
    best = best_of(folder)
    assert best["winner"] == "micro_batch_size=4"
    assert best["value"] == pytest.approx(80) and best["throughput"] == pytest.approx(100)
    assert "Fastest is micro_batch_size=4: 80 ms an iteration" in folder.summary.read_text()
    assert "125 samples/s" in folder.report.read_text()
