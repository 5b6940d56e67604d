"""Closed formulas against the simulator, everywhere they claim to be exact."""

from itertools import product

import pytest

from paceline.schedules.formulas import EQUAL, bubble_formula
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.requirements import takes_microbatches, takes_ranks
from paceline.schedules.simulate import Pairing, simulate
from paceline.schedules.timeline import Times

UNEQUAL = [EQUAL, Times(2.0, 2.0, 1.0), Times(4.0, 5.0, 3.0), Times(2.0, 1.0, 2.0)]
STAGES = {"interleaved_1f1b": (2, 3), "looped_bfs": (2, 3), "interleaved_zb": (1, 2, 3)}


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_agrees_where_it_is_exact(name: str) -> None:
    num_exact = 0
    for ranks, microbatches in product((1, 2, 3, 4, 8), (1, 2, 3, 6, 8, 16)):
        if not (takes_ranks(name, ranks) and takes_microbatches(name, ranks, microbatches)):
            continue
        pairings = list(Pairing) if name.startswith("dualpipe") else [Pairing.IN_TURN]
        for stages, times, pairing in product(STAGES.get(name, ("auto",)), UNEQUAL, pairings):
            formula = bubble_formula(name, ranks, microbatches, times, stages, pairing)
            if formula.is_exact:
                drawn = draw_schedule(name, ranks, microbatches, stages)
                assert simulate(drawn, times, pairing).total_s == formula.total_s, (ranks, times)
                num_exact += 1
    assert num_exact > 10


def test_the_well_known_ones() -> None:
    assert bubble_formula("gpipe", 4, 8, EQUAL).bubble == pytest.approx(3 / 11)
    assert bubble_formula("1f1b", 4, 8, EQUAL).bubble == pytest.approx(3 / 11)
    assert bubble_formula("interleaved_1f1b", 4, 8, EQUAL, 2).bubble == pytest.approx(3 / 19)
    # With F = I = W, ZB-H1 idles a third of 1f1b's (P - 1)(F + B).
    assert bubble_formula("interleaved_zb", 4, 8, EQUAL, 1).idle_s == 9 / 3
    assert bubble_formula("dualpipe", 8, 20, EQUAL, pairing=Pairing.FUSED).idle_s == 3 * (3 + 2 - 3)


def test_zbv_is_free_of_bubbles_inside_each_rank() -> None:
    """What its paper claims; the (P - 1) F until the last rank starts are beside it."""
    timeline = simulate(draw_schedule("zbv", 4, 8), EQUAL)
    assert [rank.busy_s for rank in timeline.ranks] == [8 * 6] * 4
    assert timeline.total_s == 8 * 6 + 3


def test_a_formula_says_when_it_is_only_a_guide() -> None:
    assert not bubble_formula("1f1b", 2, 4, Times([1.0, 2.0], 1.0, 1.0)).is_exact
    assert not bubble_formula("1f1b", 2, 4, Times(1.0, 1.0, 1.0, transfer_s=0.1)).is_exact
    assert not bubble_formula("zbv", 2, 4, Times(1.0, 2.0, 1.0)).is_exact
    assert not bubble_formula("zbv", 4, 4, EQUAL).is_exact
