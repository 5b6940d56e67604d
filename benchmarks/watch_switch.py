"""The job of `benchmarks/watch_cost.py`: a language model in whose ranks watching can be switched
on and off between two steps. Ranks import this file; each decides by the step alone, and so all do
the same. What it notes of a step, on or off, costs the same on both sides.

    launch.env.WATCH_COST_FOLDER=DIR    where ranks leave their notes
    launch.env.WATCH_COST_TURN=1        steps of a turn, see `Turns`
    launch.env.WATCH_COST_PEERS=1       one rank alone records as if it had peers
    launch.env.WATCH_COST_PLANT=0.5     ms of work more in each step with it
"""

import os
import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import paceline.train.ledger as ledger
from paceline.records.table_file import TableFile
from paceline.strategies import clock as clocks
from paceline.strategies import waits
from paceline.strategies.engine import ModuleEngine
from paceline.workloads.lm.workload import LanguageModel

LOGGED = 10  # steps whose rows are written together: train.log_every
FIRST = 42  # step that counts: `Turns` begin here, on the step after one that wrote rows
NEVER = 10**9
FOLDER, TURN, PEERS, PLANT = (
    os.environ.get(f"WATCH_COST_{name}", "") for name in ("FOLDER", "TURN", "PEERS", "PLANT")
)


def is_on(number: int, salt: str) -> bool:
    """Say whether turn `number` is one with it: four turns are on, off, off, on or the opposite, so
    that neighbours are compared and a trend cancels; which of the two is drawn by a hash."""
    four, place = divmod(number, 4)
    return (place in (0, 3)) ^ bool(zlib.crc32(f"{salt}{four}".encode()) & 1)


@dataclass(frozen=True)
class Turns:
    """What is on in which step. Calls inside of a step change every `turn` steps. Watchers change
    every `long`: they look 4 times a second. Rows are written once in 10 steps, and so change with
    the calls where a turn is that long, else with the watchers."""

    turn: int

    @property
    def long(self) -> int:
        return max(2 * LOGGED, 4 * self.turn)

    @property
    def rows_by_call(self) -> bool:
        return self.turn % LOGGED == 0

    def calls(self, step: int) -> bool:
        return is_on((step - FIRST) // self.turn, "calls")

    def watchers(self, step: int) -> bool:
        return is_on((step - FIRST) // self.long, "watchers")

    def rows(self, step: int) -> bool:
        return self.calls(step) if self.rows_by_call else self.watchers(step)


class Switch:
    """Holds what is on now, and notes at the begin of each step: the time of day, the CPU time of
    this process so far, and that of what makes and writes rows."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.calls, self.rows_ns = turns, True, 0
        self.notes: list[tuple[int, int, int, int]] = []

    def begin(self, step: int) -> None:
        now = time.perf_counter_ns()
        self.notes.append((step, now, time.process_time_ns(), self.rows_ns))
        if step < FIRST:
            return
        self.calls, rows = self.turns.calls(step), self.turns.rows(step)
        ModuleEngine.knows_blocked = rows
        ledger.TIMES_EVERY = 5 if rows else NEVER
        if step % 500 == 0 and FOLDER:
            self.save()

    def save(self) -> None:
        np.save(Path(FOLDER, f"notes.{os.getpid()}.npy"), np.array(self.notes))


def spin(cost_ms: float) -> None:
    until = time.thread_time_ns() + cost_ms * 1e6
    while time.thread_time_ns() < until:
        pass


def around(owner: Any, name: str, switch: Switch, off: Any) -> None:
    """Have a method do nothing in the turns without it."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if switch.calls else off

    setattr(owner, name, call)


def counted(owner: Any, name: str, switch: Switch, is_rows: Any = lambda owner: True) -> None:
    """Add the time that the calling thread spends in a method to that of rows."""
    real = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return real(self, *args, **kwargs)
        finally:
            if is_rows(self):
                switch.rows_ns += time.thread_time_ns() - began

    setattr(owner, name, call)


def install(switch: Switch) -> None:
    for kind in (clocks.HostClock, clocks.DeviceClock):
        begin = kind.begin

        def begin_step(self: Any, step: int, begin: Any = begin) -> None:
            switch.begin(step)
            begin(self, step)
            if PLANT and switch.calls:
                spin(float(PLANT))

        kind.begin = begin_step  # type: ignore[method-assign]
        for name, off in (("blocked", nullcontext()), ("block", None), ("unblock", None)):
            around(kind, name, switch, off)
    around(waits.Waits, "until_returned", switch, None)
    around(ledger, "count_collectives", switch, None)
    counted(ledger.Ledger, "settle", switch)
    counted(TableFile, "flush", switch, lambda file: file.path.name == "steps.csv")
    close = ledger.Ledger.close

    def close_and_save(self: ledger.Ledger) -> Any:
        switch.save()
        return close(self)

    ledger.Ledger.close = close_and_save  # type: ignore[method-assign]


def pretend_peers() -> None:
    """Have one rank alone record all that it would with others, which it then does not wait for."""
    build, record = clocks._BaseClock.__init__, ledger.Ledger.record

    def build_as_if(self: Any, is_alone: bool = False) -> None:
        build(self, False)

    def record_as_if(self: ledger.Ledger, *args: Any) -> None:
        ledger.count_collectives()
        record(self, *args)

    clocks._BaseClock.__init__ = build_as_if  # type: ignore[method-assign]
    ledger.Ledger.record = record_as_if  # type: ignore[method-assign]


if FOLDER:  # set in ranks alone
    install(Switch(Turns(int(TURN))))
    if PEERS:
        pretend_peers()


class Switched(LanguageModel):
    """The model of `workload: lm`."""
