"""All files that tell the result of a sweep. Written after each phase and at the end, and whole
whatever the state: stopped in the middle, or with nothing that succeeded."""

import json
import math
from typing import Any

from paceline.records.files import write_atomic
from paceline.records.swept import SweepRecord
from paceline.report.sweep import render_sweep_page
from paceline.report.sweep_markdown import render_sweep_summary
from paceline.report.sweep_story import SweepStory, pasteable, winners
from paceline.sweep.folder import SweepDir
from paceline.sweep.judge import SweepJudgement
from paceline.sweep.manifest import FINGERPRINTS, SUCCESS, Row
from paceline.sweep.story import tell
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
    """Everything in the directory but sweep.json, the manifest and the runs."""
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


def _best_overrides(story: SweepStory) -> str:
    """One line for behind `paceline train RECIPE`; empty where nothing won."""
    if story.winner is None:
        return ""
    return pasteable(story.record, story.line(story.winner).cell) + "\n"


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
    """The same with null for what is no number: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
