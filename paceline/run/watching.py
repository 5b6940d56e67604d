"""Judges a run while it goes on: a thread of the process that started it, beside the one that
follows its logs. It reads only what ranks write anyway, and runs at the lowest priority, so that
no rank waits for it or for a core.

    often       new rows of ranks/*/steps.csv: who is slow, who has left a collective out
    now and then all the rules (paceline/health/)

Only what is new in a file is read, and a bounded part of it is kept: a look takes as long after a
month as after an hour.

What is new becomes an event, a word to the user, and what the rule asks for.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.health import RulesConfig
from paceline.errors import DataError
from paceline.health import Evidence, act_on, judge, read_evidence
from paceline.health.actions import action_for
from paceline.health.evidence import read_heart
from paceline.health.judge import judge_ranks
from paceline.health.rules import GATES
from paceline.records import Plan
from paceline.records.cells import DTYPES
from paceline.records.columns import Layout, Row, Table
from paceline.records.events import Event, EventLog
from paceline.records.findings import RunFinding
from paceline.records.growing import ThinnedTable
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.tables import (
    STEPS,
    TELEMETRY,
    TRAINING,
    TelemetryRow,
    read_table,
    read_training,
)
from paceline.records.tails import RowTail
from paceline.train.heartbeat import Ticker

TICK_S = 0.25
RULES_S = 10.0  # between two judgements by all rules
RULES_SHARE = 0.002  # of the time at most, which makes them rarer in a large run
MAX_RULES_S = 60.0  # and yet a halt is asked for within a minute of what calls for it
KEPT_STEPS = 200
# What all rules look at: so much of the end whole, and as much again of all before it, thinned, by
# which drift, a leak over hours and the best clock of a GPU are known.
#   training.csv: from the median of 5,000 steps a jump stands out; and a plateau is told by two
#   spans of `loss_plateau_steps`, of which no step may be missing.
#   telemetry: 5 minutes of samples a second; a leak takes one, a throttled GPU half of one.
KEPT_ROWS, KEPT_SAMPLES = 5_000, 300
# Of a file that is seen for the first time, or anew: what 10 s between two looks may add, amply.
TRAINING_BYTES, TELEMETRY_BYTES = 1 << 20, 1 << 16
LOWEST = 19  # priority, as `nice` counts
NEW_STEPS = 5  # of all ranks, after which they are compared again: as often as they are written
MAX_REPEATS = 20  # events of one kind about one rank
RANK_KINDS = ("straggler", "desync")  # what is looked for often
FORGOTTEN_AFTER = 3  # judgements without it, after which a finding is over


class Window:
    """The last rows of a table of numbers that grows, as columns."""

    def __init__(self, path: Path, layout: Layout[Row], kept: int = KEPT_STEPS) -> None:
        self._path, self._layout, self._kept = path, layout, kept
        self._tail, self._size = RowTail(path), -1
        self._rows: NDArray[np.float64] = np.empty((0, len(layout.columns)))

    def read(self) -> int:
        """Take in what is new; return how many rows. A file that has not grown is not opened."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return 0
        if size == self._size:
            return 0
        self._size = size
        new = self._tail.rows()
        if not new:
            return 0
        numbers = np.array([[_number(row.get(c)) for c in self._layout.columns] for row in new])
        kept = self._rows[self._rows[:, 0] < numbers[0, 0]]  # a new attempt takes steps again
        self._rows = np.concatenate([kept, numbers])[-self._kept :]
        return len(new)

    def skip(self) -> None:
        """Leave out what is there already, which may be long: it is not read."""
        try:
            last = read_table(self._path, self._layout, last=1).column("step")
        except DataError:  # a damaged end
            last = np.zeros(0)
        self._tail = RowTail.from_end(self._path, int(max(last, default=0)))

    def table(self, last: int = KEPT_STEPS) -> Table[Any]:
        columns, values, empty = self._layout.columns, {}, {}
        for place, (name, kind) in enumerate(columns.items()):
            found = self._rows[-last:, place]
            if name in self._layout.optional:
                empty[name] = np.isnan(found)
            values[name] = found if kind is float else np.nan_to_num(found).astype(DTYPES[kind])
        return Table(self._layout, values, empty)


def _number(cell: str | None) -> float:
    try:
        return float(cell) if cell else float("nan")
    except ValueError:
        return float("nan")


def _follow_telemetry(run: RunDir, rank: int) -> ThinnedTable[TelemetryRow]:
    path = run.telemetry_of(rank)
    return ThinnedTable(path, TELEMETRY, "time", KEPT_SAMPLES, TELEMETRY_BYTES)


def _last_step(run: RunDir) -> int:
    """Return the last step that is recorded; 0 where none is, or the table is damaged."""
    try:
        return int(max(read_training(run.training).column("step"), default=0))
    except DataError:
        return 0


