"""Who is slow, by its own work and not by the time of its phases, which are alike on all ranks."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.health import judge
from paceline.health.work import measure_work
from paceline.records.findings import RunFinding
from paceline.records.phases import Phase
from paceline.records.timing_ranks import Spreads, timing_line
from tests.judged import USUAL_S, make_evidence, make_telemetry
from tests.machines import box, plan

STEP_S = sum(USUAL_S.values())
PARTS = [Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def slow_ranks(found: list[RunFinding]) -> list[tuple[int | None, str]]:
    return [(f.rank, f.evidence["part"]) for f in found if f.kind == "straggler"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_rank_that_is_a_fifth_slower_is_named_with_its_part(part: Phase, num_ranks: int) -> None:
    evidence = make_evidence({1: {part: 0.2 * STEP_S}}, num_ranks)
    found = judge(evidence)
    assert slow_ranks(found) == [(1, part)]
    told = next(f for f in found if f.kind == "straggler")
    assert told.evidence["extra_s"] == pytest.approx(0.2 * STEP_S, rel=0.1)
    assert told.evidence["lost_s"] == pytest.approx(0.2 * STEP_S, rel=0.3), "what all lose"
    assert "rank 1 is slow" in told.words


def test_times_of_phases_alone_would_not_have_shown_it() -> None:
    """Backward takes equally long on both ranks: one computes, the other waits."""
    evidence = make_evidence({1: {Phase.BACKWARD: 0.5 * STEP_S}}, noise=0.0)
    backward = [np.median(evidence.steps[r].column("backward_s")) for r in (0, 1)]
    assert backward[0] == pytest.approx(backward[1])
    assert slow_ranks(judge(evidence)) == [(1, Phase.BACKWARD)]


def test_a_live_run_names_it_by_its_last_steps() -> None:
    late = np.where(np.arange(80) >= 63, 0.3 * STEP_S, 0.0)
    evidence = make_evidence({1: {Phase.FORWARD: late}}, num_steps=80)
    assert slow_ranks(judge(evidence)) == [], "17 of the last 30 steps do not make it slow"
    live = replace(evidence, now=1e9)
    assert slow_ranks(judge(live)) == [(1, Phase.FORWARD)]
    patient = live.rules.model_copy(update={"straggler_s": 2.0})
    assert slow_ranks(judge(replace(live, rules=patient))) == [], "a moment of short steps"
    far = make_evidence({1: {Phase.FORWARD: 2 * late}}, num_steps=80)
    far_live = replace(far, now=1e9, rules=patient)
    assert slow_ranks(judge(far_live)) == [(1, Phase.FORWARD)], "so slow that few steps tell"


def test_a_stall_now_and_then_is_a_spike_and_no_straggler() -> None:
    """F25: half a second in every twentieth step."""
    stall = np.where(np.arange(100) % 20 == 19, 0.5, 0.0)
    found = judge(make_evidence({1: {Phase.FORWARD: stall}}, num_steps=100))
    assert slow_ranks(found) == []
    spikes = [f for f in found if f.kind == "spikes"]
    assert [f.rank for f in spikes] == [1] and spikes[0].evidence["every_steps"] == 20
    together = judge(make_evidence({r: {Phase.FORWARD: stall} for r in (0, 1)}, num_steps=100))
    (spike,) = [f for f in together if f.kind == "spikes"]
    assert spike.rank is None and "no straggler" not in spike.words, "no rank is meant"


def test_few_stalls_of_a_long_run_are_none_but_for_a_rhythm() -> None:
    """A machine does something else for a moment now and then; every 150 steps is no chance."""
    places = np.arange(600)
    for at, found_in in (([104, 249, 492], []), ([149, 299, 449, 599], [1])):
        stall = np.where(np.isin(places, at), 0.5, 0.0)
        found = judge(make_evidence({1: {Phase.FORWARD: stall}}, num_steps=600))
        assert [f.rank for f in found if f.kind == "spikes"] == found_in


@pytest.mark.parametrize("is_live", [False, True])
def test_clean_runs_have_none(is_live: bool) -> None:
    """Fifty of them, in which each step of each rank differs by a twentieth."""
    now = 1e9 if is_live else None
    for seed in range(50):
        evidence = replace(make_evidence(num_ranks=4, noise=0.05, seed=seed), now=now)
        assert [f for f in judge(evidence) if f.severity != "note"] == []


def test_a_slow_device_is_told_from_a_slow_part() -> None:
    all_slow = {p: 0.3 * USUAL_S[p] for p in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)}
    assert slow_ranks(judge(make_evidence({1: all_slow}))) == [(1, "all")]


def test_without_the_time_in_collectives_only_what_stands_before_them_counts() -> None:
    """A run of another version, or DeepSpeed's: waiting looks like work in backward."""
    slow = make_evidence({1: {Phase.FORWARD: 0.5 * STEP_S}}, knows_blocked=False)
    assert slow_ranks(judge(slow)) == [(1, Phase.FORWARD)]
    hidden = make_evidence({1: {Phase.BACKWARD: 0.5 * STEP_S}}, knows_blocked=False)
    assert slow_ranks(judge(hidden)) == []
    work = measure_work(hidden)
    assert work is not None and not work.is_whole


def test_ranks_of_which_one_has_recorded_nothing_are_not_compared() -> None:
    evidence = make_evidence({1: {Phase.DATA: STEP_S}}, 3)
    assert judge(replace(evidence, steps={0: evidence.steps[0], 1: evidence.steps[1]})) == []


def test_a_rule_that_is_off_says_nothing() -> None:
    evidence = make_evidence({1: {Phase.FORWARD: STEP_S}})
    rules = evidence.rules.model_copy(update={"straggler": "off"})
    assert slow_ranks(judge(replace(evidence, rules=rules))) == []


def test_the_gpu_of_a_slow_rank_is_told_where_it_differs() -> None:
    hot = make_telemetry(60, "gpu1", clock_mhz=1200.0, temperature_c=88.0)
    usual = make_telemetry(60, "gpu0", clock_mhz=1980.0, temperature_c=60.0)
    for columns in ("values", "is_empty"):
        for name, found in getattr(hot, columns).items():
            getattr(hot, columns)[name] = np.concatenate([found, getattr(usual, columns)[name]])
    all_slow = {p: 0.5 * USUAL_S[p] for p in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)}
    decided = plan("launch.nproc=2", machine=box(2))
    evidence = make_evidence({1: all_slow}, plan=decided, telemetry={0: hot})
    (told,) = [f for f in judge(evidence) if f.kind == "straggler"]
    assert "1200 MHz, the others 1980" in told.words and "88 °C" in told.words


def test_the_spread_of_a_step_names_who_was_least_in_collectives() -> None:
    """Backward is equally long on both; `blocked` at the end of a line says who computed in it."""
    phases = {Phase.DATA: 0.001, Phase.FORWARD: 0.01, Phase.BACKWARD: 0.05}
    lines = [
        timing_line(50, rank, 3.0, phases, 0.07, {Phase.BACKWARD: waited})
        for rank, waited in enumerate([0.03, 0.001])
    ]
    assert lines[1].endswith("iter=70.00 blocked=1.00")
    spreads = Spreads(2)
    (told,) = [line for each in lines for line in spreads.note(each)]
    assert told.endswith("slowest=1")
