"""Our orders are torch's own, for the engine runs torch's schedules and the simulator times ours.

No process group: torch's schedules only ask a stage where it is, and what it runs is written down.
"""

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import Identity

from paceline.errors import ConfigError
from paceline.schedules.orders import draw_schedule
from paceline.schedules.requirements import takes_microbatches

MULTI = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped_bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved_zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
STAGES = {
    "interleaved_1f1b": (2, 3),
    "looped_bfs": (2, 3),
    "interleaved_zb": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}
SHAPES = [
    (name, ranks, microbatches, stages)
    for name in MULTI
    for ranks, microbatches, stages in product(
        (1, 2, 3, 4, 6), (1, 3, 4, 7, 8, 12, 16), STAGES[name]
    )
]


class RecordingStage:
    """Stands in for a stage of `rank`: has nothing to send, and writes down what it is told."""

    def __init__(self, rank: int, num_ranks: int, num_stages: int) -> None:
        self.stage_index = self.group_rank = rank
        self.group_size, self.num_stages = num_ranks, num_stages
        self.is_first, self.is_last = rank == 0, rank == num_stages - 1
        self.has_backward, self.submod = True, Identity()
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_ops"):
            return lambda microbatch: []
        if name == "perform_reduce_grad":
            return lambda factor: None
        raise AttributeError(name)


def ran_by_torch(name: str, rank: int, num_ranks: int, num_microbatches: int) -> list[str]:
    """What the schedule's own loop does on one rank. Its `pipeline_order` is for drawing only, and
    that of 1F1B is wrong on the last rank (it starts at microbatch 1)."""
    stage = RecordingStage(rank, num_ranks, num_ranks)
    schedule = SINGLE[name](stage, num_microbatches)
    schedule._initialize_stage = lambda *args: None
    schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return stage.ran


def drawn_by_torch(name: str, ranks: int, microbatches: int, stages: int) -> list[list[str]]:
    """The order that torch's runtime executes, without sends, receives and idle slots."""
    made = [RecordingStage(0, ranks, ranks * stages) for _ in range(stages)]
    order = MULTI[name](made, microbatches).pipeline_order
    return [[name_of(a) for a in order[rank] if a is not None] for rank in range(ranks)]


def name_of(action: Any) -> str:
    if action.sub_actions:
        return "&".join(str(sub) for sub in action.sub_actions)
    return str(action)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9)]
)
def test_order_is_what_torch_runs(name: str, num_ranks: int, num_microbatches: int) -> None:
    drawn = draw_schedule(name, num_ranks, num_microbatches)
    for rank in range(num_ranks):
        ours = [str(slot) for slot in drawn.ranks[rank]]
        assert ours == ran_by_torch(name, rank, num_ranks, num_microbatches)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "stages"), SHAPES)
def test_order_is_torchs(name: str, ranks: int, microbatches: int, stages: int) -> None:
    """And what torch refuses we refuse, and the other way round."""
    try:
        theirs = drawn_by_torch(name, ranks, microbatches, stages)
    except ValueError:
        assert not takes_microbatches(name, ranks, microbatches)
        with pytest.raises(ConfigError, match="microbatches"):
            draw_schedule(name, ranks, microbatches, stages)
        return
    drawn = draw_schedule(name, ranks, microbatches, stages)
    assert [[str(slot) for slot in order] for order in drawn.ranks] == theirs


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "looped_bfs"])
def test_stages_lie_where_torch_puts_them(name: str) -> None:
    made = [RecordingStage(0, 4, 8) for _ in range(2)]
    schedule = MULTI[name](made, 8)
    homes = draw_schedule(name, 4, 8, 2).homes[0]
    assert dict(enumerate(homes)) == schedule.stage_index_to_group_rank


def test_torch_asks_1f1b_for_as_many_microbatches_as_ranks() -> None:
    with pytest.raises(ValueError, match="must be greater than"):
        SINGLE["1f1b"](RecordingStage(0, 4, 4), 3)
    with pytest.raises(ConfigError, match="set strategy.microbatches to 4"):
        draw_schedule("1f1b", 4, 3)
