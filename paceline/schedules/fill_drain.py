"""All forwards, then all backwards: gpipe, and looped_bfs where a rank has several stages.

gpipe: https://arxiv.org/abs/1811.06965. looped_bfs: https://arxiv.org/abs/2211.05953.
"""

from paceline.schedules.actions import Action, Kind, Slot


def order_gpipe(rank: int, num_microbatches: int) -> list[Slot]:
    """Backwards in the order of the forwards, as torch runs them."""
    microbatches = range(num_microbatches)
    return [Slot((Action(Kind.FORWARD, rank, m),), "forwards") for m in microbatches] + [
        Slot((Action(Kind.BACKWARD, rank, m),), "backwards") for m in microbatches
    ]


def order_looped_bfs(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """Breadth first: all microbatches of a stage, then the rank's next stage; back the same way."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    forwards = [Action(Kind.FORWARD, s, m) for s in stages for m in range(num_microbatches)]
    return [Slot((action,), "forwards") for action in forwards] + [
        Slot((Action(Kind.BACKWARD, action.stage, action.microbatch),), "backwards")
        for action in reversed(forwards)
    ]
