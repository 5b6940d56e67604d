"""When every action of this rank ran: by the host's clock on a CPU, by events on a GPU."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any

import torch

from paceline.records.phases import Phase
from paceline.schedules.actions import Action, Kind
from paceline.schedules.passes import Pass, Timed
from paceline.strategies.clock import Clock

KEPT_PASSES = 24


@dataclass
class _Open:
    """A pass as it is recorded: marks are seconds of `perf_counter`, or events."""

    step: int
    number: int
    origin: Any
    marks: list[tuple[Action, Any, Any]] = field(default_factory=list)


class Recorder:
    """Keeps the last passes. `clock` is the loop's: a rank that waits for another is in `comm`."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.clock: Clock | None = None
        self._passes: deque[_Open] = deque(maxlen=KEPT_PASSES)

    def begin(self, clock: Clock, number: int) -> None:
        self.clock = clock
        clock.enter(Phase.COMM)
        self._passes.append(_Open(clock.step, number, self._mark()))

    @contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Time the work of an action. An error inside says where it was."""
        clock = self.clock
        if clock is None:  # shapes are being learnt, or the model is evaluated
            yield
            return
        clock.enter(Phase.FORWARD if action.kind is Kind.FORWARD else Phase.BACKWARD)
        clock.on_action(action)
        started = self._mark()
        try:
            yield
        except Exception as error:
            error.add_note(f"in {action.words}")
            raise
        self._passes[-1].marks.append((action, started, self._mark()))
        clock.enter(Phase.COMM)
        clock.on_action(None)

    def order(self) -> list[Action]:
        """Return what the last pass ran, in that order."""
        return [action for action, _, _ in self._passes[-1].marks] if self._passes else []

    def passes(self) -> list[Pass]:
        """Return all kept passes; on a GPU, wait for them. The device lags behind the host: times
        on it are counted back from a moment that both know."""
        anchor = self._mark()
        if self.on_gpu:
            anchor.synchronize()
        now = time()
        return [
            Pass(
                step=made.step,
                number=made.number,
                started_at=now - _between(made.origin, anchor),
                actions=tuple(
                    Timed(action, _between(made.origin, a), _between(made.origin, b))
                    for action, a, b in made.marks
                ),
            )
            for made in self._passes
        ]

    def _mark(self) -> Any:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end) / 1000)
