"""Schedules as data: complete, in an order that can run, and refused where they cannot be drawn."""

from collections import Counter

import pytest

from paceline.errors import ConfigError
from paceline.schedules.actions import Kind, Schedule
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.requirements import (
    nearest_microbatches,
    nearest_ranks,
    next_microbatches,
    takes_microbatches,
)
from paceline.schedules.two_lanes import PHASES


def all_shapes() -> list[tuple[str, int, int]]:
    return [
        (name, ranks, microbatches)
        for name in NAMES
        for ranks in (1, 2, 3, 4, 8)
        for microbatches in (1, 2, 6, 8, 16, 18)
        if nearest_ranks(name, ranks) == ranks and takes_microbatches(name, ranks, microbatches)
    ]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), all_shapes())
def test_every_microbatch_visits_every_stage_once(name: str, ranks: int, microbatches: int) -> None:
    drawn = draw_schedule(name, ranks, microbatches)
    seen = Counter(
        (action.kind, action.stage, action.microbatch)
        for rank in range(ranks)
        for action in drawn.iter_actions(rank)
    )
    assert set(seen.values()) == {1}
    for stage in range(drawn.num_stages):
        for microbatch in range(microbatches):
            done = {kind for kind in Kind if (kind, stage, microbatch) in seen}
            assert done in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT})


@pytest.mark.parametrize(("name", "ranks", "microbatches"), all_shapes())
def test_actions_run_where_their_stage_lies(name: str, ranks: int, microbatches: int) -> None:
    drawn = draw_schedule(name, ranks, microbatches)
    for rank in range(ranks):
        assert {drawn.home(action) for action in drawn.iter_actions(rank)} == {rank}
        assert {action.stage for action in drawn.iter_actions(rank)} == set(drawn.stages_of(rank))


def phases_of(schedule: Schedule, rank: int) -> dict[str, str]:
    """Phase -> its kinds and lanes, as in the paper's figure."""
    lanes: dict[str, list[str]] = {}
    for slot in schedule.ranks[rank]:
        lanes.setdefault(slot.phase, []).append(str(slot))
    return {phase: " ".join(slots) for phase, slots in lanes.items()}


def test_dualpipe_has_the_eight_steps() -> None:
    """8 ranks and 20 microbatches, the shape of figure 5 of arXiv:2412.19437. Rank 0, worked out by
    hand from the lengths of the eight steps at the outer end: 6, 1, 3, 3, 3, 1, 3, 1 turns."""
    drawn = draw_schedule("dualpipe", 8, 20)
    assert phases_of(drawn, 0) == {
        "1 F0": "0F0 0F1 0F2 0F3 0F4 0F5",
        "2 F0 F1": "0F6 7F10",
        "3 I1 W1 F1": "7I10 7W10 7F11 7I11 7W11 7F12 7I12 7W12 7F13",
        "4 F0&B1 F1&B0": "0F7&7B13 7F14&0B0 0F8&7B14 7F15&0B1 0F9&7B15 7F16&0B2",
        "5 B1 F1&B0": "7B16 7F17&0B3 7B17 7F18&0B4 7B18 7F19&0B5",
        "6 B1 B0": "7B19 0I6",
        "7 W I0": "0W6 0I7 0W7 0I8 0W8 0I9",
        "8 W": "0W9",
    }
    assert tuple(phases_of(drawn, 0)) == PHASES


def test_dualpipe_is_the_same_seen_from_either_end() -> None:
    drawn = draw_schedule("dualpipe", 4, 12)

    def mirrored(rank: int) -> list[tuple[Kind, int, int]]:
        return [(a.kind, a.stage, (a.microbatch + 6) % 12) for a in drawn.iter_actions(rank)]

    for rank in range(4):
        there = [(a.kind, a.stage, a.microbatch) for a in drawn.iter_actions(3 - rank)]
        assert mirrored(rank) == there


def test_dualpipe_holds_each_stage_twice() -> None:
    drawn = draw_schedule("dualpipe", 4, 8)
    assert [drawn.stages_of(rank) for rank in range(4)] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert drawn.num_copies == 2
    assert draw_schedule("dualpipev", 4, 8).num_copies == 1


def test_half_a_dualpipe_is_a_dualpipev() -> None:
    """Fold direction 1 of P ranks over direction 0: what is left are P/2 ranks of DualPipeV."""
    dual, v = draw_schedule("dualpipe", 8, 20), draw_schedule("dualpipev", 4, 10)
    for rank in range(4):
        ours = [(a.kind, a.microbatch % 10) for a in dual.iter_actions(rank)]
        assert ours == [(a.kind, a.microbatch) for a in v.iter_actions(rank)]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages", "hints"),
    [
        ("dualpipe", 3, 8, 2, ["launch.nproc to 4"]),
        ("dualpipe", 4, 7, 2, ["strategy.microbatches to 8"]),
        ("dualpipe", 4, 11, 2, ["strategy.microbatches to 12"]),
        ("dualpipe", 5, 5, 1, ["nproc to 6", "stages_per_rank to 2", "microbatches to 12"]),
        ("dualpipev", 4, 4, 2, ["strategy.microbatches to 8"]),
        ("1f1b", 4, 2, 1, ["strategy.microbatches to 4"]),
        ("1f1b", 4, 8, 2, ["stages_per_rank to 1"]),
        ("interleaved_1f1b", 4, 8, 1, ["stages_per_rank to 2"]),
        ("interleaved_1f1b", 4, 9, 2, ["strategy.microbatches to 10"]),
        ("zbv", 4, 8, 3, ["stages_per_rank to 2"]),
        ("gpipe", 0, 0, 1, ["launch.nproc to 1", "strategy.microbatches to 1"]),
    ],
)
def test_refusals_name_the_nearest(
    name: str, ranks: int, microbatches: int, stages: int, hints: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        draw_schedule(name, ranks, microbatches, stages)
    assert len(refused.value.problems) == len(hints)
    for problem, hint in zip(refused.value.problems, hints, strict=True):
        assert hint in problem


def test_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean dualpipev?"):
        draw_schedule("dualpipe_v", 2, 4)


def test_nearest_and_next_microbatches() -> None:
    # 9 on 4 ranks would be two rounds of 4.5: 8 and 10 are as near, and the larger is named.
    assert nearest_microbatches("interleaved_zb", 4, 9) == 10
    assert next_microbatches("interleaved_zb", 4, 9) == 10
    assert next_microbatches("dualpipe", 4, 1) == 8
