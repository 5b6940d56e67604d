"""When every action of every rank ran: what the simulator predicts, and what a run measured.

From the intervals alone follow busy and idle time, activations in flight and queues.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedules.actions import Action, Kind, Schedule
from paceline.schedules.times import PerStage, spread

Level = tuple[float, float]  # a moment, and the level from then on


@dataclass(frozen=True, slots=True)
class Interval:
    """An action from start to end, in seconds since the step began."""

    action: Action
    started_s: float
    ended_s: float
    is_paired: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """An action's result on its way to another rank; or, on the same rank, handed over."""

    action: Action
    source: int
    target: int
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class RankTimeline:
    """One rank. `arrivals`: what its actions were given, by the action that takes it."""

    rank: int
    intervals: tuple[Interval, ...]
    arrivals: dict[Action, float]

    @cached_property
    def busy_s(self) -> float:
        """Overlapped actions count once."""
        busy, until = 0.0, float("-inf")
        for interval in sorted(self.intervals, key=lambda i: i.started_s):
            busy += max(0.0, interval.ended_s - max(until, interval.started_s))
            until = max(until, interval.ended_s)
        return busy

    @cached_property
    def in_flight(self) -> list[Level]:
        """Activations held: from the start of a forward until its weights have their gradient."""
        return self.held([1.0] * (1 + max((i.action.stage for i in self.intervals), default=0)))

    @cached_property
    def max_in_flight(self) -> int:
        return round(peak(self.in_flight))

    def held(self, activation: Sequence[float]) -> list[Level]:
        """Return what is held over time: `activation[stage]` from the start of a forward to the end
        of its backward, or of the half of it that makes weight gradients."""
        changes = []
        for interval in self.intervals:
            size = activation[interval.action.stage]
            if interval.action.kind == Kind.FORWARD:
                changes.append((interval.started_s, size))
            elif interval.action.kind != Kind.INPUT:
                changes.append((interval.ended_s, -size))
        return levels(changes)

    def queue(self, kind: Kind) -> list[Level]:
        """Microbatches that had arrived and waited: for a forward, or for a backward of any sort.
        One that is taken as it comes was never in the queue."""
        changes = []
        for interval in self.intervals:
            arrived_s = self.arrivals.get(interval.action)
            is_forward = interval.action.kind == Kind.FORWARD
            if arrived_s is None or is_forward != (kind == Kind.FORWARD):
                continue
            if arrived_s < interval.started_s:
                changes += [(arrived_s, 1.0), (interval.started_s, -1.0)]
        return levels(changes)

    def max_queue(self, kind: Kind) -> int:
        return round(peak(self.queue(kind)))


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline. `total_s`: from the first start to the last end."""

    schedule: Schedule
    total_s: float
    ranks: tuple[RankTimeline, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they had nothing to do."""
        busy = sum(rank.busy_s for rank in self.ranks)
        return 1 - busy / (self.total_s * len(self.ranks)) if self.total_s else 0.0

    def utilisation(self, rank: int) -> float:
        return self.ranks[rank].busy_s / self.total_s if self.total_s else 0.0

    def peak_bytes(self, activation_bytes: PerStage) -> list[float]:
        """The most activations that each rank holds at once."""
        sizes = spread("activation_bytes", activation_bytes, self.schedule.num_stages)
        return [peak(rank.held(sizes)) for rank in self.ranks]


def levels(changes: Iterable[tuple[float, float]]) -> list[Level]:
    """Changes -> the level after each moment. What ends at a moment makes room for what starts."""
    level, after = 0.0, []
    for moment, change in sorted(changes):
        level += change
        after.append((moment, level))
    return after


def peak(over_time: Sequence[Level]) -> float:
    return max((level for _, level in over_time), default=0.0)
