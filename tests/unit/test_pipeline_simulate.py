"""The simulator: times, memory and queues of schedules whose answers can be worked out by hand."""

import pytest

from paceline.errors import ConfigError
from paceline.schedules.actions import Action, Kind, Schedule, Slot
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.simulate import DeadlockError, Pairing, simulate
from paceline.schedules.timeline import Times

EQUAL = Times(1.0, 1.0, 1.0)


def spans(schedule: Schedule, times: Times, rank: int) -> dict[str, tuple[float, float]]:
    timeline = simulate(schedule, times).ranks[rank]
    return {str(i.action): (i.started_s, i.ended_s) for i in timeline.intervals}


def test_two_ranks_two_microbatches_by_hand() -> None:
    """F 1, B 2, transfer 0.5. Rank 1 has 0F0 at 1.5 and 0F1 at 2.5; its 1B0 ends at 4.5."""
    drawn = draw_schedule("1f1b", 2, 2)
    times = Times(1.0, 1.0, 1.0, transfer_s=0.5)
    assert spans(drawn, times, 1) == {
        "1F0": (1.5, 2.5), "1B0": (2.5, 4.5), "1F1": (4.5, 5.5), "1B1": (5.5, 7.5),
    }  # fmt: skip
    assert spans(drawn, times, 0) == {
        "0F0": (0.0, 1.0), "0F1": (1.0, 2.0), "0B0": (5.0, 7.0), "0B1": (8.0, 10.0),
    }  # fmt: skip
    timeline = simulate(drawn, times)
    assert timeline.total_s == 10.0
    assert [rank.busy_s for rank in timeline.ranks] == [6.0, 6.0]
    assert timeline.bubble == pytest.approx(0.4)


def test_a_link_carries_one_result_at_a_time() -> None:
    """Two forwards of 1 s, each 3 s on the wire: the second sets out when the first has arrived."""
    timeline = simulate(draw_schedule("gpipe", 2, 2), Times(1.0, 1.0, 1.0, transfer_s=3.0))
    forwards = [t for t in timeline.transfers if t.action.kind == Kind.FORWARD]
    assert [(t.started_s, t.ended_s) for t in forwards] == [(1.0, 4.0), (4.0, 7.0)]


def test_times_may_differ_by_stage() -> None:
    """Stage 1 is slow: M of its forwards and backwards, after one forward and before one backward
    of stage 0, whatever stage 0 does meanwhile."""
    times = Times([1.0, 4.0], [1.0, 4.0], [1.0, 4.0])
    assert simulate(draw_schedule("1f1b", 2, 6), times).total_s == 1 + 6 * 12 + 2


def test_a_whole_backward_may_be_cheaper_than_its_halves() -> None:
    times = Times(1.0, 1.0, 1.0, backward_s=1.5)
    assert simulate(draw_schedule("1f1b", 1, 4), times).total_s == 4 * 2.5
    assert simulate(draw_schedule("interleaved_zb", 1, 4, 1), times).total_s == 4 * 3.0


