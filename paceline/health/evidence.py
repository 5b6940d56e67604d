"""Collects what a judgement is based on: the tables and records of a run, as far as they exist."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from paceline.config.health import RulesConfig
from paceline.config.plain import read_plain
from paceline.errors import PacelineError
from paceline.machine.measures import load_link
from paceline.records import Env, LaunchPlan, Overlap, Plan, Result
from paceline.records.base import Body, load_map
from paceline.records.columns import Table, empty_table
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

# Steps that are read and judged at the end of a run: the last ones, so that a run of a million
# takes no longer than a short one.
MAX_STEPS = 2000
LOG_BYTES = 32 << 10  # of the end of a log: a crash with its stacks
Known = TypeVar("Known")


@dataclass(frozen=True)
class Heart:
    """The last heartbeat of a rank, and when its file was last written, by the clock of the file
    server. As that may be off, a process that follows it says by its own clock when it changed.
    """

    beat: Beat
    written_at: float
    changed_at: float | None = None

    @property
    def heard_at(self) -> float:
        """Return when it was last heard, by the watcher's clock if that is known."""
        return self.written_at if self.changed_at is None else self.changed_at


@dataclass(frozen=True)
class Evidence:
    """What is known about a run. Everything but the number of ranks may be missing: the run may
    have just begun, have died, or belong to another trainer. `now` is the reader's time if the run
    is live."""

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
    overlaps: Sequence[Overlap] = ()  # of a run that is over: a profiled step of each rank
    link_gb_per_s: float | None = None  # the slowest link, as `paceline check` measured it
    now: float | None = None
    idle_s: float | None = None  # for how long no rank has begun a step, where it lives
    path: str = "RUN_DIR"  # for commands that are printed
    workload: str = ""  # for them too, with a full path where it is a file; empty: as in the plan
    damaged: Sequence[str] = ()  # what is there and cannot be read, each with its reason

    @property
    def is_live(self) -> bool:
        return self.now is not None

    @cached_property
    def sampled(self) -> Mapping[int, Mapping[str, Table[TelemetryRow]]]:
        """Return telemetry by rank and by what was sampled: `host`, `rank`, `gpu0`. Told apart
        once, for several rules look at it."""
        return {rank: _split(table) for rank, table in self.telemetry.items()}


def _split(table: Table[TelemetryRow]) -> dict[str, Table[TelemetryRow]]:
    """Return the rows of each source, as columns: a machine with 8 GPUs has 9 a second."""
    names = table.column("source")
    return {name: table.pick(names == name) for name in dict.fromkeys(names.tolist())}


def read_evidence(run: RunDir, now: float | None = None, known: Evidence | None = None) -> Evidence:
    """Read what a run has recorded. A damaged file counts as absent, and is noted: a judgement of
    the rest is better than none. `now`: the run is live. `known`: plan, rules and tables of a
    caller that follows them; they are not read again, as they are most of what there is."""
    read = _Reading()
    plan = read(run.plan, Plan.load) if known is None else known.plan
    ranks = range(plan.world_size) if plan is not None else _find_ranks(run)
    tables = known if known is not None else _read_tables(run, ranks, read)
    started = read(run.launch, LaunchPlan.load)
    collectives = {rank: read(run.collectives(rank), load_map) for rank in ranks}
    found = Evidence(
        ranks[-1] + 1,
        rules=known.rules if known is not None else read_rules(run),
        path=shlex.quote(typed(run.root)),
        workload=started.workload if started is not None else "",
        steps=tables.steps,
        hearts={r: heart for r in ranks if (heart := read_heart(run.heartbeat(r))) is not None},
        plan=plan,
        training=tables.training,
        telemetry=tables.telemetry,
        env=read(run.env, Env.load),
        result=read(run.result, Result.load),
        collectives={rank: body for rank, body in collectives.items() if body is not None},
        now=now,
    )
    if now is None:
        overlaps = [read(run.overlap(rank), Overlap.load) for rank in ranks]
        found = replace(found, overlaps=[each for each in overlaps if each is not None])
    if found.plan is not None and found.env is not None:
        crew = found.plan.crew
        link = load_link(found.env, crew.device.value, crew.num_nodes)
        found = replace(found, link_gb_per_s=link.gb_per_s if link is not None else None)
    if found.result is not None and found.result.failure is not None:
        found = replace(found, logs={rank: _log_end(run.rank_log(rank)) for rank in ranks})
    return replace(found, damaged=tuple(read.damaged))


def _read_tables(run: RunDir, ranks: Sequence[int], read: "_Reading") -> Evidence:
    """Return all that is in tables, and nothing else."""
    steps = {rank: read(run.steps(rank), _last_steps) for rank in ranks}
    training = read(run.training, read_training)
    telemetry = {rank: read(run.telemetry_of(rank), read_telemetry) for rank in ranks}
    return Evidence(
        len(ranks),
        steps={rank: table for rank, table in steps.items() if table is not None},
        training=training if training is not None else empty_table(TRAINING),
        telemetry={rank: table for rank, table in telemetry.items() if table is not None},
    )


def _last_steps(path: Path) -> Table[StepRow]:
    return read_steps(path, MAX_STEPS)


class _Reading:
    """Reads files of a run, and keeps why some of them could not be read."""

    def __init__(self) -> None:
        self.damaged: list[str] = []

    def __call__(self, path: Path, load: Callable[[Path], Known]) -> Known | None:
        """Return what a file holds; None if it is absent or damaged."""
        try:
            return load(path)
        except PacelineError as error:
            if os.path.lexists(path):
                self.damaged.append(str(error))
        return None


def read_rules(run: RunDir) -> RulesConfig:
    """Return the rules of a run; the defaults if it has none, or has those of another version."""
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


def _log_end(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode(errors="replace")
    except (OSError, PacelineError):
        return ""


def _find_ranks(run: RunDir) -> Sequence[int]:
    """Return the ranks that have a folder, if no plan says how many there were."""
    names = [folder.name.removeprefix("rank") for folder in run.ranks.glob("rank*")]
    numbers = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    return [number for number in numbers if number < MAX_RANKS] or [0]
