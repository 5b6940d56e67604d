"""The next microbatch of each lane: what zbv, dualpipe and dualpipev are written with."""

from collections import defaultdict
from dataclasses import dataclass

from paceline.schedules.actions import Action, Kind


@dataclass(frozen=True)
class Lane:
    """One of the two stages that a rank alternates between, and the first microbatch it sees."""

    stage: int
    direction: int = 0
    first_microbatch: int = 0


class Tally:
    """Hands out actions in microbatch order, lane by lane. Weight gradients wait in a queue."""

    def __init__(self, lanes: tuple[Lane, Lane]) -> None:
        self._lanes = lanes
        self._counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._pending: list[Action] = []

    def num_forwards(self, lane: int) -> int:
        return self._counts["forward", lane]

    def forward(self, lane: int) -> Action:
        return self._next("forward", Kind.FORWARD, lane)

    def backward(self, lane: int) -> Action:
        """A whole backward."""
        return self._next("backward", Kind.BACKWARD, lane)

    def input(self, lane: int) -> Action:
        """An input backward, whose weight gradients are now owed."""
        action = self._next("backward", Kind.INPUT, lane)
        self._pending.append(action)
        return action

    def weight(self) -> Action:
        """The weight backward that is owed longest."""
        return self._settle(self._pending[0])

    def weight_of(self, lane: int) -> Action:
        """The weight backward that this lane owes longest."""
        return self._settle(next(a for a in self._pending if a.stage == self._lanes[lane].stage))

    def num_owed(self, lane: int) -> int:
        return sum(a.stage == self._lanes[lane].stage for a in self._pending)

    def _settle(self, owed: Action) -> Action:
        self._pending.remove(owed)
        return Action(Kind.WEIGHT, owed.stage, owed.microbatch, owed.direction)

    def _next(self, count: str, kind: Kind, lane: int) -> Action:
        number = self._counts[count, lane]
        self._counts[count, lane] += 1
        home = self._lanes[lane]
        return Action(kind, home.stage, home.first_microbatch + number, home.direction)
