"""When every action of every rank ran: what the simulator predicts, and what a run measured.

`Times` says how long each stage takes for a microbatch: given, counted or measured. From the
intervals of a `Timeline` alone follow busy and idle time, activations in flight and queues.
`draw_text` shows one in a terminal, a row per rank and a column per slot:

    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .

Small letters are a rank's later stages, or DualPipe's second direction.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import ConfigError
from paceline.schedules.actions import Action, Kind, Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Seconds: one number for all stages, or one for each. `transfer_s` is between a stage and the
    next, either way (one fewer than stages); it is 0 if both are on one rank."""

    forward_s: PerStage
    input_s: PerStage
    weight_s: PerStage
    transfer_s: PerStage = 0.0
    backward_s: PerStage | None = None  # a whole backward, where it is not the sum of its halves
    overhead_s: float = 0.0  # of the host, for every action

    def of_stages(self, num_stages: int) -> "StageTimes":
        """Return one number per stage, checked."""
        inputs = spread("input_s", self.input_s, num_stages)
        weights = spread("weight_s", self.weight_s, num_stages)
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        if self.backward_s is not None:
            whole = spread("backward_s", self.backward_s, num_stages)
        seconds = {
            Kind.FORWARD: spread("forward_s", self.forward_s, num_stages),
            Kind.BACKWARD: whole,
            Kind.INPUT: inputs,
            Kind.WEIGHT: weights,
        }
        transfer_s = spread("transfer_s", self.transfer_s, num_stages - 1)
        return StageTimes(seconds, transfer_s, self.overhead_s)


@dataclass(frozen=True)
class StageTimes:
    """`Times` with one number per stage; `transfer_s[s]` is between stage s and s + 1."""

    seconds: dict[Kind, list[float]]
    transfer_s: list[float]
    overhead_s: float

    def of(self, action: Action) -> float:
        return self.seconds[action.kind][action.stage] + self.overhead_s


def spread(name: str, value: PerStage, length: int) -> list[float]:
    """Return one number for each of `length`; raise if they are too few, too many, or not
    durations."""
    values = [float(value)] * length if isinstance(value, int | float) else list(map(float, value))
    if len(values) != length:
        raise ConfigError(f"{name} has {len(values)} values\nhint: give one number, or {length}")
    if not all(math.isfinite(v) and v >= 0 for v in values):
        raise ConfigError(f"{name} has a value that is negative or not a number: {values}")
    return values


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
    """One rank. `arrivals`: the inputs of its actions, by the action that uses them."""

    rank: int
    intervals: tuple[Interval, ...]
    arrivals: dict[Action, float]

    @cached_property
    def busy_s(self) -> float:
        """Return the seconds of work; overlapped actions count once."""
        busy, until = 0.0, float("-inf")
        for interval in sorted(self.intervals, key=lambda i: i.started_s):
            busy += max(0.0, interval.ended_s - max(until, interval.started_s))
            until = max(until, interval.ended_s)
        return busy

    @cached_property
    def in_flight(self) -> list[Level]:
        """Return the activations held: from the start of a forward until its weights have their
        gradient."""
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
        """Return the microbatches that had arrived and waited: for a forward, or for a backward of
        any kind. One that is used as it arrives was never in the queue."""
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
        """Return the share of all ranks' time in which they had nothing to do."""
        busy = sum(rank.busy_s for rank in self.ranks)
        return 1 - busy / (self.total_s * len(self.ranks)) if self.total_s else 0.0

    def utilisation(self, rank: int) -> float:
        return self.ranks[rank].busy_s / self.total_s if self.total_s else 0.0

    def peak_bytes(self, activation_bytes: PerStage) -> list[float]:
        """Return the most activations that each rank holds at once."""
        sizes = spread("activation_bytes", activation_bytes, self.schedule.num_stages)
        return [peak(rank.held(sizes)) for rank in self.ranks]


def levels(changes: Iterable[tuple[float, float]]) -> list[Level]:
    """Turn changes into the level after each moment. What ends at a moment is subtracted before
    what starts then."""
    level, after = 0.0, []
    for moment, change in sorted(changes):
        level += change
        after.append((moment, level))
    return after


def peak(over_time: Sequence[Level]) -> float:
    return max((level for _, level in over_time), default=0.0)


def draw_text(timeline: Timeline, slot_s: float = 1.0) -> str:
    """Draw the timeline as text. Made for times that are whole slots: an action starts in the
    column its start falls into."""
    num_slots = round(timeline.total_s / slot_s)
    cell = len(str(timeline.schedule.num_microbatches - 1)) + 2
    lines = [_row(timeline, rank, slot_s, num_slots, cell) for rank in timeline.ranks]
    return "\n".join(lines) + "\n"


def _row(timeline: Timeline, rank: RankTimeline, slot_s: float, num_slots: int, cell: int) -> str:
    columns = [".".ljust(cell)] * num_slots
    for interval in rank.intervals:
        start = round(interval.started_s / slot_s)
        length = max(1, round((interval.ended_s - interval.started_s) / slot_s))
        text = _label(timeline, interval).ljust(length * cell - 1, "-" if length > 1 else " ") + " "
        for number in range(length):
            columns[start + number] = text[number * cell : (number + 1) * cell]
    return f"rank {rank.rank}  {''.join(columns)}".rstrip()


def _label(timeline: Timeline, interval: Interval) -> str:
    action = interval.action
    is_second = action.direction == 1 or action.stage >= timeline.schedule.num_ranks
    text = f"{action.kind}{action.microbatch}"
    return text.lower() if is_second else text
