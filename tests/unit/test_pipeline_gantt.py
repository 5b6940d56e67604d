"""Drawn pipelines: every action is a bar at its place, on a scale that charts share."""

import re
from xml.etree import ElementTree

import pytest

from paceline.report.gantt import BAR, LEFT, RIGHT, WIDTH, Chart, gantt
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.simulate import Pairing, simulate
from paceline.schedules.timeline import Timeline, Times


def timeline(name: str, pairing: Pairing = Pairing.IN_TURN) -> Timeline:
    return simulate(draw_schedule(name, 4, 8), Times(0.010, 0.010, 0.010), pairing)


def rects(drawn: str, kind: str) -> list[ElementTree.Element]:
    tree = ElementTree.fromstring(drawn)
    return [rect for rect in tree.iter("rect") if kind in rect.attrib["class"].split()]


def width(rect: ElementTree.Element) -> float:
    return float(rect.attrib["width"])


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_a_bar_that_says_what_it_is(name: str) -> None:
    made = timeline(name)
    titles = [rect[0].text or "" for rect in rects(gantt([Chart(name, made)]), "pass")]
    actions = [str(i.action) for rank in made.ranks for i in rank.intervals]
    assert sorted(title.split(":")[0] for title in titles) == sorted(actions)


def test_charts_share_the_scale_of_the_longest() -> None:
    """1f1b takes 11 x 30 ms, dualpipe 25 x 10: the rows are as long as their steps."""
    lanes = rects(gantt([Chart("a", timeline("1f1b")), Chart("b", timeline("dualpipe"))]), "lane")
    widths = [width(rect) for rect in lanes]
    assert widths[0] == pytest.approx(WIDTH - LEFT - RIGHT)
    assert widths[4] == pytest.approx(widths[0] * 250 / 330, abs=0.1)


def test_headings_say_how_long_and_how_idle() -> None:
    drawn = gantt([Chart("1f1b, simulated", timeline("1f1b"))])
    assert "1f1b, simulated: 330 ms, idle 27.3%" in drawn
    assert "ms since the step began" in drawn
    assert drawn.count(">73%<") == 4


def test_bars_have_their_kind_and_microbatch_where_they_fit() -> None:
    inside = re.findall(r'class="inside[^>]*>([^<]+)<', gantt([Chart("1f1b", timeline("1f1b"))]))
    assert {"F0", "B7"} <= set(inside)
    many = simulate(draw_schedule("1f1b", 2, 100), Times(1.0, 1.0, 1.0))
    assert 'class="inside' not in gantt([Chart("many", many)])


def test_pairs_are_framed_and_share_a_row_when_they_run_at_once() -> None:
    num_pairs = sum(slot.is_pair for order in timeline("dualpipe").schedule.ranks for slot in order)
    for pairing, num_halves in ((Pairing.IN_TURN, 0), (Pairing.FUSED, 2 * num_pairs)):
        drawn = gantt([Chart("dualpipe", timeline("dualpipe", pairing))])
        assert len(rects(drawn, "pair")) == num_pairs
        bars = rects(drawn, "pass")
        assert sum(float(bar.attrib["height"]) == BAR / 2 for bar in bars) == num_halves


def test_the_other_direction_is_lighter() -> None:
    drawn = gantt([Chart("dualpipe", timeline("dualpipe"))])
    for bar in rects(drawn, "pass"):
        microbatch = int(re.search(r"microbatch (\d+)", bar[0].text or "").group(1))  # type: ignore
        assert ("second" in bar.attrib["class"]) == (microbatch >= 4)
    assert "second direction" in drawn
    assert "later stages" in gantt([Chart("zbv", timeline("zbv"))])


def test_names_are_escaped_and_nothing_is_said_to_be_nothing() -> None:
    assert "<script>" not in gantt([Chart("<script>", timeline("gpipe"))])
    assert "Nothing was recorded" in gantt([])
