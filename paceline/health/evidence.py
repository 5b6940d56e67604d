"""What a judgement is made from: the tables and records of a run, as far as they are there."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.config.health import RulesConfig
from paceline.config.plain import read_plain
from paceline.errors import PacelineError
from paceline.machine.measures import load_link
from paceline.records import Env, Plan, Record, Result
from paceline.records.base import Body, load_map
from paceline.records.cells import DTYPES
from paceline.records.columns import Layout, Row, Table
from paceline.records.decided import MAX_RANKS
from paceline.records.files import open_regular
from paceline.records.heartbeats import Beat, last_beat
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    TRAINING,
    StepRow,
    TelemetryRow,
    TrainingRow,
    read_steps,
    read_telemetry,
    read_training,
)
from paceline.records.words import typed

# Steps that are judged at the end of a run: the last ones, so that a run of a million reads as
# fast as a short one.
MAX_STEPS = 2000
LOG_BYTES = 32 << 10  # of the end of a log: a crash with its stacks
Known = TypeVar("Known", bound=Record)


def empty_table(layout: Layout[Row]) -> Table[Row]:
    """Return a table without rows."""
    return Table(
        layout,
        {name: np.empty(0, DTYPES[kind]) for name, kind in layout.columns.items()},
        {name: np.empty(0, bool) for name in layout.optional},
    )


@dataclass(frozen=True)
class Heart:
    """The last heartbeat of a rank, and when its file was last written by the clock of who keeps
    the file."""

    beat: Beat
    written_at: float


@dataclass(frozen=True)
class Evidence:
    """What is known of a run. All of it may be missing but the number of ranks: a run that has just
    begun, one that died, one of another trainer. `now` is the time of who looks, where it lives."""

    num_ranks: int
    rules: RulesConfig = RulesConfig()
    steps: Mapping[int, Table[StepRow]] = field(default_factory=dict)  # by rank
    training: Table[TrainingRow] = field(default_factory=lambda: empty_table(TRAINING))
    telemetry: Mapping[int, Table[TelemetryRow]] = field(default_factory=dict)  # by rank
    hearts: Mapping[int, Heart] = field(default_factory=dict)
    plan: Plan | None = None
    env: Env | None = None
    result: Result | None = None
    collectives: Mapping[int, Body] = field(default_factory=dict)  # of ranks that failed
    logs: Mapping[int, str] = field(default_factory=dict)  # the ends of those, of a run that failed
    link_gb_per_s: float | None = None  # the slowest link, as `paceline check` measured it
    now: float | None = None
    idle_s: float | None = None  # for how long no rank has begun a step, where it lives
    path: str = "RUN_DIR"  # for commands that are printed

    @property
    def is_live(self) -> bool:
        return self.now is not None


def read_evidence(run: RunDir, now: float | None = None) -> Evidence:
    """Read what a run has recorded. A file that is damaged counts as absent: a judgement of the
    rest is better than none. `now`: it lives."""
    plan = _load(run.plan, Plan)
    ranks = range(plan.world_size) if plan is not None else _find_ranks(run)
    steps = {rank: _table(run.steps(rank)) for rank in ranks}
    found = Evidence(
        ranks[-1] + 1,
        rules=read_rules(run),
        path=shlex.quote(typed(run.root)),
        steps={rank: table[-MAX_STEPS:] for rank, table in steps.items() if table is not None},
        hearts={r: heart for r in ranks if (heart := read_heart(run.heartbeat(r))) is not None},
        plan=plan,
        env=_load(run.env, Env),
        result=_load(run.result, Result),
        collectives={r: body for r in ranks if (body := _map(run.collectives(r))) is not None},
        now=now,
    )
    if found.plan is not None and found.env is not None:
        crew = found.plan.crew
        link = load_link(found.env, crew.device.value, crew.num_nodes)
        found = replace(found, link_gb_per_s=link.gb_per_s if link is not None else None)
    if found.result is not None and found.result.failure is not None:
        found = replace(found, logs={rank: _log_end(run.rank_log(rank)) for rank in ranks})
    with suppress(PacelineError):
        found = replace(found, training=read_training(run.training))
    with suppress(PacelineError):
        tables = {rank: read_telemetry(run.telemetry_of(rank)) for rank in ranks}
        found = replace(found, telemetry=tables)
    return found


def read_rules(run: RunDir) -> RulesConfig:
    """Return the rules of a run; the defaults where it has none, or some of another version."""
    try:
        asked = read_plain(run.config)["observe"]["rules"]
        known = {key: asked[key] for key in RulesConfig.model_fields if key in asked}
        return RulesConfig.model_validate(known)
    except (PacelineError, KeyError, TypeError, ValueError):
        return RulesConfig()


def read_heart(path: Path) -> Heart | None:
    try:
        written_at = path.stat().st_mtime
    except OSError:
        return None
    beat = last_beat(path)
    return Heart(beat, written_at) if beat.time else None


def _table(path: Path) -> Table[StepRow] | None:
    with suppress(PacelineError):
        return read_steps(path)
    return None


def _map(path: Path) -> Body | None:
    with suppress(PacelineError):
        return load_map(path) if path.is_file() else None
    return None


def _load(path: Path, kind: type[Known]) -> Known | None:
    with suppress(PacelineError):
        return kind.load(path)
    return None


def _log_end(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode(errors="replace")
    except (OSError, PacelineError):
        return ""


def _find_ranks(run: RunDir) -> Sequence[int]:
    """Return the ranks that have a folder, where no plan says how many there were."""
    names = [folder.name.removeprefix("rank") for folder in run.ranks.glob("rank*")]
    numbers = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    return [number for number in numbers if number < MAX_RANKS] or [0]
