"""The board of a live sweep: nothing is called the fastest before it is told apart."""

from pathlib import Path

from paceline.cli.sweep_talk import _status
from paceline.records.swept import SweptPhase
from paceline.sweep.board import Board
from paceline.sweep.folder import SweepDir
from tests.sweeps import draw_row


def play(folder: Path, runs: list[tuple[str, float | None]]) -> Board:
    board = Board(metric="tokens_per_s")
    names = ["a", "b"]
    board.begin(SweptPhase(name="", cells=names, repeats=4, steps=20), names * 4)
    for number, (name, value) in enumerate(runs):
        board.start(name, number)
        bad = {} if value is not None else {"status": "failed", "outcome": "crashed"}
        board.end(draw_row(SweepDir(folder), name, number, **bad), value)
    return board


def test_a_leader_is_named_with_a_caution_until_it_is_told_apart(tmp_path: Path) -> None:
    near = play(tmp_path / "near", [("a", 100.0), ("b", 103.0), ("a", 104.0), ("b", 99.0)])
    assert not near.is_told_apart
    assert "so far fastest a (102 tokens/s), not yet told apart" in _status(near)
    far = [("a", 100.0), ("b", 150.0), ("a", 101.0), ("b", 151.0), ("a", 100.5), ("b", 150.5)]
    board = play(tmp_path / "far", far)
    assert board.is_told_apart and "so far fastest b (150.5 tokens/s)" in _status(board)
    assert "not yet" not in _status(board)


def test_a_cell_that_has_not_run_may_be_faster(tmp_path: Path) -> None:
    assert not play(tmp_path / "one", [("a", 100.0), ("a", 101.0)]).is_told_apart
    failed = play(tmp_path / "failed", [("a", 100.0), ("b", None), ("a", 101.0)])
    assert not failed.is_told_apart, "nor is it faster than a cell without a number"
