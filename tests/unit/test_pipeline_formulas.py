"""Closed formulas against the simulator, everywhere they claim to be exact."""

from itertools import product

import pytest

from paceline.errors import ConfigError
from paceline.schedules.formulas import EQUAL, bubble_formula, microbatches_for
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
    assert [rank.idle_inside_s for rank in timeline.ranks] == [0.0] * 4
    assert timeline.total_s == 8 * 6 + 3


def test_a_formula_says_when_it_is_only_a_guide() -> None:
    assert not bubble_formula("1f1b", 2, 4, Times([1.0, 2.0], 1.0, 1.0)).is_exact
    assert not bubble_formula("1f1b", 2, 4, Times(1.0, 1.0, 1.0, transfer_s=0.1)).is_exact
    assert not bubble_formula("zbv", 2, 4, Times(1.0, 2.0, 1.0)).is_exact
    assert not bubble_formula("zbv", 4, 4, EQUAL).is_exact


def test_microbatches_for_a_bubble() -> None:
    """1f1b on 4 ranks: 3 / (M + 3) <= 0.27 from M = 8.1 on, <= 3 / 11 at M = 8."""
    assert microbatches_for(0.27, "1f1b", 4) == 9
    assert microbatches_for(3 / 11, "1f1b", 4) == 8
    assert microbatches_for(0.9, "1f1b", 4) == 4  # what it needs to be drawn
    assert microbatches_for(0.01, "dualpipe", 4) == 34  # 1 / (3 M + 1) <= 0.01: M = 33, made even
    # 3 / (2 M + 3) <= 0.1 from 13.5 on; 14 are no three equal rounds, 15 are.
    assert microbatches_for(0.1, "interleaved_1f1b", 4) == 15
    assert microbatches_for(0.5, "gpipe", 1) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bubble", [0.5, 0.2, 0.05, 0.011])
def test_one_valid_number_fewer_would_be_too_few(name: str, bubble: float) -> None:
    found = microbatches_for(bubble, name, 4)
    assert bubble_formula(name, 4, found, EQUAL).bubble <= bubble + 1e-12
    for fewer in range(1, found):
        if takes_microbatches(name, 4, fewer):
            assert bubble_formula(name, 4, fewer, EQUAL).bubble > bubble


def test_a_bubble_is_a_share() -> None:
    for share in (0.0, 1.0, 5.0):
        with pytest.raises(ConfigError, match="give a share"):
            microbatches_for(share, "1f1b", 4)
