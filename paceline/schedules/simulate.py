"""A schedule and times -> when each action runs, on every rank: a discrete-event simulation.

A rank runs its slots in order and waits for the inputs of the next one. Results travel while ranks
compute; a link carries one at a time, each direction separately.
"""

from collections.abc import Container, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.schedules.actions import Action, Kind, Schedule, Slot
from paceline.schedules.timeline import Interval, RankTimeline, Timeline, Times, Transfer


class Pairing(StrEnum):
    """How a forward and a backward that a schedule overlaps are run.

    in_turn     one after the other, each as its own input is there: what our DualPipe does
    late_sends  the same, but both results leave at the end of the pair: what torch does
    fused       at once: both inputs are waited for, and both results leave at the end
    """

    IN_TURN = "in_turn"
    LATE_SENDS = "late_sends"
    FUSED = "fused"


def pairing_of(name: str) -> Pairing:
    """Return how the engine of this schedule runs its pairs: DualPipeV's is torch's."""
    return Pairing.LATE_SENDS if name == "dualpipev" else Pairing.IN_TURN


class DeadlockError(ConfigError):
    """No rank can continue: the schedule's orders wait for each other."""


def simulate(schedule: Schedule, times: Times, pairing: Pairing = Pairing.IN_TURN) -> Timeline:
    """Simulate one step of the schedule; raise DeadlockError with what each rank waits for."""
    return _Simulation(schedule, times, pairing).run()


class _Step(NamedTuple):
    """What a rank does without waiting for others in between: an action, or a pair."""

    actions: tuple[Action, ...]
    is_pair: bool

    def __str__(self) -> str:
        return "&".join(str(action) for action in self.actions)


