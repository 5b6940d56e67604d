"""Writes all files that show the result of a sweep, after each phase and at its end, even if it
was stopped in the middle or nothing succeeded."""

import json
import math
import shlex
from statistics import fmean
from typing import Any
from urllib.parse import quote

from paceline.records.files import write_atomic
from paceline.records.swept import SweepRecord, SweptCell
from paceline.report.sweep import render_sweep_page, render_sweep_summary
from paceline.report.sweep_story import CellLine, RunLine, SweepStory, winners, words_of
from paceline.stats.figures import RunFigures
from paceline.stats.standings import Standing
from paceline.sweep.folder import FINGERPRINTS, SUCCESS, Row, SweepDir
from paceline.sweep.judge import SweepJudgement, cause_of, peak_bytes, problem_of
from paceline.sweep.phases import plain_name
from paceline.sweep.tables import (
    common_settings,
    compared,
    group_names,
    groups_csv,
    per_run_csv,
    points_csv,
    ranked_names,
    skipped_tsv,
)

BEST_SCHEMA = 1


def write_outputs(
    folder: SweepDir, record: SweepRecord, rows: list[Row], judgement: SweepJudgement
) -> None:
    """Write everything in the directory but sweep.json, the manifest and the runs."""
    story = tell(folder, record, rows, judgement)
    groups = groups_csv(record, rows, judgement, group_names(record))
    ranked = groups_csv(record, rows, judgement, ranked_names(record, judgement))
    write_atomic(folder.per_run, per_run_csv(rows, judgement))
    write_atomic(folder.points, points_csv(rows, judgement))
    write_atomic(folder.groups, groups)
    write_atomic(folder.ranked, ranked)
    write_atomic(folder.skipped, skipped_tsv(folder, record, rows, judgement))
    write_atomic(folder.best, _best_json(story, rows, judgement))
    write_atomic(folder.best_overrides, _best_overrides(story))
    write_atomic(folder.summary, render_sweep_summary(story))
    write_atomic(folder.report, render_sweep_page(story))


def tell(
    folder: SweepDir, record: SweepRecord, rows: list[Row], judgement: SweepJudgement
) -> SweepStory:
    """Return all that the report, the summary and the console show of a sweep."""
    by_group: dict[str, list[Row]] = {cell.name: [] for cell in record.cells}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    lines = [
        _cell_line(folder, record, cell, by_group[cell.name], judgement)
        for cell in judgement.in_order(record)
    ]
    target = judgement.target
    return SweepStory(
        name=folder.root.name,
        record=record,
        cells=lines,
        rounds=judgement.rounds,
        others=judgement.others,
        winner=judgement.winner,
        target=target.state if target else "",
        target_text=f"Target {target.text}: {target.state}; {target.because}." if target else "",
        notes=judgement.notes,
    )


def _cell_line(
    folder: SweepDir,
    record: SweepRecord,
    cell: SweptCell,
    rows: list[Row],
    judgement: SweepJudgement,
) -> CellLine:
    standing = judgement.standing_of(cell.name)
    flag = judgement.flagged.get(cell.name, "")
    leads = judgement.is_winner(cell.name)
    compared = judgement.standings.rows if judgement.standings else ()
    num_leading = sum(judgement.is_winner(row.group.name) for row in compared)
    num_compared = len([row for row in compared if row.group.name not in judgement.flagged])
    batches = sorted({row["global_batch"] for row in rows})
    return CellLine(
        cell=cell,
        runs=[_run_line(folder, record, row, judgement) for row in rows],
        standing=standing,
        throughput=_throughput(record, standing, _figures(rows, judgement)),
        peak_bytes=peak_bytes(standing, rows),
        global_batch=" or ".join(batches),
        flag=flag,
        is_fastest=leads and num_leading == 1 and num_compared > 1,
        is_tied=leads and num_leading > 1,
        is_chosen=cell.name == judgement.winner,
        is_baseline=plain_name(cell.name) == record.baseline,
    )


def _figures(rows: list[Row], judgement: SweepJudgement) -> list[RunFigures]:
    found = (judgement.figures.get(row["run_dir"]) for row in rows)
    return [figures for figures in found if figures is not None]


def _throughput(
    record: SweepRecord, standing: Standing | None, figures: list[RunFigures]
) -> float | None:
    """Return what the standings say where they compare rates, else the mean over the runs."""
    if standing is None:
        return None
    if record.metric in ("samples_per_s", "tokens_per_s"):
        return standing.value
    return fmean(item.samples_per_s for item in figures) if figures else None


def _run_line(
    folder: SweepDir, record: SweepRecord, row: Row, judgement: SweepJudgement
) -> RunLine:
    problem = problem_of(folder, record, row, judgement)
    return RunLine(
        repeat=row["repeat"],
        outcome=row["outcome"],
        exit_code=row["exit_code"],
        last_step=row["last_step"],
        href=_href(folder, row),
        figures=judgement.figures.get(row["run_dir"]),
        problem=problem,
        detail=cause_of(folder, row, problem) if problem else "",
    )


def _href(folder: SweepDir, row: Row) -> str:
    """Return the link to a run's report, or to its directory where it has no report."""
    run = folder.run(row)
    if run.report.is_file():
        return quote(f"{row['run_dir']}/{run.report.name}")
    return quote(f"{row['run_dir']}/") if run.root.is_dir() else ""


def _best_overrides(story: SweepStory) -> str:
    """Return one line for behind `paceline train RECIPE`; empty where nothing won."""
    if story.winner is None:
        return ""
    return shlex.join(words_of(story.record, story.line(story.winner).cell)) + "\n"


def _best_json(story: SweepStory, rows: list[Row], judgement: SweepJudgement) -> str:
    record = story.record
    body: dict[str, Any] = {
        "schema": BEST_SCHEMA,
        "winner": story.winner,
        "recipe": record.recipe,
        "metric": record.metric,
        "baseline": record.baseline,
        "margin": record.margin,
        "cannot_be_told_apart": [line.name for line in winners(story)],
        "target": _target(judgement),
        **(_winner(story, rows) if story.winner is not None else {}),
    }
    return json.dumps(_finite(body), indent=2, allow_nan=False) + "\n"


def _winner(story: SweepStory, rows: list[Row]) -> dict[str, Any]:
    assert story.winner is not None
    line = story.line(story.winner)
    own = [row for row in rows if row["group"] == line.name and row["status"] == SUCCESS]
    standing = line.standing
    return {
        "overrides": list(dict.fromkeys([*story.record.overrides, *line.cell.overrides])),
        "settings": line.cell.settings,
        "configuration": common_settings(own),
        **compared(standing),
        "verdict": line.verdict,
        "runs": len(standing.group.values) if standing else 0,
        "variation": standing.variation if standing else None,
        "throughput": line.throughput,
        "peak_bytes": int(line.peak_bytes) if line.peak_bytes is not None else None,
        "fingerprints": common_settings(own, FINGERPRINTS),
    }


def _target(judgement: SweepJudgement) -> dict[str, Any] | None:
    target = judgement.target
    if target is None:
        return None
    words = {"text": target.text, "state": target.state, "because": target.because}
    found = target.found._asdict() if target.found else None
    return {**words, "group": target.group, "found": found}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, for JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
