"""A schedule's name and its numbers -> the order of every rank, as plain data.

The engine runs it, the simulator times it, the report draws it. If torch has the schedule, the
order is torch's own (tests/unit/test_pipeline_torch.py), as the engine then runs torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.records.words import did_you_mean
from paceline.schedules.actions import Action, Kind, Schedule, Slot
from paceline.schedules.requirements import AUTO_STAGES, REQUIREMENTS, check_shape
from paceline.schedules.two_lanes import order_dualpipe, order_dualpipev, order_zbv

NAMES = tuple(REQUIREMENTS)


# All forwards, then all backwards. gpipe: https://arxiv.org/abs/1811.06965, and looped_bfs, where a
# rank has several stages: https://arxiv.org/abs/2211.05953.
def order_gpipe(rank: int, num_microbatches: int) -> list[Slot]:
    """Run backwards in the order of the forwards, as torch does."""
    microbatches = range(num_microbatches)
    return [Slot((Action(Kind.FORWARD, rank, m),), "forwards") for m in microbatches] + [
        Slot((Action(Kind.BACKWARD, rank, m),), "backwards") for m in microbatches
    ]


def order_looped_bfs(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """Go breadth first: all microbatches of a stage, then the rank's next stage; backwards in the
    same way."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    forwards = [Action(Kind.FORWARD, s, m) for s in stages for m in range(num_microbatches)]
    return [Slot((action,), "forwards") for action in forwards] + [
        Slot((Action(Kind.BACKWARD, action.stage, action.microbatch),), "backwards")
        for action in reversed(forwards)
    ]


# A few forwards, then forwards and backwards in turn. 1f1b and interleaved_1f1b:
# https://arxiv.org/abs/2104.04473, section 2.2. interleaved_zb (ZB-H1, with several stages per
# rank): https://arxiv.org/abs/2401.10241.
@dataclass(frozen=True)
class Rounds:
    """Microbatches go through a rank's stages in rounds: `per_round` of them through its first
    stage, then the same through its next. `rank` has the stages rank, rank + num_ranks, ..."""

    rank: int
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1

    @property
    def per_round(self) -> int:
        return self.num_microbatches // max(1, self.num_microbatches // self.num_ranks)

    @property
    def num_ops(self) -> int:
        return self.num_microbatches * self.stages_per_rank

    def forward(self, number: int) -> Action:
        return self._at(Kind.FORWARD, number, is_reversed=False)

    def backward(self, kind: Kind, number: int) -> Action:
        """Return the n-th backward (of any kind): they visit the rank's last stage first."""
        return self._at(kind, number, is_reversed=True)

    def _at(self, kind: Kind, number: int, is_reversed: bool) -> Action:
        turn, place = divmod(number, self.per_round)
        finished, chunk = divmod(turn, self.stages_per_rank)
        chunk = self.stages_per_rank - 1 - chunk if is_reversed else chunk
        stage = chunk * self.num_ranks + self.rank
        return Action(kind, stage, finished * self.per_round + place)


def order_1f1b(rank: int, num_ranks: int, num_microbatches: int) -> list[Slot]:
    """Let rank r run P - 1 - r forwards ahead, so it never holds more than P - r microbatches."""
    rounds = Rounds(rank, num_ranks, num_microbatches)
    return _alternate(rounds, warmup=num_ranks - 1 - rank)


