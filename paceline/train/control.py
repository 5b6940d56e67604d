"""Requests to a live run: by signals, by files in its directory, by its own clock.

Handlers and threads only raise a number here; the loop looks at it, and all ranks act on the
largest number of any of them, at the same step.
"""

from enum import IntEnum

from paceline.records.files import modified_at
from paceline.records.rundir import RunDir
from paceline.train.heartbeat import Ticker

POLL_S = 0.25


class Ask(IntEnum):
    """What ranks may be asked; the largest wins if they were asked different things."""

    NOTHING = 0
    CHECKPOINT = 1
    PREEMPT = 2  # checkpoint, stop, exit 75
    INTERRUPT = 3  # the same, exit 130
    FAIL = 4  # a save in the background has failed: all ranks stop together


class Requests:
    """What this rank was asked since the last answer. `raise_to` is safe in a signal handler."""

    def __init__(self) -> None:
        self._asked = Ask.NOTHING

    @property
    def asked(self) -> Ask:
        return self._asked

    def raise_to(self, ask: Ask) -> None:
        if ask > self._asked:
            self._asked = ask

    def answered(self, ask: Ask) -> None:
        """Note that all ranks have done it; a stop is never taken back."""
        if self._asked is ask is Ask.CHECKPOINT:
            self._asked = Ask.NOTHING


class ControlFiles(Ticker):
    """Rank 0 looks for .HALT and control/checkpoint; files that were there before are no
    requests."""

    def __init__(self, run: RunDir, requests: Requests, halt_seen: int | None) -> None:
        super().__init__(POLL_S, "control")
        self._requests = requests
        self._watched = {run.halt: Ask.PREEMPT, run.checkpoint_request: Ask.CHECKPOINT}
        self._seen = {path: modified_at(path) for path in self._watched}
        self._seen[run.halt] = halt_seen

    def tick(self) -> None:
        for path, ask in self._watched.items():
            found = modified_at(path)
            if found is not None and found != self._seen[path]:
                self._requests.raise_to(ask)
            self._seen[path] = found
