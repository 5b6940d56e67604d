"""pipeline.jsonl: written whole, read back, and no reason to crash when it is damaged."""

from pathlib import Path

import pytest

from paceline.schedules.actions import Action, Kind
from paceline.schedules.passes import Pass, Timed, read_passes, render_passes

PASSES = [
    Pass(3, 0, 1.7e9 + 0.25, (Timed(Action(Kind.FORWARD, 0, 0), 0.001, 0.002),)),
    Pass(3, 1, 1.7e9 + 0.75, (Timed(Action(Kind.INPUT, 1, 5, 1), 0.0, 0.125),)),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.jsonl"
    path.write_text(render_passes(PASSES))
    assert read_passes(path) == PASSES
    first = '{"step": 3, "number": 0, "started_at": 1700000000.25, "actions": [["F", 0, 0, 0,'
    assert path.read_text().startswith(f"{first} 0.001, 0.002]]}}\n")


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 3, "number": 0, "started_at"',
        '{"step": 3}\n',
        "[1, 2]\n",
        '{"step": 3, "number": 0, "started_at": 1, "actions": [["F", 0]]}\n',
        '{"step": 3, "number": 0, "started_at": 1, "actions": [["Q", 0, 0, 0, 0, 1]]}\n',
        '{"step": 3, "number": 0, "started_at": NaN, "actions": []}\n',
        '{"step": 3, "number": 0, "started_at": 1, "actions": [["F", 0, 0, 0, 0, Infinity]]}\n',
        "\xff\n",
    ],
)
def test_a_damaged_file_is_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.jsonl"
    path.write_text(text, encoding="latin-1")
    assert read_passes(path) == []
    assert read_passes(tmp_path / "absent") == []