def order_interleaved_1f1b(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """Run all but the last chunk of a round ahead, and two more for each rank behind this one."""
    rounds = Rounds(rank, num_ranks, num_microbatches, stages_per_rank)
    ahead = (stages_per_rank - 1) * rounds.per_round
    return _alternate(rounds, warmup=ahead + 2 * (num_ranks - 1 - rank))


def order_interleaved_zb(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Slot]:
    """Run only one more forward ahead for each rank behind; rank r lets its weight gradients lag by
    r, so that they fill what would be its bubble at the end."""
    rounds = Rounds(rank, num_ranks, num_microbatches, stages_per_rank)
    ahead = (stages_per_rank - 1) * rounds.per_round
    order = _alternate(rounds, warmup=ahead + num_ranks - 1 - rank, kind=Kind.INPUT)
    return _with_weights(rounds, order, lag=rank)


def _alternate(rounds: Rounds, warmup: int, kind: Kind = Kind.BACKWARD) -> list[Slot]:
    warmup = min(warmup, rounds.num_ops)
    order = [Slot((rounds.forward(number),), "warm-up") for number in range(warmup)]
    for number in range(rounds.num_ops - warmup):
        order.append(Slot((rounds.forward(warmup + number),), "steady"))
        order.append(Slot((rounds.backward(kind, number),), "steady"))
    for number in range(rounds.num_ops - warmup, rounds.num_ops):
        order.append(Slot((rounds.backward(kind, number),), "cool-down"))
    return order


def _with_weights(rounds: Rounds, order: list[Slot], lag: int) -> list[Slot]:
    """Put after the n-th input backward the weight backward of the one `lag` before it."""
    mixed, num_inputs, num_weights = [], 0, 0
    for slot in order:
        mixed.append(slot)
        num_inputs += slot.actions[0].kind == Kind.INPUT
        if slot.actions[0].kind == Kind.INPUT and num_inputs > lag:
            mixed.append(Slot((rounds.backward(Kind.WEIGHT, num_weights),), slot.phase))
            num_weights += 1
    rest = range(num_weights, rounds.num_ops)
    return mixed + [Slot((rounds.backward(Kind.WEIGHT, n),), "weights") for n in rest]


# rank, number of ranks, number of microbatches, stages per rank -> the order of that rank
Order = Callable[[int, int, int, int], list[Slot]]
ORDERS: dict[str, Order] = {
    "gpipe": lambda rank, ranks, microbatches, stages: order_gpipe(rank, microbatches),
    "1f1b": lambda rank, ranks, microbatches, stages: order_1f1b(rank, ranks, microbatches),
    "interleaved_1f1b": order_interleaved_1f1b,
    "looped_bfs": order_looped_bfs,
    "interleaved_zb": order_interleaved_zb,
    "zbv": lambda rank, ranks, microbatches, stages: order_zbv(rank, ranks, microbatches),
    "dualpipev": lambda rank, ranks, microbatches, stages: order_dualpipev(
        rank, ranks, microbatches
    ),
    "dualpipe": lambda rank, ranks, microbatches, stages: order_dualpipe(rank, ranks, microbatches),
}


def draw_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | Literal["auto"] = "auto",
) -> Schedule:
    """Draw the schedule, or raise ConfigError with everything that it cannot do and the nearest
    numbers that it can."""
    stages = require_shape(name, num_ranks, num_microbatches, stages_per_rank)
    ranks = tuple(
        tuple(ORDERS[name](rank, num_ranks, num_microbatches, stages)) for rank in range(num_ranks)
    )
    return Schedule(name, num_microbatches, place_stages(name, num_ranks, stages), ranks)


def require_name(name: str) -> None:
    if name not in REQUIREMENTS:
        guess = did_you_mean(name, NAMES)
        raise ConfigError(
            f"there is no schedule {name}\nhint: {guess}the schedules are {', '.join(NAMES)}"
        )


def require_shape(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | Literal["auto"]
) -> int:
    """Return the number of stages per rank; raise if the schedule cannot be drawn so."""
    require_name(name)
    stages = AUTO_STAGES[name] if stages_per_rank == "auto" else stages_per_rank
    if problems := check_shape(name, num_ranks, num_microbatches, stages):
        raise ConfigError([str(problem) for problem in problems])
    return stages


def place_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the rank of each stage, for each direction."""
    down = tuple(range(num_ranks))
    up = tuple(reversed(down))
    if name == "dualpipe":
        return down, up
    if name in ("zbv", "dualpipev"):
        return (down + up,)
    return (down * stages_per_rank,)
