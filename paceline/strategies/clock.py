"""Where a step's time goes, without adding a synchronisation to it.

The loop and the engine call `clock.enter("forward")` when a phase begins; the phase before it
ends there. `marks` counts them: it grows in a long evaluation and stands still in a hang. On CPU a
phase is host time. On GPU phases and the step itself are times between CUDA events on the stream,
read only once the device has passed them: the host runs ahead, so its own clock would show when
work was handed over, not how long it took.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from paceline.schedules.actions import Action

# What an engine calls as it begins an action of a pipeline; with None when it is in none.
OnAction = Callable[[Action | None], None]


@dataclass(slots=True)
class StepTimes:
    """One step of one rank, in seconds. `wall_s` runs from this step's start to the next one's."""

    step: int
    wall_s: float
    phases_s: dict[str, float]

    @property
    def step_s(self) -> float:
        """Return what throughput divides by: wall time without the evaluation after the step."""
        return self.wall_s - self.phases_s.get("eval", 0.0)

    @property
    def unaccounted_s(self) -> float:
        """Return the wall time that no phase saw."""
        return self.wall_s - sum(self.phases_s.values())


class _BaseClock(ABC):
    """What both clocks tell their listeners: the step, the phase, and that something moves."""

    def __init__(self) -> None:
        self.step, self.phase, self.marks = 0, "start", 0
        self.on_step: Callable[[int], None] = lambda step: None
        self.on_action: OnAction = lambda action: None
        self.on_phase: list[Callable[[str], None]] = []  # told of each phase as it begins
        self._is_open = False

    def begin(self, step: int) -> None:
        """End the step before, if there is one, and start `step` in phase data."""
        self.pause("data")
        self.step, self._is_open = step, True
        self.on_step(step)

    def withdraw(self) -> None:
        """Take back the step that was begun: there is no batch for it."""
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

    def __init__(self) -> None:
        super().__init__()
        self._times: dict[str, float] = {}
        self._started_at = self._entered_at = perf_counter()
        self._done: list[StepTimes] = []

    def pause(self, phase: str) -> None:
        now = perf_counter()
        if self._is_open:
            self._times[self.phase] = self._times.get(self.phase, 0.0) + now - self._entered_at
            self._done.append(StepTimes(self.step, now - self._started_at, self._times))
        self._times, self._is_open = {}, False
        self._started_at = self._entered_at = now
        self._turn_to(phase)

    def enter(self, phase: str) -> None:
        now = perf_counter()
        self._times[self.phase] = self._times.get(self.phase, 0.0) + now - self._entered_at
        self._entered_at = now
        self._turn_to(phase)

    def finished(self, wait: bool = False) -> list[StepTimes]:
        """Steps whose times are known since the last call."""
        done, self._done = self._done, []
        return done


class DeviceClock(_BaseClock):
    """Steps and phases by CUDA events on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._open: deque[tuple[int, list[tuple[str, torch.cuda.Event]]]] = deque()

    def pause(self, phase: str) -> None:
        # One event ends a step and starts the next, so that steps add up to the time of all.
        end = self._record()
        if self._is_open:
            self._open.append((self.step, [*self._marks, ("end", end)]))
        self._marks, self._is_open = [(phase, end)], False
        self._turn_to(phase)

    def enter(self, phase: str) -> None:
        self._marks.append((phase, self._record()))
        self._turn_to(phase)

    def finished(self, wait: bool = False) -> list[StepTimes]:
        return list(self._iter_finished(wait))

    def _iter_finished(self, wait: bool) -> Iterator[StepTimes]:
        while self._open and (wait or self._open[0][1][-1][1].query()):
            step, marks = self._open.popleft()
            marks[-1][1].synchronize()
            phases: dict[str, float] = {}
            for (phase, start), (_, end) in zip(marks, marks[1:], strict=False):
                phases[phase] = phases.get(phase, 0.0) + start.elapsed_time(end) / 1000
            wall_s = marks[0][1].elapsed_time(marks[-1][1]) / 1000
            self._free += [event for _, event in marks[:-1]]  # the last one starts the next step
            yield StepTimes(step, wall_s, phases)

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


Clock = HostClock | DeviceClock


def build_clock(device: torch.device) -> Clock:
    return DeviceClock() if device.type == "cuda" else HostClock()
