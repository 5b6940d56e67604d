"""dualpipe and dualpipev: forward and backward at once, in the eight steps of DeepSeek-V3.

https://arxiv.org/abs/2412.19437, figure 5, and https://github.com/deepseek-ai/DualPipe. Each rank
alternates between two lanes. In DualPipe they are two directions: half the microbatches enter at
rank 0, half at the last rank; rank r holds stage r for the one and stage P - 1 - r for the other,
and all parameters exist twice. DualPipeV cuts that in half at the middle: P ranks, 2P stages placed
as a V, one direction, parameters held once. The order of a rank is the same function of its
distance from the outer end, so it is written once.
"""

from paceline.schedules.actions import Action, Slot
from paceline.schedules.tally import Lane, Tally

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
    """The second half of the ranks mirrors the first: its near end is the last rank."""
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
    """`depth`: ranks between this one and the end where its lane 0 starts; `num_microbatches` of
    each lane."""
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