class Watcher(Ticker):
    """A thread of the process that runs the launcher. `say` gets each new finding."""

    def __init__(
        self, run: RunDir, plan: Plan, rules: RulesConfig, say: Callable[[str], None]
    ) -> None:
        super().__init__(TICK_S, "watcher")
        self._files, self._plan, self._rules, self._say = run, plan, rules, say
        self._log = EventLog(run.events, run.lost)
        ranks = range(plan.world_size)
        self._steps: dict[int, Window] = {r: Window(run.steps(r), STEPS) for r in ranks}
        self._num_new = dict.fromkeys(ranks, 0)
        rows = max(KEPT_ROWS, 2 * rules.loss_plateau_steps)
        layout = TRAINING.of_file(GATES)  # other metrics are judged by no rule
        self._training = ThinnedTable(run.training, layout, "step", rows, TRAINING_BYTES)
        self._telemetry = {r: _follow_telemetry(run, r) for r in ranks}
        # What an earlier attempt of a resumed run has left is not judged again, lest it halts this
        # one for a fault of then.
        for window in self._steps.values():
            window.skip()
        self._training.skip()
        for table in self._telemetry.values():
            table.skip()
        self._last_step = _last_step(run)
        self._started_at = self._moved_at = wall_time()
        self._rules_at = self._started_at + RULES_S
        self._seen: dict[tuple[str, int], tuple[object, float]] = {}  # -> its value, since when
        for rank in ranks:  # those of an earlier attempt say nothing of this one
            if (heart := read_heart(run.heartbeat(rank))) is not None:
                self._changed_at(("beat", rank), heart.beat, self._started_at)
        self._last_step_at(self._started_at)
        self._standing: dict[tuple[str, int | None], int] = {}  # -> judgements without it
        self._told_to: dict[tuple[str, int | None], int] = {}  # -> the last of its steps
        self._num_told: dict[tuple[str, int | None], int] = {}

    def stop(self) -> None:
        super().stop()
        self._log.close()

    def _run(self) -> None:
        with suppress(OSError):  # where a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        super()._run()

    def tell(self, error: Exception) -> None:
        self._say(f"warning: what watches this run has failed once, and goes on: {error!r}")

    def tick(self) -> None:
        for rank, window in self._steps.items():
            self._num_new[rank] += window.read()
        now = wall_time()
        if min(self._num_new.values()) >= NEW_STEPS:
            self._num_new = dict.fromkeys(self._num_new, 0)
            self._moved_at = now
            self._note(judge_ranks(self._recent(now)), of_ranks=True)
        if now >= self._rules_at and not self._stop.is_set():
            self._rules_at = now + MAX_RULES_S  # also where this look fails
            evidence = self._all(now)
            self._go_back_to(int(evidence.training.column("step").max(initial=0)))
            self._note(judge(evidence), of_ranks=False)
            took_s = wall_time() - now
            self._rules_at = now + min(max(RULES_S, took_s / RULES_SHARE), MAX_RULES_S)

    def _recent(self, now: float) -> Evidence:
        """Return the last steps alone, which is what is looked at often."""
        steps = {rank: window.table() for rank, window in self._steps.items()}
        return Evidence(self._plan.world_size, self._rules, steps, plan=self._plan, now=now)

    def _all(self, now: float) -> Evidence:
        """Return all that the files say since this began, as far as it is kept."""
        followed = replace(
            self._recent(now),
            training=self._training.read().since(self._last_step + 1),
            telemetry={rank: table.read() for rank, table in self._telemetry.items()},
        )
        found = read_evidence(self._files, now, followed)
        hearts = {
            rank: replace(heart, changed_at=changed_at)
            for rank, heart in found.hearts.items()
            if (changed_at := self._changed_at(("beat", rank), heart.beat, now)) > self._started_at
        }
        return replace(found, hearts=hearts, idle_s=now - self._last_step_at(now))

    def _changed_at(self, what: tuple[str, int], value: object, now: float) -> float:
        """Return when this process first saw a value: the clock of the machine that keeps the files
        may be minutes off."""
        if what not in self._seen or self._seen[what][0] != value:
            self._seen[what] = (value, now)
        return self._seen[what][1]

    def _last_step_at(self, now: float) -> float:
        """Return when a step was last seen to have begun anywhere: by the marks of ranks, which are
        written in place at each."""
        times = [self._moved_at]
        for rank in self._steps:
            with suppress(OSError):
                written = self._files.step_mark(rank).stat().st_mtime_ns
                times.append(self._changed_at(("mark", rank), written, now))
        return max(times)

    def _note(self, found: Sequence[RunFinding], of_ranks: bool) -> None:
        """Report what is new, and forget what is over. A note is reported only if a rule is about
        it: verdicts wait for the end."""
        ruled = self._rules.actions()
        serious = {f.key: f for f in found if f.severity != "note" or f.kind in ruled}
        for key, finding in serious.items():
            if self._is_new(finding):
                self._tell(finding)
            self._standing[key] = 0
            if "began_step" in finding.evidence:
                self._told_to[key] = finding.evidence["last_step"]
        for key in [k for k in self._standing if (k[0] in RANK_KINDS) == of_ranks]:
            if key not in serious:
                self._standing[key] += 1
                if self._standing[key] >= FORGOTTEN_AFTER:
                    del self._standing[key]

    def _is_new(self, finding: RunFinding) -> bool:
        """Say whether a finding was not reported yet. One about single steps, such as a loss spike,
        stays in the table for ever: it is new if its last step is a later one."""
        if finding.key in self._told_to and "began_step" in finding.evidence:
            return bool(finding.evidence["began_step"] > self._told_to[finding.key])
        return finding.key not in self._standing

    def _go_back_to(self, last_step: int) -> None:
        """Forget reports about steps that a new attempt takes again."""
        self._told_to = {key: min(told, last_step) for key, told in self._told_to.items()}

    def _tell(self, finding: RunFinding) -> None:
        self._num_told[finding.key] = self._num_told.get(finding.key, 0) + 1
        if self._num_told[finding.key] > MAX_REPEATS:
            return
        is_again = self._num_told[finding.key] > 1
        step = finding.evidence.get("began_step", finding.step) if is_again else finding.step
        done = act_on(self._files, finding, action_for(self._rules, finding.kind))
        evidence = finding.evidence | ({"done": done} if done else {})
        self._log.append(
            Event(
                rank=finding.rank,
                step=step,
                kind=finding.kind,
                severity=finding.severity,
                words=finding.words,
                evidence=evidence,
            )
        )
        self._say(f"{finding.severity}: {finding.words}{f' ({done})' if done else ''}")
