"""zbv: zero bubble with two stages a rank, placed as a V, so that the last stage is on rank 0.

https://arxiv.org/abs/2401.10241, section 6. Rank r has the stages r (lane 0, going down the V) and
2P - 1 - r (lane 1, coming up).
"""

from paceline.schedules.actions import Action, Slot
from paceline.schedules.tally import Lane, Tally


def order_zbv(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    """The order that is free of bubbles where forward, input and weight backward take the same.
    It is drawn for at least 2P - 1 microbatches; with fewer, those that do not exist are left out.
    """
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
