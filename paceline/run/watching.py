"""Judges a run while it goes on: a thread of the process that started it, beside the one that
follows its logs. It reads what ranks write anyway, and no rank waits for it: also not for a core,
since it runs at the lowest priority.

    often       new rows of ranks/*/steps.csv: who is slow, who has left a collective out
    now and then all the rules (paceline/health/)

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
from paceline.health.judge import judge_ranks
from paceline.records import Plan
from paceline.records.cells import DTYPES
from paceline.records.columns import Layout, Row, Table
from paceline.records.events import Event, EventLog
from paceline.records.findings import Finding
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.tables import STEPS, read_training
from paceline.records.tails import RowTail
from paceline.train.heartbeat import Ticker

TICK_S = 0.25
RULES_S = 10.0  # between two judgements by all rules: these read whole tables
RULES_SHARE = 0.002  # of the time at most, which makes them rarer in a large run
MAX_RULES_S = 60.0  # and yet a halt is asked for within a minute of what calls for it
KEPT_STEPS = 200
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
        """Leave out what is there already."""
        self.read()
        self._rows = self._rows[:0]

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
        # What an earlier attempt of a resumed run has left is not judged again, lest it halts this
        # one for a fault of then.
        for window in self._steps.values():
            window.skip()
        self._last_step = _last_step(run)
        self._started_at = self._moved_at = wall_time()
        self._rules_at = self._started_at + RULES_S
        self._standing: dict[tuple[str, int | None], int] = {}  # -> judgements without it
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
            self._note(judge(self._all(now)), of_ranks=False)
            took_s = wall_time() - now
            self._rules_at = now + min(max(RULES_S, took_s / RULES_SHARE), MAX_RULES_S)

    def _recent(self, now: float) -> Evidence:
        """Return the last steps alone, which is what is looked at often."""
        steps = {rank: window.table() for rank, window in self._steps.items()}
        return Evidence(self._plan.world_size, self._rules, steps, plan=self._plan, now=now)

    def _all(self, now: float) -> Evidence:
        """Return all that the files say since this began, with the last steps as they are known."""
        found, since = read_evidence(self._files, now, self._recent(now)), self._started_at
        sampled = {r: t.pick(t.column("time") >= since) for r, t in found.telemetry.items()}
        return replace(
            found,
            training=found.training.since(self._last_step + 1),
            telemetry=sampled,
            hearts={r: heart for r, heart in found.hearts.items() if heart.written_at >= since},
            idle_s=now - self._last_step_at(now),
        )

    def _last_step_at(self, now: float) -> float:
        """Return when a step last began anywhere: by the marks of ranks, which are written in
        place at each."""
        times = [self._moved_at]
        for rank in self._steps:
            try:
                times.append(self._files.step_mark(rank).stat().st_mtime)
            except OSError:
                continue
        return min(now, max(times))

    def _note(self, found: Sequence[Finding], of_ranks: bool) -> None:
        """Tell what is new, and forget what is over. A note is only told where a rule is about it:
        verdicts wait for the end."""
        ruled = self._rules.actions()
        serious = {f.key: f for f in found if f.severity != "note" or f.kind in ruled}
        for key, finding in serious.items():
            if key not in self._standing:
                self._tell(finding)
            self._standing[key] = 0
        for key in [k for k in self._standing if (k[0] in RANK_KINDS) == of_ranks]:
            if key not in serious:
                self._standing[key] += 1
                if self._standing[key] >= FORGOTTEN_AFTER:
                    del self._standing[key]

    def _tell(self, finding: Finding) -> None:
        self._num_told[finding.key] = self._num_told.get(finding.key, 0) + 1
        if self._num_told[finding.key] > MAX_REPEATS:
            return
        done = act_on(self._files, finding, action_for(self._rules, finding.kind))
        evidence = finding.evidence | ({"done": done} if done else {})
        self._log.append(
            Event(
                rank=finding.rank,
                step=finding.step,
                kind=finding.kind,
                severity=finding.severity,
                words=finding.words,
                evidence=evidence,
            )
        )
        self._say(f"{finding.severity}: {finding.words}{f' ({done})' if done else ''}")
