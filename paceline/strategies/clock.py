"""Where a step's time goes, without adding a synchronisation to it.

The loop and the engine call `clock.enter("forward")` when a phase begins; the phase before it
ends there. `marks` counts them: it grows in a long evaluation and stands still in a hang. On CPU a
phase is host time. On GPU phases and the step itself are times between CUDA events on the stream,
read only once the device has passed them: the host runs ahead, so its own clock would show when
work was handed over, not how long it took.

    phase     |---- data ----|---- forward ----|-------- backward --------|-- optimizer --|
    blocked                                                     ^ arrival ~~~~~~~| exchange

`clock.blocked()` is around what waits for other ranks: a collective of ours, FSDP's gathers, the
end of a backward pass in which DDP's buckets are still on their way (strategies/waits.py). On GPU
it is the time in which the stream of the step could not go on, so an exchange that is hidden behind
work counts as none. What is left of a phase is this rank's own work (paceline/health/work.py).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

import torch

from paceline.schedules.actions import Action

# What an engine calls when it begins an action of a pipeline; with None when it is in none.
OnAction = Callable[[Action | None], None]


@dataclass(slots=True)
class StepTimes:
    """One step of one rank, in seconds. `wall_s` is from the start of this step to that of the
    next; `blocked_s` is the part of each phase in which it waited in collectives, None if not
    known."""

    step: int
    wall_s: float
    phases_s: dict[str, float]
    blocked_s: dict[str, float] | None = None

    @property
    def step_s(self) -> float:
        """Return what throughput divides by: wall time without the evaluation after the step."""
        return self.wall_s - self.phases_s.get("eval", 0.0)

    @property
    def unaccounted_s(self) -> float:
        """Return the wall time that no phase saw."""
        return self.wall_s - sum(self.phases_s.values())


class _BaseClock(ABC):
    """What both clocks report to their listeners: the step, the phase, and that something moves."""

    def __init__(self, is_alone: bool = False) -> None:
        self.is_alone = is_alone  # there are no other ranks to wait for
        self.step, self.phase, self.marks = 0, "start", 0
        self.on_step: Callable[[int], None] = lambda step: None
        self.on_action: OnAction = lambda action: None
        self.on_phase: list[Callable[[str], None]] = []  # told of each phase as it begins
        self._is_open = False
        self.knows_blocked = False  # True once an engine reports where it waits
        self._depth = 0

    @property
    def is_here(self) -> bool:
        """Say whether what is called now runs where the step does."""
        return True

    def blocked(self) -> AbstractContextManager[None]:
        """Count what is inside as waiting for other ranks."""
        return self  # a generator for each call would double the cost

    def __enter__(self) -> None:
        self.block()

    def __exit__(self, *error: object) -> None:
        self.unblock()

    def block(self) -> None:
        """Begin to wait, unless it is waiting already."""
        if self.is_alone:
            return
        self._depth += 1
        if self._depth == 1:
            self._note_blocked()

    def unblock(self) -> None:
        if self._depth == 1:
            self._note_unblocked()
        self._depth = max(0, self._depth - 1)

    @abstractmethod
    def _note_blocked(self) -> None: ...

    @abstractmethod
    def _note_unblocked(self) -> None: ...

    def begin(self, step: int) -> None:
        """End the step before, if there is one, and start `step` in phase data."""
        self.pause("data")
        self.step, self._is_open = step, True
        self.on_step(step)

    def withdraw(self) -> None:
        """Undo the start of a step for which there is no batch."""
        self.step, self._is_open = self.step - 1, False

    @abstractmethod
    def pause(self, phase: str) -> None:
        """End the step before, if there is one; what follows belongs to no step."""

    def _turn_to(self, phase: str) -> None:
        self.phase = phase
        self.marks += 1
        for tell in self.on_phase:
            tell(phase)


class HostClock(_BaseClock):
    """Phases by the host's clock: right where the host does the work itself."""

    def __init__(self, is_alone: bool = False) -> None:
        super().__init__(is_alone)
        self._times: dict[str, float] = {}
        self._blocked: dict[str, float] = {}
        self._blocked_at = 0.0
        self._started_at = self._entered_at = perf_counter()
        self._done: list[StepTimes] = []

    def pause(self, phase: str) -> None:
        now = perf_counter()
        if self._is_open:
            self._times[self.phase] = self._times.get(self.phase, 0.0) + now - self._entered_at
            blocked = self._blocked if self.knows_blocked else None
            self._done.append(StepTimes(self.step, now - self._started_at, self._times, blocked))
        self._times, self._blocked, self._is_open = {}, {}, False
        self._started_at = self._entered_at = now
        self._turn_to(phase)

    def enter(self, phase: str) -> None:
        now = perf_counter()
        self._times[self.phase] = self._times.get(self.phase, 0.0) + now - self._entered_at
        self._entered_at = now
        self._turn_to(phase)

    def _note_blocked(self) -> None:
        self._blocked_at = perf_counter()

    def _note_unblocked(self) -> None:
        waited = perf_counter() - self._blocked_at
        self._blocked[self.phase] = self._blocked.get(self.phase, 0.0) + waited

    def finished(self, wait: bool = False) -> list[StepTimes]:
        """Steps whose times are known since the last call."""
        done, self._done = self._done, []
        return done


