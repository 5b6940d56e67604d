"""docs/pipelines.md draws and counts what the code draws and counts, and its Python runs."""

import re
from pathlib import Path

import pytest

from paceline.schedules.formulas import EQUAL, bubble_formula
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.simulate import pairing_of, simulate
from paceline.schedules.timeline import Times, draw_text

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
# schedule -> ranks, microbatches: small enough to read, large enough to see the idea
DRAWN = dict.fromkeys(NAMES, (2, 4)) | {"gpipe": (4, 4), "1f1b": (4, 4), "dualpipe": (4, 8)}


def table_rows() -> list[str]:
    """4 ranks, 16 microbatches; a stage takes its share of a quarter of the model."""
    rows = []
    for name in NAMES:
        drawn = draw_schedule(name, 4, 16)
        share = 4 / drawn.num_stages
        times = Times(share, share, share)
        timeline = simulate(drawn, times, pairing_of(name))
        formula = bubble_formula(name, 4, 16, times, pairing=pairing_of(name))
        assert formula.bubble == pytest.approx(timeline.bubble)
        first, *_, last = (f"{rank.max_in_flight * share:g}" for rank in timeline.ranks)
        held = first if first == last else f"{first} to {last}"
        copies = f"{drawn.num_copies}x"
        cells = [f"`{name}`", f"{timeline.total_s:g}", f"{timeline.bubble:.1%}", formula.text]
        cells += [held, copies, str(len(timeline.transfers))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_drawings_are_the_simulators(name: str) -> None:
    section = PAGE.read_text().split(f"\n### {name}\n")[1].split("\n#")[0]
    drawn = draw_text(simulate(draw_schedule(name, *DRAWN[name]), EQUAL))
    assert f"```text\n{drawn}```" in section


def test_the_table_is_the_simulators() -> None:
    text = PAGE.read_text()
    for row in table_rows():
        assert row in text


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert "1f1b on 4 ranks idles" in printed
