"""The directory of a sweep: where its files lie, and run_manifest.tsv, one row per run that has
ended. The manifest is rewritten whole each time, so that a kill at any byte leaves either the
old rows or the new ones."""

import os
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import DataError, Outcome
from paceline.records.base import MAX_BYTES
from paceline.records.files import read_text, write_atomic
from paceline.records.rundir import RunDir, slug
from paceline.records.swept import SweptPhase
from paceline.records.words import from_cell, text_cell

Row = dict[str, str]
NOT_THERE = "n/a"  # a setting that the workload does not have
SUCCESS, FAILED = "success", "failed"
STOPPED = frozenset(outcome for outcome in Outcome if outcome.is_stop)  # somebody ended the run
# Names and order are those of the sweep scripts that Paceline's users come from
# (docs/sweeping.md); columns that those did not have come last.
IDENTITY = ("mode", "group", "repeat")
SETTINGS = (
    "zero_stage", "micro_batch", "world_size", "global_batch", "deterministic", "log_every_steps",
    "validation_every_steps", "checkpoint_every_steps", "num_workers", "prefetch_factor",
    "dataset_manifest_path", "timing_rank_scope", "precision_mode_req",
    "precision_mode_effective", "attn_impl_req", "attn_impl_effective", "torch_compile_enabled",
    "gpu_name", "gpu_cc",
)  # fmt: skip
FINGERPRINTS = (
    "config_fingerprint", "code_fingerprint", "data_fingerprint", "hardware_fingerprint",
)  # fmt: skip
COLUMNS = (
    *IDENTITY, "status", "exit_code", "duration_sec", "last_step", "last_iter_ms_p50",
    "run_dir", "launcher_log", "train_log", *SETTINGS,
    "phase", "outcome", "steps_asked", "started_at", "peak_bytes", *FINGERPRINTS, "overrides",
)  # fmt: skip
NEEDED = (*IDENTITY, "status", "run_dir", "outcome", "steps_asked")  # to know a run again


class SweepDir:
    """Paths inside one sweep's directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "sweep.json"
        self.driver_log = root / "driver.log"
        self.manifest = root / "run_manifest.tsv"
        self.per_run = root / "per_run_metrics.csv"
        self.points = root / "timing_points.csv"
        self.groups = root / "group_summary.csv"
        self.ranked = root / "ranked_groups.csv"
        self.best = root / "best_config.json"
        self.best_overrides = root / "best_overrides.txt"
        self.skipped = root / "skipped_runs.tsv"
        self.summary = root / "summary.md"
        self.report = root / "report.html"
        self.runs = root / "runs"

    @classmethod
    def require_place(cls, out: Path | None) -> None:
        """Refuse a directory that can be that of no sweep, before work is spent on it."""
        if out is None or not cls(out).record.is_file():
            RunDir.require_place(out)

    def unused_run(self, cell: str, repeat: int) -> Path:
        """Return where this repeat runs; with a counter behind it where one was run before."""
        stem = f"{slug(cell)}_r{repeat}"
        tries = (self.runs / (f"{stem}-{n}" if n else stem) for n in range(10_000))
        return next(path for path in tries if not path.exists())

    def run(self, row: dict[str, str]) -> RunDir:
        """Return the run directory of a row of the manifest, wherever the sweep has been moved
        to."""
        return RunDir(self.root / row["run_dir"])


def save_manifest(path: Path, rows: list[Row]) -> None:
    """Write all rows; columns that only rows of another version have come last."""
    columns = list(dict.fromkeys((*COLUMNS, *(name for row in rows for name in row))))
    cells = ([text_cell(row.get(name, NOT_THERE)) for name in columns] for row in rows)
    write_atomic(path, "".join("\t".join(line) + "\n" for line in (columns, *cells)))


def load_manifest(path: Path) -> list[Row]:
    """Read the rows of this version or another; what a row does not say is `n/a`. Raise
    `DataError` when the file is not one that `save_manifest` wrote."""
    if not path.exists():
        return []
    head, *lines = read_text(path, MAX_BYTES).splitlines() or [""]
    rows = [[from_cell(cell) for cell in line.split("\t")] for line in lines]
    columns = head.split("\t")
    if not set(NEEDED) <= set(columns) or any(len(row) != len(columns) for row in rows):
        raise DataError(
            f"{path} is not a manifest: its columns or rows are not those of a sweep\n"
            "hint: give --out another directory; the runs in this one stay as they are"
        )
    absent = dict.fromkeys(COLUMNS, NOT_THERE)
    found = [absent | dict(zip(columns, row, strict=True)) for row in rows]
    home = os.path.realpath(path.parent)
    for number, row in enumerate(found, start=2):
        if not _is_inside(home, row["run_dir"]):
            raise DataError(
                f"{path}:{number}: run_dir is {row['run_dir']!r}, not a folder of this sweep\n"
                "hint: delete that line; the same command runs it again"
            )
        if not (row["repeat"].isascii() and row["repeat"].isdigit() and len(row["repeat"]) < 9):
            raise DataError(
                f"{path}:{number}: repeat is {row['repeat']!r}, not the number of a run\n"
                "hint: delete that line; the same command runs it again"
            )
    return found


def _is_inside(home: str, run_dir: str) -> bool:
    """Tell whether a row's run lies below the sweep, links followed: a manifest that came from
    elsewhere leads to no other folder. A sweep itself writes `runs/CELL_rN`."""
    try:
        return os.path.realpath(os.path.join(home, run_dir)).startswith(
            home.rstrip(os.sep) + os.sep
        )
    except ValueError:  # a NUL
        return False


def rows_of(phase: SweptPhase, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of one phase. A manifest may also hold what an earlier call asked for:
    other lengths, more repeats."""
    return [
        row
        for row in rows
        if row["group"] in phase.cells
        and int(row["repeat"]) <= phase.repeats
        and row["steps_asked"] == str(phase.steps)
    ]
