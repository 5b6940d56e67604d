"""The tables of a sweep: one row per run, per timing point, per group, per run that was left
out. docs/sweeping.md describes their columns."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

from paceline.records.phases import Phase
from paceline.records.swept import SweepRecord
from paceline.records.words import text_cell
from paceline.stats.figures import RunFigures
from paceline.stats.standings import Standing
from paceline.stats.timing_points import TIMED
from paceline.sweep.folder import IDENTITY, NOT_THERE, SETTINGS, Row, SweepDir
from paceline.sweep.judge import SweepJudgement, cause_of, peak_bytes, problem_of
from paceline.sweep.phases import plain_name

Value = str | float | int | bool | None
PER_RUN = (
    *IDENTITY, *SETTINGS, "timing_points", "tail_points_used", "last_step", "last_iter_p50_ms",
    "last_fwd_p50_ms", "last_bwd_p50_ms", "tail_mean_iter_p50_ms", "tail_std_iter_p50_ms",
    "all_mean_iter_p50_ms", "all_std_iter_p50_ms", "tail_steps_per_sec", "tail_samples_per_sec",
    "phase", "run_dir", "samples_per_s", "tokens_per_s", "window_first_step", "window_last_step",
    "num_compile_steps", "compile_s", "step_s_p50", "step_s_p90", "p90_over_p50", "drift",
    "standard_error", "peak_bytes", "startup_s", "tail_loss", "final_loss",
)  # fmt: skip
POINTS = (
    *IDENTITY,
    "index",
    "step",
    *(f"{name}_ms_p50" for name in (*TIMED.values(), "iter")),
    "train_log",
)
TAIL = "tail_mean_iter_p50_ms"
GROUPS = (
    "group", "mode", "runs", *SETTINGS, f"{TAIL}_mean", f"{TAIL}_std", f"{TAIL}_min",
    f"{TAIL}_max", "tail_steps_per_sec_mean", "tail_steps_per_sec_std",
    "tail_samples_per_sec_mean", "tail_samples_per_sec_std", "speedup_vs_baseline",
    "verdict", "is_winner", "metric", "value", "low", "high", "speedup", "speedup_low",
    "speedup_high", "runs_compared", "variation", "peak_bytes", "p90_over_p50", "drift",
    "tail_loss", "flagged",
)  # fmt: skip
SKIPPED = (
    *IDENTITY, "reason", "run_dir", "train_log", "phase", "outcome", "exit_code", "last_step",
    "detail",
)  # fmt: skip


def per_run_csv(rows: Sequence[Row], judgement: SweepJudgement) -> str:
    lines = []
    for row in rows:
        figures = judgement.figures.get(row["run_dir"])
        if figures is not None:
            lines.append({**row, **_run_numbers(row, figures)})
    return _csv(PER_RUN, lines)


def _run_numbers(row: Row, figures: RunFigures) -> dict[str, Value]:
    last = figures.points[-1] if figures.points else None
    return {
        "timing_points": len(figures.points),
        "tail_points_used": figures.tail_points_used,
        "last_iter_p50_ms": last.iter_ms_p50 if last else None,
        "last_fwd_p50_ms": last.phases_ms_p50[TIMED[Phase.FORWARD]] if last else None,
        "last_bwd_p50_ms": last.phases_ms_p50[TIMED[Phase.BACKWARD]] if last else None,
        "tail_mean_iter_p50_ms": figures.tail_mean_iter_p50_ms,
        "tail_std_iter_p50_ms": figures.tail_std_iter_p50_ms,
        "all_mean_iter_p50_ms": figures.all_mean_iter_p50_ms,
        "all_std_iter_p50_ms": figures.all_std_iter_p50_ms,
        "tail_steps_per_sec": _steps_per_s(figures),
        "tail_samples_per_sec": _samples_per_s(row, figures),
        "samples_per_s": figures.samples_per_s,
        "tokens_per_s": figures.tokens_per_s,
        "window_first_step": figures.first_step,
        "window_last_step": figures.last_step,
        "num_compile_steps": figures.num_compile_steps,
        "compile_s": figures.compile_s,
        "step_s_p50": figures.step_s_p50,
        "step_s_p90": figures.step_s_p90,
        "p90_over_p50": figures.spread,
        "drift": figures.drift,
        "standard_error": figures.standard_error,
        "startup_s": figures.startup_s,
        "tail_loss": figures.tail_loss,
        "final_loss": float(figures.losses[-1]) if len(figures.losses) else None,
    }


def _steps_per_s(figures: RunFigures) -> float | None:
    tail_ms = figures.tail_mean_iter_p50_ms
    return 1000 / tail_ms if tail_ms else None


def _samples_per_s(row: Row, figures: RunFigures) -> float | None:
    """Return the rate by the timing points, which is not the one that cells are compared by."""
    steps_per_s = _steps_per_s(figures)
    if steps_per_s is None or row["global_batch"] == NOT_THERE:
        return None
    return float(row["global_batch"]) * steps_per_s


def points_csv(rows: Sequence[Row], judgement: SweepJudgement) -> str:
    lines = []
    for row in rows:
        figures = judgement.figures.get(row["run_dir"])
        for index, point in enumerate(figures.points if figures else ()):
            line: dict[str, Value] = {**row, "index": index, "step": point.step}
            line |= {f"{name}_ms_p50": value for name, value in point.phases_ms_p50.items()}
            lines.append(line | {"iter_ms_p50": point.iter_ms_p50})
    return _csv(POINTS, lines)


def groups_csv(
    record: SweepRecord, rows: Sequence[Row], judgement: SweepJudgement, names: Sequence[str]
) -> str:
    """Return a row for each of `names` that has a run with figures."""
    lines = []
    for name in names:
        runs = _measured(name, rows, judgement)
        if runs:
            base = _tail_mean(_baseline(record, name), rows, judgement)
            tail = _tail_mean(name, rows, judgement)
            line = _group_numbers(runs) | _standing_numbers(record, name, rows, judgement)
            line["speedup_vs_baseline"] = base / tail if base and tail else None
            lines.append(line)
    return _csv(GROUPS, lines)


def group_names(record: SweepRecord) -> list[str]:
    return [cell.name for cell in record.cells]


def ranked_names(record: SweepRecord, judgement: SweepJudgement) -> list[str]:
    return [cell.name for cell in judgement.in_order(record)]


Measured = list[tuple[Row, RunFigures]]


def _measured(name: str, rows: Sequence[Row], judgement: SweepJudgement) -> Measured:
    found = [(row, judgement.figures.get(row["run_dir"])) for row in rows if row["group"] == name]
    return [(row, figures) for row, figures in found if figures is not None]


def _baseline(record: SweepRecord, name: str) -> str:
    """Return the name of the baseline in the phase of the cell `name`."""
    return name.removesuffix(plain_name(name)) + (record.baseline or "")


def _tail_mean(name: str, rows: Sequence[Row], judgement: SweepJudgement) -> float | None:
    found = [f.tail_mean_iter_p50_ms for _, f in _measured(name, rows, judgement)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _group_numbers(runs: Measured) -> dict[str, Value]:
    rows, figures = [row for row, _ in runs], [item for _, item in runs]
    tail = _known(figures, lambda item: item.tail_mean_iter_p50_ms)
    samples = [value for row, item in runs if (value := _samples_per_s(row, item)) is not None]
    steps = _known(figures, _steps_per_s)
    return {
        "group": rows[0]["group"],
        "mode": rows[0]["mode"],
        "runs": len(runs),
        **common_settings(rows),
        f"{TAIL}_mean": _mean(tail),
        f"{TAIL}_std": _std(tail),
        f"{TAIL}_min": min(tail, default=None),
        f"{TAIL}_max": max(tail, default=None),
        "tail_steps_per_sec_mean": _mean(steps),
        "tail_steps_per_sec_std": _std(steps),
        "tail_samples_per_sec_mean": _mean(samples),
        "tail_samples_per_sec_std": _std(samples),
        "p90_over_p50": fmean(item.spread for item in figures),
        "drift": fmean(item.drift for item in figures),
        "tail_loss": _mean(_known(figures, lambda item: item.tail_loss)),
    }


def common_settings(rows: Sequence[Row], names: Sequence[str] = SETTINGS) -> dict[str, str]:
    """Return each setting of a group; `mixed` where its runs disagree."""
    values = {name: {row[name] for row in rows} for name in names}
    return {
        name: found.pop() if len(found) == 1 else "mixed" if found else NOT_THERE
        for name, found in values.items()
    }


def _standing_numbers(
    record: SweepRecord, name: str, rows: Sequence[Row], judgement: SweepJudgement
) -> dict[str, Value]:
    standing = judgement.standing_of(name)
    memory = peak_bytes(standing, [row for row in rows if row["group"] == name])
    line: dict[str, Value] = {
        "metric": record.metric,
        "flagged": judgement.flagged.get(name, ""),
        "peak_bytes": memory,
        "is_winner": judgement.is_winner(name),
        "runs_compared": len(standing.group.values) if standing else 0,
        "verdict": str(standing.verdict) if standing else None,
        "variation": standing.variation if standing else None,
    }
    return line | compared(standing)


def compared(standing: Standing | None) -> dict[str, Value]:
    """Return value and speedup with their intervals; a single run has a value and no interval."""
    rate = standing.rate if standing else None
    speedup = standing.speedup if standing else None
    return {
        "value": standing.value if standing else None,
        "low": rate.low if rate else None,
        "high": rate.high if rate else None,
        "speedup": speedup.value if speedup else None,
        "speedup_low": speedup.low if speedup else None,
        "speedup_high": speedup.high if speedup else None,
    }


def skipped_tsv(
    folder: SweepDir, record: SweepRecord, rows: Sequence[Row], judgement: SweepJudgement
) -> str:
    lines: list[Mapping[str, Value]] = []
    for cell in record.cells:
        if cell.refusal:
            words = {"group": cell.name, "reason": "refused", "detail": cell.refusal}
            lines.append({"mode": record.mode, "outcome": "refused", **words})
    for row in rows:
        problem = problem_of(folder, record, row, judgement)
        if problem:
            lines.append({**row, "reason": problem, "detail": cause_of(folder, row, problem)})
    head = "\t".join(SKIPPED)
    body = ["\t".join(_text(line.get(name)) for name in SKIPPED) for line in lines]
    return "".join(f"{line}\n" for line in [head, *body])


def _known(
    figures: Sequence[RunFigures], read: Callable[[RunFigures], float | None]
) -> list[float]:
    return [value for item in figures if (value := read(item)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation; 0 for a single value, None for none."""
    return stdev(values) if len(values) > 1 else 0.0 if values else None


def _csv(columns: Sequence[str], lines: Sequence[Mapping[str, Value]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_text(line.get(name)) for name in columns] for line in lines)
    return file.getvalue()


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else NOT_THERE
    return NOT_THERE if value is None else text_cell(str(value))
