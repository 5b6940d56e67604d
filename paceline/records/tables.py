"""The CSV files of a run as typed rows; an unfinished last line is left out."""

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainingRow:
    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    skipped: bool
    warmup: bool
    val_loss: float | None


@dataclass(frozen=True)
class StepRow:
    """Phase times of one step of one rank, in seconds, by phase name without the `_s`."""

    step: int
    warmup: bool
    wall_s: float
    phases_s: dict[str, float]
    unaccounted_s: float


@dataclass(frozen=True)
class TelemetryRow:
    time: float
    source: str
    values: dict[str, float]


@dataclass(frozen=True)
class CheckpointRow:
    step: int
    reason: str
    num_bytes: int
    stall_s: float
    duration_s: float
    is_written: bool


def read_checkpoints(path: Path) -> list[CheckpointRow]:
    return [
        CheckpointRow(
            step=int(row["step"]),
            reason=row["reason"],
            num_bytes=int(row["num_bytes"]),
            stall_s=float(row["stall_s"]),
            duration_s=float(row["duration_s"]),
            is_written=row["outcome"] == "ok",
        )
        for row in _rows(path)
    ]


def read_training(path: Path) -> list[TrainingRow]:
    return [
        TrainingRow(
            step=int(row["step"]),
            loss=float(row["loss"]),
            lr=float(row["lr"]),
            grad_norm=float(row["grad_norm"]),
            step_s=float(row["step_s"]),
            samples_per_s=float(row["samples_per_s"]),
            tokens_per_s=_optional(row["tokens_per_s"]),
            skipped=row["skipped"] == "1",
            warmup=row["warmup"] == "1",
            val_loss=_optional(row["val_loss"]),
        )
        for row in _rows(path)
    ]


def read_steps(path: Path) -> list[StepRow]:
    apart = {"step", "warmup", "wall_s", "unaccounted_s"}
    return [
        StepRow(
            step=int(row["step"]),
            warmup=row["warmup"] == "1",
            wall_s=float(row["wall_s"]),
            phases_s={
                name.removesuffix("_s"): float(value)
                for name, value in row.items()
                if name not in apart
            },
            unaccounted_s=float(row["unaccounted_s"]),
        )
        for row in _rows(path)
    ]


def read_telemetry(path: Path) -> list[TelemetryRow]:
    return [
        TelemetryRow(
            time=float(row.pop("time")),
            source=row.pop("source"),
            values={name: float(value) for name, value in row.items() if value},
        )
        for row in _rows(path)
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    """Whole rows only: a run that was killed may have stopped inside a line. Each attempt writes a
    header of its own."""
    if not path.is_file():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    lines = whole.splitlines()
    rows = csv.DictReader([line for n, line in enumerate(lines) if n == 0 or line != lines[0]])
    return [row for row in rows if None not in row.values()]


def _optional(text: str) -> float | None:
    return float(text) if text else None