Event = torch.cuda.Event


@dataclass(slots=True)
class _Recorded:
    """A step by its events: where phases began, and where the stream waited in which of them."""

    step: int
    marks: list[tuple[str, Event]]
    waits: list[tuple[str, Event, Event]]
    knows_blocked: bool


class DeviceClock(_BaseClock):
    """Steps and phases by CUDA events on the current stream."""

    def __init__(self, is_alone: bool = False) -> None:
        super().__init__(is_alone)
        self._free: list[Event] = []
        self._marks: list[tuple[str, Event]] = []
        self._waits: list[tuple[str, Event, Event]] = []
        self._wait: Event | None = None
        self._open: deque[_Recorded] = deque()
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_here(self) -> bool:
        return torch.cuda.current_stream() == self._stream

    def pause(self, phase: str) -> None:
        # One event ends a step and starts the next, so that steps add up to the time of all.
        end = self._record()
        if self._is_open:
            marks = [*self._marks, ("end", end)]
            self._open.append(_Recorded(self.step, marks, self._waits, self.knows_blocked))
        self._marks, self._waits, self._is_open = [(phase, end)], [], False
        self._turn_to(phase)

    def enter(self, phase: str) -> None:
        self._marks.append((phase, self._record()))
        self._turn_to(phase)

    def _turn_to(self, phase: str) -> None:
        self._stream = torch.cuda.current_stream()
        super()._turn_to(phase)

    def _note_blocked(self) -> None:
        self._wait = self._record()

    def _note_unblocked(self) -> None:
        assert self._wait is not None, "it was blocked"
        self._waits.append((self.phase, self._wait, self._record()))

    def finished(self, wait: bool = False) -> list[StepTimes]:
        return list(self._iter_finished(wait))

    def _iter_finished(self, wait: bool) -> Iterator[StepTimes]:
        while self._open and (wait or self._open[0].marks[-1][1].query()):
            made = self._open.popleft()
            marks = made.marks
            marks[-1][1].synchronize()
            phases: dict[str, float] = {}
            for (phase, start), (_, end) in zip(marks, marks[1:], strict=False):
                phases[phase] = phases.get(phase, 0.0) + start.elapsed_time(end) / 1000
            wall_s = marks[0][1].elapsed_time(marks[-1][1]) / 1000
            self._free += [event for _, event in marks[:-1]]  # the last one starts the next step
            yield StepTimes(made.step, wall_s, phases, self._blocked_in(made))

    def _blocked_in(self, made: _Recorded) -> dict[str, float] | None:
        blocked: dict[str, float] = {}
        for phase, start, end in made.waits:
            blocked[phase] = blocked.get(phase, 0.0) + start.elapsed_time(end) / 1000
            self._free += [start, end]
        return blocked if made.knows_blocked else None

    def _record(self) -> Event:
        event = self._free.pop() if self._free else Event(enable_timing=True)
        event.record()
        return event


Clock = HostClock | DeviceClock


def build_clock(device: torch.device, is_alone: bool = False) -> Clock:
    return DeviceClock(is_alone) if device.type == "cuda" else HostClock(is_alone)
