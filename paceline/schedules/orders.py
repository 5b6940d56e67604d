"""A schedule's name and its numbers -> the order of every rank, as plain data.

The engine runs it, the simulator times it, the report draws it. Where torch has the schedule, the
order is torch's own (tests/unit/test_pipeline_torch.py), for that is what the engine runs then.
"""

from collections.abc import Callable
from typing import Literal

from paceline.errors import ConfigError
from paceline.records.words import did_you_mean
from paceline.schedules.actions import Schedule, Slot
from paceline.schedules.alternating import order_1f1b, order_interleaved_1f1b, order_interleaved_zb
from paceline.schedules.dualpipe import order_dualpipe, order_dualpipev
from paceline.schedules.fill_drain import order_gpipe, order_looped_bfs
from paceline.schedules.requirements import AUTO_STAGES, REQUIREMENTS, check_shape
from paceline.schedules.zbv import order_zbv

NAMES = tuple(REQUIREMENTS)
# rank, number of ranks, number of microbatches, stages a rank -> the order of that rank
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
    """The schedule, or a ConfigError with everything it cannot do and the nearest it can."""
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
    """The number of stages a rank; raises if the schedule cannot be drawn so."""
    require_name(name)
    stages = AUTO_STAGES[name] if stages_per_rank == "auto" else stages_per_rank
    if problems := check_shape(name, num_ranks, num_microbatches, stages):
        raise ConfigError([str(problem) for problem in problems])
    return stages


def place_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage, for each direction."""
    down = tuple(range(num_ranks))
    up = tuple(reversed(down))
    if name == "dualpipe":
        return down, up
    if name in ("zbv", "dualpipev"):
        return (down + up,)
    return (down * stages_per_rank,)
