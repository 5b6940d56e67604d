"""ranks/rank<r>/pipeline.jsonl: when a rank ran the actions of its last passes, one line per pass.

The engine writes what it measured when it ends; `measured` puts the ranks' files together.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.records.base import DAMAGED, MAX_BYTES
from paceline.records.files import read_text
from paceline.schedules.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class Timed:
    """An action from start to end, in seconds since its pass began on this rank."""

    action: Action
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of all microbatches through the pipeline, as one rank saw it: the `number`-th of its
    step, from 0. `started_at` is in epoch seconds, so that ranks can be aligned."""

    step: int
    number: int
    started_at: float
    actions: tuple[Timed, ...]


def render_passes(passes: Iterable[Pass]) -> str:
    return "".join(f"{json.dumps(_packed(done))}\n" for done in passes)


def read_passes(path: Path) -> list[Pass]:
    """Read the passes; empty if the file is absent or damaged: a report can do without."""
    try:
        lines = read_text(path, MAX_BYTES).splitlines()
        return [_unpacked(json.loads(line)) for line in lines]
    except (DataError, *DAMAGED):
        return []


def _packed(done: Pass) -> dict[str, Any]:
    return {
        "step": done.step,
        "number": done.number,
        "started_at": done.started_at,
        "actions": [_packed_action(timed) for timed in done.actions],
    }


def _packed_action(timed: Timed) -> list[str | int | float]:
    action = timed.action
    moments = (round(timed.started_s, 9), round(timed.ended_s, 9))
    return [str(action.kind), action.stage, action.microbatch, action.direction, *moments]


def _unpacked(line: dict[str, Any]) -> Pass:
    actions = tuple(_unpacked_action(*row) for row in line["actions"])
    started_at = _finite(line["started_at"])
    return Pass(int(line["step"]), int(line["number"]), started_at, actions)


def _unpacked_action(
    kind: str, stage: int, microbatch: int, direction: int, *moments: float
) -> Timed:
    started_s, ended_s = map(_finite, moments)
    return Timed(
        Action(Kind(kind), int(stage), int(microbatch), int(direction)), started_s, ended_s
    )


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a moment")
    return float(value)