def test_every_action_costs_its_overhead() -> None:
    times = Times(1.0, 1.0, 1.0, overhead_s=0.25)
    assert simulate(draw_schedule("1f1b", 1, 4), times).total_s == 4 * 3 + 8 * 0.25
    assert simulate(draw_schedule("interleaved_zb", 1, 4, 1), times).total_s == 4 * 3 + 12 * 0.25


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_1f1b_holds_no_more_than_the_stages_behind_it(num_ranks: int) -> None:
    for microbatches in (num_ranks, 3 * num_ranks):
        timeline = simulate(draw_schedule("1f1b", num_ranks, microbatches), EQUAL)
        held = [rank.max_in_flight for rank in timeline.ranks]
        assert held == [num_ranks - stage for stage in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_others_hold(num_ranks: int) -> None:
    """gpipe holds all; dualpipe P + 1 of a whole stage (DeepSeek's table), dualpipev 2P + 1 of half
    a stage each, zbv 2P of half a stage: as much as rank 0 of 1f1b, on every rank."""
    microbatches = 4 * num_ranks

    def held(name: str) -> set[int]:
        timeline = simulate(draw_schedule(name, num_ranks, microbatches), EQUAL)
        return {rank.max_in_flight for rank in timeline.ranks}

    assert held("gpipe") == {microbatches}
    assert held("looped_bfs") == {2 * microbatches}
    assert held("dualpipe") == {num_ranks + 1}
    assert held("dualpipev") == {2 * num_ranks + 1}
    assert held("zbv") == {2 * num_ranks}


def test_bytes_in_flight() -> None:
    """One rank, one microbatch, a stage of 8 bytes, held until weights have their gradients."""
    timeline = simulate(draw_schedule("interleaved_zb", 1, 1, 1), EQUAL)
    assert timeline.ranks[0].held([8.0]) == [(0.0, 8.0), (3.0, 0.0)]
    assert timeline.peak_bytes(8.0) == [8.0]
    both = simulate(draw_schedule("1f1b", 2, 4), EQUAL).peak_bytes([10.0, 100.0])
    assert both == [20.0, 100.0]


def test_queues_hold_what_came_and_waited() -> None:
    """gpipe, rank 1 four times slower: forwards come at 1, 2, 3, 4 and start at 1, 5, 9, 13. At 4
    three wait. Backwards are taken as they come."""
    timeline = simulate(draw_schedule("gpipe", 2, 4), Times([1.0, 4.0], 1.0, 1.0))
    assert timeline.ranks[1].max_queue(Kind.FORWARD) == 3
    assert timeline.ranks[0].max_queue(Kind.FORWARD) == 0
    assert timeline.ranks[0].max_queue(Kind.BACKWARD) == 0
    assert timeline.ranks[1].queue(Kind.FORWARD)[:3] == [(2.0, 1.0), (3.0, 2.0), (4.0, 3.0)]


def test_pairs_in_turn_late_or_fused() -> None:
    """P=4, M=16, F = I = W: 1f1b takes (16 + 3) * 3 = 57 slots. DualPipe has 48 slots of work and
    idles (P/2 - 1)(F&B + B - 3W) = 2, or one less where forwards leave before their pair ends."""
    drawn = draw_schedule("dualpipe", 4, 16)
    assert simulate(draw_schedule("1f1b", 4, 16), EQUAL).total_s == 57
    assert simulate(drawn, EQUAL, Pairing.IN_TURN).total_s == 49
    assert simulate(drawn, EQUAL, Pairing.LATE_SENDS).total_s == 50
    assert simulate(drawn, EQUAL, Pairing.FUSED).total_s == 50


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("pairing", Pairing)
def test_dualpipe_is_not_slower_than_1f1b(num_ranks: int, pairing: Pairing) -> None:
    for microbatches in (2 * num_ranks, 4 * num_ranks):
        dual = simulate(draw_schedule("dualpipe", num_ranks, microbatches), EQUAL, pairing)
        assert (
            dual.total_s <= simulate(draw_schedule("1f1b", num_ranks, microbatches), EQUAL).total_s
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pairing", Pairing)
def test_work_is_what_was_asked(name: str, pairing: Pairing) -> None:
    """Uneven stages, slow links: each rank is busy for the sum of its actions, and never twice at a
    time; nothing starts before what it needs has arrived."""
    drawn = draw_schedule(name, 4, 8)
    seconds = [1.0 + 0.25 * stage for stage in range(drawn.num_stages)]
    timeline = simulate(drawn, Times(seconds, seconds, seconds, transfer_s=0.5), pairing)
    for rank in timeline.ranks:
        whole = {Kind.BACKWARD: 2.0}
        work = sum(seconds[a.stage] * whole.get(a.kind, 1.0) for a in drawn.iter_actions(rank.rank))
        assert rank.busy_s == pytest.approx(work)
        for interval in rank.intervals:
            assert interval.started_s >= rank.arrivals.get(interval.action, 0.0)


def test_a_deadlock_names_what_is_waited_for() -> None:
    """Rank 0 wants the gradient of microbatch 0 before it sends microbatch 1, and rank 1 wants
    microbatch 1 before it gives that gradient."""

    def order(*names: str) -> tuple[Slot, ...]:
        actions = [Action(Kind(name[1]), int(name[0]), int(name[2])) for name in names]
        return tuple(Slot((action,), "") for action in actions)

    stuck = Schedule(
        "by hand",
        2,
        ((0, 1),),
        (order("0F0", "0B0", "0F1", "0B1"), order("1F0", "1F1", "1B0", "1B1")),
    )
    with pytest.raises(DeadlockError) as error:
        simulate(stuck, EQUAL)
    assert error.value.problems == [
        "by hand: no rank can continue",
        "rank 0 waits before 0B0 for 1B0 of rank 1",
        "rank 1 waits before 1F1 for 0F1 of rank 0",
    ]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (Times([1.0], 1.0, 1.0), "forward_s has 1 values"),
        (Times(1.0, -1.0, 1.0), "input_s has a value that is negative"),
        (Times(1.0, 1.0, float("nan")), "weight_s has a value that is negative or not a number"),
        (Times(1.0, 1.0, 1.0, transfer_s=[0.1, 0.1]), "transfer_s has 2 values"),
    ],
)
def test_times_that_are_none(times: Times, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(draw_schedule("1f1b", 2, 2), times)