class _Simulation:
    def __init__(self, schedule: Schedule, times: Times, pairing: Pairing) -> None:
        self.schedule, self.pairing = schedule, pairing
        self.times = times.of_stages(schedule.num_stages)
        self.orders = [list(self._steps(order)) for order in schedule.ranks]
        self.position = [0] * schedule.num_ranks  # the slot of each rank that comes next
        self.free_at = [0.0] * schedule.num_ranks
        self.intervals: list[list[Interval]] = [[] for _ in range(schedule.num_ranks)]
        self.ended: dict[Action, float] = {}
        self.arrived: dict[Action, float] = {}  # when the rank that needs the result has it
        self.link_free_at: dict[tuple[int, int], float] = {}
        self.transfers: list[Transfer] = []

    def run(self) -> Timeline:
        """Advance every rank as far as possible, again and again. A rank's next start depends only
        on what others have finished, so the order of ranks changes nothing."""
        while any(self._left(rank) for rank in range(self.schedule.num_ranks)):
            moved = [self._advance(rank) for rank in range(self.schedule.num_ranks)]
            if not any(moved):
                raise DeadlockError(self._describe_deadlock())
        ranks = tuple(
            RankTimeline(rank, tuple(intervals), self._arrivals(intervals))
            for rank, intervals in enumerate(self.intervals)
        )
        return Timeline(self.schedule, max(self.free_at), ranks, tuple(self.transfers))

    def _steps(self, order: Sequence[Slot]) -> Iterator[_Step]:
        """Yield the steps of a rank. A pair that runs in turn is two: its forward does not wait for
        its backward's input."""
        for slot in order:
            if self.pairing == Pairing.IN_TURN:
                yield from (_Step((action,), slot.is_pair) for action in slot.actions)
            else:
                yield _Step(slot.actions, slot.is_pair)

    def _left(self, rank: int) -> bool:
        return self.position[rank] < len(self.orders[rank])

    def _advance(self, rank: int) -> bool:
        before = self.position[rank]
        while self._left(rank):
            step = self.orders[rank][self.position[rank]]
            if self._missing(step):
                break
            self._run_step(rank, step)
            self.position[rank] += 1
        return self.position[rank] > before

    def _run_step(self, rank: int, step: _Step) -> None:
        start = max(self.free_at[rank], self._inputs_at(step.actions[0]))
        if self.pairing == Pairing.FUSED and len(step.actions) > 1:
            start = max(start, *(self._inputs_at(action) for action in step.actions))
            spans = [(start, start + sum(map(self.times.of, step.actions)))] * len(step.actions)
        else:
            spans = [(start, start + self.times.of(step.actions[0]))]
            for action in step.actions[1:]:
                start = max(spans[-1][1], self._inputs_at(action))
                spans.append((start, start + self.times.of(action)))
        self.free_at[rank] = spans[-1][1]
        for action, (start, end) in zip(step.actions, spans, strict=True):
            self.intervals[rank].append(Interval(action, start, end, step.is_pair))
            self.ended[action] = end
            # Results of a step leave together: of a pair that runs in turn, each half is a step.
            self._send(rank, action, self.free_at[rank])

    def _send(self, rank: int, action: Action, ready_at: float) -> None:
        target = _taker(action, self.schedule.num_stages)
        if target is None:
            return
        home = self.schedule.homes[action.direction][target]
        if home == rank:
            self.arrived[action] = self.ended[action]
            return
        start = max(ready_at, self.link_free_at.get((rank, home), 0.0))
        end = start + self.times.transfer_s[min(action.stage, target)]
        self.link_free_at[rank, home] = self.arrived[action] = end
        self.transfers.append(Transfer(action, rank, home, start, end))

    def _inputs_at(self, action: Action) -> float:
        given = [self.arrived[need] for need in self._given(action)]
        return max([0.0, *given, *(self.ended[need] for need in _own_needs(action))])

    def _given(self, action: Action) -> list[Action]:
        giver = giver_of(action, self.schedule.num_stages, self.arrived)
        return [] if giver is None else [giver]

    def _missing(self, step: _Step) -> list[Action]:
        """Return what has to happen elsewhere, or earlier, before this step can run."""
        missing: list[Action] = []
        for action in step.actions:
            missing += [need for need in self._given(action) if need not in self.arrived]
            missing += [need for need in _own_needs(action) if need not in self.ended]
        return missing

    def _arrivals(self, intervals: list[Interval]) -> dict[Action, float]:
        actions = [interval.action for interval in intervals]
        return {action: self.arrived[n] for action in actions for n in self._given(action)}

    def _describe_deadlock(self) -> list[str]:
        lines = [f"{self.schedule.name}: no rank can continue"]
        for rank, position in enumerate(self.position):
            if self._left(rank):
                step = self.orders[rank][position]
                needs = ", ".join(
                    f"{need} of rank {self.schedule.home(need)}" for need in self._missing(step)
                )
                lines.append(f"rank {rank} waits before {step} for {needs}")
        return lines


def giver_of(action: Action, num_stages: int, ran: Container[Action]) -> Action | None:
    """Return what another stage has to finish first; of the two kinds of backward, the one that
    ran."""
    if action.kind == Kind.FORWARD and action.stage > 0:
        return _at(action, Kind.FORWARD, action.stage - 1)
    if action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage < num_stages - 1:
        half = _at(action, Kind.INPUT, action.stage + 1)
        return half if half in ran else _at(action, Kind.BACKWARD, action.stage + 1)
    return None


def _own_needs(action: Action) -> list[Action]:
    """Return what the same stage must have done with the same microbatch before."""
    if action.kind == Kind.FORWARD:
        return []
    return [_at(action, Kind.INPUT if action.kind == Kind.WEIGHT else Kind.FORWARD, action.stage)]


def _taker(action: Action, num_stages: int) -> int | None:
    """Return the stage that waits for this action's result."""
    if action.kind == Kind.FORWARD:
        return action.stage + 1 if action.stage < num_stages - 1 else None
    if action.kind == Kind.WEIGHT or action.stage == 0:
        return None
    return action.stage - 1


def _at(action: Action, kind: Kind, stage: int) -> Action:
    return Action(kind, stage, action.microbatch, action.direction)
