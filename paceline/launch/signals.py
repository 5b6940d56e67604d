"""Signals to the process that owns ranks: noted when they come, and what they say about patience.

The first one asks ranks to stop in order; those that follow make the wait shorter.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
TWICE_S = 0.5  # one Ctrl-C may reach us twice: from the terminal, and through a launcher
HURRY_S = 10.0  # what is left of the grace after a second request


class Received(NamedTuple):
    number: int
    at: float  # time.monotonic


@dataclass
class SignalLog:
    """What signals asked for. Handlers write here and do nothing else."""

    stops: list[Received] = field(default_factory=list)
    dumps: int = 0

    def add(self, number: int) -> None:
        self.stops.append(Received(number, time.monotonic()))

    @property
    def first(self) -> int | None:
        """The signal that began the end."""
        return self.stops[0].number if self.stops else None


@contextmanager
def logged_signals() -> Iterator[SignalLog]:
    """Take note of signals meanwhile; afterwards every handler is what it was. Whoever logs signals
    around this hears of them too: of a run, the sweep that it belongs to."""
    signals = SignalLog()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread may have handlers; its owner decides about signals
        return

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            signals.dumps += 1
        else:
            signals.add(number)

    # nohup has had SIGHUP ignored, and so it stays.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    watched = [number for number in (*ENDING, signal.SIGUSR1) if number not in ignored]
    before = {number: signal.signal(number, note) for number in watched}
    note.signals = signals  # type: ignore[attr-defined]
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        outer = getattr(before[signal.SIGINT], "signals", None)
        if isinstance(outer, SignalLog):
            outer.stops += signals.stops


def request_for(number: int) -> int:
    """The signal by which a rank hears of it: Ctrl-C as such, all others as a preemption."""
    return signal.SIGINT if number == signal.SIGINT else signal.SIGTERM


def repeats(heard: Sequence[Received]) -> list[Received]:
    """Those that are requests of their own, and no echo of the first."""
    return [later for later in heard[1:] if later.at - heard[0].at >= TWICE_S]


def kill_time(heard: Sequence[Received], grace_s: float) -> float:
    """When ranks that are still there are killed, on the monotonic clock. The second Ctrl-C does
    so at once; any other repetition leaves them a moment."""
    kill_at = heard[0].at + grace_s
    interrupts = int(heard[0].number == signal.SIGINT)
    for later in repeats(heard):
        interrupts += later.number == signal.SIGINT
        is_impatient = later.number == signal.SIGINT and interrupts > 1
        kill_at = min(kill_at, later.at + (0.0 if is_impatient else HURRY_S))
    return kill_at
