"""Signals to the process that owns ranks: logged when they come, and how long ranks then have.

The first one asks ranks to stop in order; those that follow make the wait shorter.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.machine.process import STOP_SIGNALS, signal_handlers

STOPS = (*STOP_SIGNALS, signal.SIGHUP)
TWICE_S = 0.5  # one Ctrl-C may reach us twice: from the terminal, and through a launcher
HURRY_S = 10.0  # what is left of the grace after a second request


class Received(NamedTuple):
    number: int
    at: float  # time.monotonic


@dataclass
class SignalLog:
    """What signals asked for. Handlers write here and do nothing else."""

    stops: list[Received] = field(default_factory=list)
    dumps: int = 0  # how often stacks were asked for

    def add(self, number: int) -> None:
        """Log a request to stop."""
        self.stops.append(Received(number, time.monotonic()))

    @property
    def first(self) -> int | None:
        """The first stop signal received, if any."""
        return self.stops[0].number if self.stops else None


@contextmanager
def logged_signals() -> Iterator[SignalLog]:
    """Log signals meanwhile; afterwards every handler is what it was. Logs nest: the stops of a run
    are added to the log of the sweep around it when the run is over."""
    log = SignalLog()

    def handler(number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            log.dumps += 1
        else:
            log.add(number)

    handler.log = log  # type: ignore[attr-defined]
    # nohup has had SIGHUP ignored, and so it stays.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    watched = [number for number in (*STOPS, signal.SIGUSR1) if number not in ignored]
    outer = None
    try:
        with signal_handlers(handler, watched) as before:
            outer = getattr(before.get(signal.SIGINT), "log", None)
            yield log
    finally:
        if isinstance(outer, SignalLog):
            outer.stops += log.stops


def request_for(number: int) -> int:
    """Return the signal that a rank gets for it: Ctrl-C as such, all others as a preemption."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


def repeats(stops: Sequence[Received]) -> list[Received]:
    """Return those that are requests of their own, and not an echo of the first."""
    return [later for later in stops[1:] if later.at - stops[0].at >= TWICE_S]


def kill_time(stops: Sequence[Received], grace_s: float) -> float:
    """Return when ranks that are still there are killed, on the monotonic clock. The second Ctrl-C
    kills at once; any other repetition leaves them a moment."""
    kill_at = stops[0].at + grace_s
    interrupts = int(stops[0].number == signal.SIGINT)
    for later in repeats(stops):
        interrupts += later.number == signal.SIGINT
        is_impatient = later.number == signal.SIGINT and interrupts > 1
        kill_at = min(kill_at, later.at + (0.0 if is_impatient else HURRY_S))
    return kill_at
