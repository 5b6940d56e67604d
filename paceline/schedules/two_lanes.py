"""Schedules in which a rank alternates between two lanes: zbv, dualpipe and dualpipev.

zbv is zero bubble with two stages per rank, placed as a V, so that the last stage is on rank 0
(https://arxiv.org/abs/2401.10241, section 6): rank r has the stages r (lane 0, going down the V)
and 2P - 1 - r (lane 1, coming up).

dualpipe and dualpipev run forward and backward at once, in the eight steps of DeepSeek-V3
(https://arxiv.org/abs/2412.19437, figure 5, and https://github.com/deepseek-ai/DualPipe). In
DualPipe the lanes are two directions: half the microbatches enter at rank 0, half at the last rank;
rank r holds stage r for the one and stage P - 1 - r for the other, and all parameters exist twice.
DualPipeV cuts that in half at the middle: P ranks, 2P stages placed as a V, one direction,
parameters held once. The order of a rank is the same function of its distance from the outer end,
so it is written once.
"""

from collections import defaultdict
from dataclasses import dataclass

from paceline.schedules.actions import Action, Kind, Slot


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
        """Return a whole backward."""
        return self._next("backward", Kind.BACKWARD, lane)

    def input(self, lane: int) -> Action:
        """Return an input backward, whose weight gradients are now owed."""
        action = self._next("backward", Kind.INPUT, lane)
        self._pending.append(action)
        return action

    def weight(self) -> Action:
        """Return the weight backward that is owed longest."""
        return self._settle(self._pending[0])

    def weight_of(self, lane: int) -> Action:
        """Return the weight backward that this lane owes longest."""
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


def order_zbv(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    """Order the actions so that there is no bubble if forward, input and weight backward take
    equally long. It is drawn for at least 2P - 1 microbatches; with fewer, those that do not exist
    are left out."""
    tally = Tally((Lane(rank), Lane(2 * num_ranks - 1 - rank)))
    wanted = max(2 * num_ranks - 1, num_microbatches)
    phases = {
        "warm-up": _warmup(tally, rank, num_ranks),
        "steady": _steady(tally, wanted),
        "cool-down": _cooldown(tally, rank, num_ranks),
        "weights": _weights(tally),
    }
    return [
        Slot((action,), phase)
        for phase, actions in phases.items()
        for action in actions
        if action.microbatch < num_microbatches
    ]


def _warmup(tally: Tally, rank: int, num_ranks: int) -> list[Action]:
    actions = [tally.forward(0) for _ in range(2 * (num_ranks - rank) - 1)]
    for _ in range(rank):
        actions += [tally.forward(1), tally.forward(0)]
    for _ in range(num_ranks - rank):
        actions += [tally.forward(1), tally.input(1), tally.weight_of(1)]
    return actions


def _steady(tally: Tally, wanted: int) -> list[Action]:
    actions = []
    while tally.num_forwards(1) < wanted:
        if tally.num_forwards(0) < wanted:
            actions.append(tally.forward(0))
        actions += [tally.input(0), tally.weight_of(0)]
        actions += [tally.forward(1), tally.input(1), tally.weight_of(1)]
    return actions


def _cooldown(tally: Tally, rank: int, num_ranks: int) -> list[Action]:
    actions = []
    for _ in range(rank):
        actions += [tally.input(0), tally.input(1)]
    for _ in range(num_ranks - rank):
        actions += [tally.input(0), tally.weight_of(0)]
    return actions


def _weights(tally: Tally) -> list[Action]:
    return [tally.weight_of(lane) for lane in (1, 0) for _ in range(tally.num_owed(lane))]


# The labels of the paper's repository; 0 is the lane that starts at the near end. `&`: overlapped.
PHASES = (
    "1 F0",
    "2 F0 F1",
    "3 I1 W1 F1",
    "4 F0&B1 F1&B0",
    "5 B1 F1&B0",
    "6 B1 B0",
    "7 W I0",
    "8 W",
)


def order_dualpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    """Order the actions of DualPipe. The second half of the ranks mirrors the first: its near end
    is the last rank."""
    down = Lane(stage=rank, direction=0)
    up = Lane(num_ranks - 1 - rank, direction=1, first_microbatch=num_microbatches // 2)
    is_first_half = rank < num_ranks // 2
    tally = Tally((down, up) if is_first_half else (up, down))
    depth = min(rank, num_ranks - 1 - rank)
    return _eight_steps(tally, depth, num_ranks // 2, num_microbatches // 2)


def order_dualpipev(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    tally = Tally((Lane(rank), Lane(2 * num_ranks - 1 - rank)))
    return _eight_steps(tally, rank, num_ranks, num_microbatches)


def _eight_steps(tally: Tally, depth: int, num_depths: int, num_microbatches: int) -> list[Slot]:
    """Run DualPipe's eight steps. `depth`: ranks between this one and the end where its lane 0
    starts; `num_microbatches` of each lane."""
    above = num_depths - 1 - depth
    order: list[Slot] = []

    def add(step: int, *actions: Action) -> None:
        order.extend(Slot((action,), PHASES[step - 1]) for action in actions)

    def add_pair(step: int, forward: Action, backward: Action) -> None:
        order.append(Slot((forward, backward), PHASES[step - 1]))

    for _ in range(2 * above):
        add(1, tally.forward(0))
    for _ in range(depth + 1):
        add(2, tally.forward(0), tally.forward(1))
    for _ in range(above):
        add(3, tally.input(1), tally.weight(), tally.forward(1))
    for number in range(num_microbatches - 2 * num_depths + depth + 1):
        if number == 0 and above == 0:
            # Not overlapped in the middle: the neighbour waits for this forward.
            add(4, tally.forward(0), tally.backward(1))
        else:
            add_pair(4, tally.forward(0), tally.backward(1))
        add_pair(4, tally.forward(1), tally.backward(0))
    for _ in range(above):
        add(5, tally.backward(1))
        add_pair(5, tally.forward(1), tally.backward(0))
    # The second half of the rest leaves its weight gradients for later, to fill steps 7 and 8.
    for number in range(2 * (depth + 1)):
        lane = 1 - number % 2
        add(6, tally.backward(lane) if number <= depth else tally.input(lane))
    for _ in range(above):
        add(7, tally.weight(), tally.input(0))
    for _ in range(depth + 1):
        add(8, tally.weight())
    return order
