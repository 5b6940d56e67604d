"""What ranks measured, put together: held against the simulator that made it, and small cases by
hand."""

import json
from dataclasses import replace

import pytest

from paceline.records import PipelineFacts
from paceline.schedules.account import account, simulate_measured
from paceline.schedules.actions import Action, Kind
from paceline.schedules.measured import assemble, measure, waits
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.passes import Pass, Timed
from paceline.schedules.requirements import AUTO_STAGES
from paceline.schedules.simulate import pairing_of, simulate
from paceline.schedules.timeline import Times
from paceline.schedules.trace import render_trace
from tests.pipelined import EPOCH, jittered, passes_of, plan_of

TIMES = Times(0.002, 0.003, 0.0025, transfer_s=0.0004)


def facts_of(name: str, times: Times = TIMES, ranks: int = 4, microbatches: int = 8):
    schedule = draw_schedule(name, ranks, microbatches)
    measured = measure([jittered(schedule, times, num_passes=6)], schedule)
    assert measured is not None
    return account(measured, plan_of(schedule, AUTO_STAGES[name]), {0: 2**20})


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_pass_comes_back(name: str) -> None:
    schedule = draw_schedule(name, 4, 8)
    free = replace(TIMES, transfer_s=0.0)
    simulated = simulate(schedule, free, pairing_of(name))
    got = assemble(passes_of(simulated), schedule)
    assert got.total_s == pytest.approx(simulated.total_s, abs=2e-6)
    assert got.bubble == pytest.approx(simulated.bubble, abs=1e-4)
    assert len(got.transfers) == len(simulated.transfers)
    for rank, truth in zip(got.ranks, simulated.ranks, strict=True):
        assert rank.max_in_flight == truth.max_in_flight
        assert [i.is_paired for i in rank.intervals] == [i.is_paired for i in truth.intervals]
    # Nothing travels: all idle time is bubble.
    assert sum(wait.communication_s for wait in waits(got)) < 1e-4 * got.total_s


@pytest.mark.parametrize("name", NAMES)
def test_busy_bubble_and_communication_fill_the_pass(name: str) -> None:
    facts = facts_of(name)
    for rank in facts.ranks:
        whole_s = rank.busy_s + rank.bubble_s + rank.communication_s
        assert whole_s == pytest.approx(facts.pass_s, rel=1e-9)
        assert rank.utilisation == pytest.approx(rank.busy_s / facts.pass_s)
        assert rank.communication_s > 0
        assert rank.max_in_flight == rank.in_flight_limit
    assert facts.idle == pytest.approx(1 - sum(r.utilisation for r in facts.ranks) / 4)
    shares = facts.shares.model_dump().values()
    assert sum(shares) == pytest.approx(facts.idle)
    assert facts.num_passes == 4, "the first two are left out"
    assert facts.idle_low <= facts.idle <= facts.idle_high


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 16)])
def test_1f1b_holds_no_more_than_ranks_behind(ranks: int, microbatches: int) -> None:
    facts = facts_of("1f1b", ranks=ranks, microbatches=microbatches)
    assert [r.in_flight_limit for r in facts.ranks] == [ranks - r for r in range(ranks)]
    assert all(r.max_in_flight <= ranks - r.rank for r in facts.ranks)


def test_stage_times_and_the_delays_are_found_again() -> None:
    uneven = Times([0.002, 0.004], 0.003, 0.003, transfer_s=0.0005, overhead_s=0.0)
    facts = facts_of("1f1b", uneven, ranks=2)
    first, second = facts.stages
    # Passes are up to 5 % slower.
    assert first.forward_s == pytest.approx(0.002, rel=0.05)
    assert second.forward_s == pytest.approx(0.004, rel=0.05)
    assert first.backward_s == pytest.approx(0.006, rel=0.05)
    assert first.input_s is None and first.weight_s is None
    assert facts.transfer_s == pytest.approx(0.0005, rel=0.01)
    assert facts.overhead_s == pytest.approx(0.0, abs=1e-6)
    assert facts.shares.uneven_stages > 0.05 > facts.shares.unequal_actions
    assert facts.simulated_s < facts.pass_s
    line = simulate_measured(draw_schedule("1f1b", 2, 8), facts.stages)
    assert line.total_s == facts.simulated_s


def test_equal_stages_without_delays_lose_nothing_to_the_formula() -> None:
    facts = facts_of("1f1b", Times(0.002, 0.002, 0.002))
    assert facts.idle == pytest.approx(3 / 11, abs=1e-3)
    assert facts.shares.formula == pytest.approx(3 / 11, abs=1e-6)
    for name, share in facts.shares.model_dump().items():
        assert name == "formula" or abs(share) < 1e-3


def by_hand(*rows: list[tuple[str, int, float, float]], late_s: float = 0.0):
    """Two ranks with a stage each: kind, microbatch, start, end. Rank 1's clock is `late_s` off."""
    passes = []
    for rank, row in enumerate(rows):
        actions = tuple(Timed(Action(Kind(k), rank, m), a, b) for k, m, a, b in row)
        passes.append(Pass(1, 0, EPOCH + rank * late_s, actions))
    return assemble(passes, draw_schedule("gpipe", 2, 2))


