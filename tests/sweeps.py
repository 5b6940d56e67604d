"""Sweep directories made in code: what tests of the output files and of the page look at."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.stats.figures import RunFigures
from paceline.stats.timing_points import TimingPoint
from paceline.sweep.folder import COLUMNS, NOT_THERE, Row, SweepDir
from paceline.sweep.judge import SweepJudgement, judge_figures
from paceline.sweep.target import TargetResult

AXES = {
    "strategy.name": ["ddp", "zero1", "zero3"],
    "train.micro_batch_size": ["4", "8"],
    "data.num_workers": ["0", "2"],
}
NOISE = (1.0, 1.004, 0.997)


def draw_record(axes: dict[str, list[str]] = AXES, **more: Any) -> SweepRecord:
    words: list[dict[str, str]] = [{}]
    for key, values in axes.items():
        words = [old | {key: value} for old in words for value in values]
    cells = [draw_cell(settings) for settings in words]
    facts: dict[str, Any] = {
        "mode": "sweep", "recipe": "lm_tiny", "overrides": ["train.grad_accum=1"], "axes": axes,
        "cells": cells, "metric": "samples_per_s", "margin": 0.02, "seed": 0,
        "phases": [SweptPhase(name="", cells=[c.name for c in cells], repeats=3, steps=60)],
        "loss_tolerance": 0.02,
    }  # fmt: skip
    return SweepRecord.model_validate(facts | more)


def draw_cell(settings: dict[str, str], refusal: str = "") -> SweptCell:
    short = [f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()]
    words = [f"{key}={value}" for key, value in settings.items()]
    return SweptCell(name=",".join(short), settings=settings, overrides=words, refusal=refusal)


def draw_row(folder: SweepDir, group: str, repeat: int, **more: str) -> Row:
    """A row of the manifest; the run it names has a train.log and a report."""
    run = folder.unused_run(group, repeat)
    run.mkdir(parents=True)
    (run / "train.log").write_text("Step 1\n")
    (run / "report.html").write_text("a report")
    path = str(run.relative_to(folder.root))
    known = {
        "mode": "sweep", "group": group, "repeat": str(repeat), "status": "success",
        "exit_code": "0", "duration_sec": "12.5", "last_step": "60", "run_dir": path,
        "train_log": f"{path}/train.log", "micro_batch": "8", "global_batch": "16",
        "num_workers": "0", "outcome": "ok", "steps_asked": "60",
        "peak_bytes": str(2**30), "config_fingerprint": "c0", "code_fingerprint": "k0",
        "data_fingerprint": "d0", "hardware_fingerprint": "h0", "overrides": json.dumps([]),
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, NOT_THERE) | known | more


def draw_figures(samples_per_s: float, batch: int = 16, **more: Any) -> RunFigures:
    step_s = batch / samples_per_s
    points = tuple(
        TimingPoint(
            step, {"data_wait": 1.0, "fwd": 300 * step_s, "bwd": 600 * step_s}, 1000 * step_s
        )
        for step in (20, 40, 60)
    )
    facts: dict[str, Any] = {
        "samples_per_s": samples_per_s, "tokens_per_s": None, "steps_per_s": 1 / step_s,
        "first_step": 6, "last_step": 60,
        "num_compile_steps": 0, "compile_s": 0.0, "step_s_p50": step_s,
        "step_s_p90": 1.05 * step_s, "drift": 0.001, "standard_error": 0.002, "blocks_s": (),
        "tail_mean_iter_p50_ms": 1000 * step_s, "tail_std_iter_p50_ms": 0.0,
        "all_mean_iter_p50_ms": 1000 * step_s, "all_std_iter_p50_ms": 0.0,
        "tail_points_used": 3, "points": points, "tail_loss": 2.5, "losses": (3.0, 2.5),
        "startup_s": 0.4,
    }  # fmt: skip
    return RunFigures(**(facts | more))


def judge_rows(
    record: SweepRecord, rows: Sequence[Row], figures: dict[str, RunFigures], **more: Any
) -> SweepJudgement:
    """The judge's own word, but for what `more` says otherwise."""
    return replace(judge_figures(record, rows, figures), **more)


def draw_sweep(root: Path) -> tuple[SweepDir, SweepRecord, list[Row], SweepJudgement]:
    """Twelve cells: two refused, one with a failed run, one of failed runs only, one whose loss
    departs, one that is unsteady, one not run."""
    folder = SweepDir(root)
    folder.runs.mkdir(parents=True)
    record = draw_record()
    refused = {"zero3,micro_batch_size=8,num_workers=0", "zero3,micro_batch_size=8,num_workers=2"}
    why = "8 GiB of state does not fit into 6 GiB on this device"
    cells = [
        cell.model_copy(update={"refusal": why if cell.name.partition("=")[2] in refused else ""})
        for cell in record.cells
    ]
    record = record.model_copy(
        update={"cells": cells, "baseline": cells[0].name, "target": "speedup>=1.08"}
    )
    rows: list[Row] = []
    figures: dict[str, RunFigures] = {}
    open_cells = [cell for cell in cells if not cell.refusal][:-1]
    for number, cell in enumerate(open_cells):
        _add_runs(folder, number, cell, rows, figures)
    flagged = {cells[7].name: "mean loss of the last steps is 2.9, that of its equals 2.5"}
    found = judge_rows(record, rows, figures, flagged=flagged)
    assert found.standings is not None and found.winner is not None
    best = found.standings.of(found.winner).speedup
    target = TargetResult("speedup>=1.08", found.winner, best, "met", "1.3 is above it")
    judgement = judge_rows(
        record, rows, figures, flagged=flagged, target=target, notes=["the machine was shared"]
    )
    return folder, record, rows, judgement


def _add_runs(
    folder: SweepDir, number: int, cell: SweptCell, rows: list[Row], figures: dict[str, RunFigures]
) -> None:
    batch = 2 * int(cell.settings["train.micro_batch_size"])
    rate = 100 + 25 * (batch > 8) + 9 * int(cell.settings["data.num_workers"]) / 2 - 4 * number
    words = {
        "micro_batch": str(batch // 2),
        "global_batch": str(batch),
        "num_workers": cell.settings["data.num_workers"],
        "peak_bytes": str(int(2**30 * (1.4 - 0.08 * number + 0.03 * batch))),
    }
    for repeat, noise in enumerate(NOISE, 1):
        fails = number == 8 or (number == 5 and repeat == 2)
        bad = {"status": "failed", "outcome": "crashed", "exit_code": "5", "last_step": "17"}
        row = draw_row(folder, cell.name, repeat, **(words | (bad if fails else {})))
        rows.append(row)
        if not fails:
            more = {"step_s_p90": 2 * batch / rate, "drift": 0.21} if number == 4 else {}
            figures[row["run_dir"]] = draw_figures(rate * noise, batch, **more)
