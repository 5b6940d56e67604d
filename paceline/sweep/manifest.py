"""run_manifest.tsv: one row a run that has ended. Rewritten whole each time, so that a kill at any
byte leaves the rows of before or of after."""

from collections.abc import Iterable
from pathlib import Path

from paceline.errors import DataError, Outcome
from paceline.records.files import write_atomic
from paceline.records.swept import SweptPhase

Row = dict[str, str]
NOT_THERE = "n/a"  # a setting that the workload does not have
SUCCESS, FAILED = "success", "failed"
STOPPED = frozenset(outcome for outcome in Outcome if outcome.is_stop)  # somebody ended the run
# The order that readers of the first sweeps know; what is ours stands behind it.
IDENTITY = ("mode", "group", "repeat")
SETTINGS = (
    "zero_stage", "micro_batch", "world_size", "global_batch", "deterministic", "cudnn_benchmark",
    "wall_clock_breakdown", "log_every_steps", "validation_every_steps", "checkpoint_every_steps",
    "num_workers", "prefetch_factor", "dataset_manifest_path", "dataset_use_trim",
    "dataset_offline_trimmed", "enable_cuda_sync_timing", "timing_rank_scope",
    "precision_mode_req", "precision_mode_effective", "attn_impl_effective",
    "torch_compile_enabled", "gpu_name", "gpu_cc",
)  # fmt: skip
FINGERPRINTS = (
    "config_fingerprint", "code_fingerprint", "data_fingerprint", "hardware_fingerprint",
)  # fmt: skip
COLUMNS = (
    *IDENTITY, "status", "exit_code", "duration_sec", "last_step", "last_iter_ms_p50", "port",
    "run_dir", "launcher_log", "train_log", *SETTINGS,
    "phase", "outcome", "steps_asked", "started_at", "peak_bytes", *FINGERPRINTS, "overrides",
)  # fmt: skip


def save_manifest(path: Path, rows: list[Row]) -> None:
    lines = ["\t".join(COLUMNS), *("\t".join(_cell(row[name]) for name in COLUMNS) for row in rows)]
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def load_manifest(path: Path) -> list[Row]:
    """The rows; `DataError` when the file is not one that `save_manifest` wrote."""
    if not path.is_file():
        return []
    head, *lines = path.read_text().splitlines() or [""]
    rows = [line.split("\t") for line in lines]
    if tuple(head.split("\t")) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise DataError(
            f"{path} is not a manifest of this version: its columns or rows are not ours\n"
            "hint: give --out another directory; the runs in this one stay as they are"
        )
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def rows_of(phase: SweptPhase, rows: Iterable[Row]) -> list[Row]:
    """A manifest may also hold what an earlier call asked for: other lengths, more repeats."""
    return [
        row
        for row in rows
        if row["group"] in phase.cells
        and int(row["repeat"]) <= phase.repeats
        and row["steps_asked"] == str(phase.steps)
    ]


def _cell(text: str) -> str:
    return " ".join(text.split())  # no tab and no line break inside a cell