def test_waits_and_queues_by_hand() -> None:
    # Rank 1 waits 1 s for F0 (bubble) and 0.5 s for its way; F1 is finished at 2 while rank 1 is
    # busy, so it queues. B0 needs 0.5 s to rank 0, which had nothing to do; B1 is taken with 0.5 s
    # of overhead, having queued since 7.
    line = by_hand(
        [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 6.5, 8), ("B", 1, 8.5, 9)],
        [("F", 0, 1.5, 3), ("F", 1, 3, 4), ("B", 0, 4, 6), ("B", 1, 6, 7)],
    )
    assert line.total_s == pytest.approx(9)
    zero, one = line.ranks
    assert (zero.max_queue(Kind.FORWARD), zero.max_queue(Kind.BACKWARD)) == (0, 1)
    assert (one.max_queue(Kind.FORWARD), one.max_queue(Kind.BACKWARD)) == (1, 0)
    assert (zero.max_in_flight, one.max_in_flight) == (2, 2)
    found = [(w.rank, w.bubble_s, w.communication_s) for w in waits(line) if w.bubble_s > 1e-6]
    assert found == [
        (0, pytest.approx(4, abs=1e-5), pytest.approx(0.5, abs=1e-5)),
        (1, pytest.approx(1, abs=1e-5), pytest.approx(0.5, abs=1e-5)),
        (1, pytest.approx(2, abs=1e-5), 0),
    ]
    assert sum(w.communication_s for w in waits(line) if w.rank == 0) == pytest.approx(1, abs=1e-5)


def test_a_clock_that_is_off_breaks_no_identity() -> None:
    """Rank 1 seems to take F0 before rank 0 has finished it."""
    line = by_hand([("F", 0, 0, 1), ("B", 0, 4, 5)], [("F", 0, 1, 2), ("B", 0, 2, 3)], late_s=-0.5)
    for rank in line.ranks:
        idle_s = sum(w.bubble_s + w.communication_s for w in waits(line) if w.rank == rank.rank)
        assert rank.busy_s + idle_s == pytest.approx(line.total_s)
        assert all(w.bubble_s >= 0 and w.communication_s >= 0 for w in waits(line))


def test_only_passes_that_all_ranks_have_count() -> None:
    schedule = draw_schedule("1f1b", 2, 4)
    ranks = jittered(schedule, TIMES, num_passes=5)
    ranks[0] = ranks[0][:4]
    ranks[1] = ranks[1][1:]
    measured = measure([ranks], schedule)
    assert measured is not None and [done.step for done in measured.passes] == [4]
    assert measure([[ranks[0], []]], schedule) is None
    stale = draw_schedule("1f1b", 4, 4)
    assert measure([jittered(stale, TIMES, 3)[2:]], schedule) is None, (
        "of stages that are not there"
    )


def test_pipelines_beside_each_other_name_ranks_of_the_run() -> None:
    schedule = draw_schedule("1f1b", 2, 4)
    both = [jittered(schedule, TIMES, 3, seed) for seed in (0, 1)]
    measured = measure(both, schedule)
    assert measured is not None
    facts = account(measured, plan_of(schedule, 1), {3: 7})
    assert [(r.rank, r.stages) for r in facts.ranks] == [(0, [0]), (1, [0]), (2, [1]), (3, [1])]
    assert [r.peak_bytes for r in facts.ranks] == [None, None, None, 7]
    names = {
        e["pid"]: e["args"]["name"]
        for e in json.loads(render_trace(measured.median))["traceEvents"]
        if e["name"] == "process_name"
    }
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2", 3: "rank 3"}


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_the_trace_is_chromes(name: str) -> None:
    schedule = draw_schedule(name, 4, 8)
    measured = measure([jittered(schedule, TIMES, 3)], schedule)
    assert measured is not None
    events = json.loads(render_trace(measured.median))["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == sum(len(slot.actions) for order in schedule.ranks for slot in order)
    assert {e["cat"] for e in bars} <= set("FBIW") and all(e["dur"] > 0 for e in bars)
    longest = max(e["ts"] + e["dur"] for e in bars)
    assert longest == pytest.approx(measured.median.total_s * 1e6, abs=0.01)
    # Every arrow leaves from inside a bar and ends where one starts, on another rank.
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == len(
        measured.median.pipelines[0].transfers
    )
    for key, start in starts.items():
        assert start["pid"] != ends[key]["pid"]
        assert any(_is_inside(start, bar) for bar in bars)
        assert any(bar["ts"] == ends[key]["ts"] and bar["tid"] == ends[key]["tid"] for bar in bars)


def _is_inside(event: dict[str, float], bar: dict[str, float]) -> bool:
    is_there = (event["pid"], event["tid"]) == (bar["pid"], bar["tid"])
    return is_there and bar["ts"] <= event["ts"] < bar["ts"] + bar["dur"]


def test_facts_are_a_record() -> None:
    facts = facts_of("dualpipe")
    assert PipelineFacts.model_validate_json(facts.model_dump_json()) == facts
    assert facts.ranks[0].peak_bytes == 2**20 and facts.stages[0].weight_s is not None
