"""The thread that judges a live run: what it reads, how often, and what it tells again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.health import RulesConfig
from paceline.records.findings import Finding
from paceline.records.rundir import RunDir
from paceline.records.tables import STEPS
from paceline.records.tails import RowTail
from paceline.run import watching
from paceline.run.watching import Watcher
from paceline.train.heartbeat import Ticker
from tests.machines import plan

Make = Callable[..., Watcher]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Make:
    """Make a watcher of one rank, whose run directory is the test's folder."""

    def made(**rules: Any) -> Watcher:
        RunDir(tmp_path).make_rank(0)
        return Watcher(
            RunDir(tmp_path), plan("launch.device=cpu"), RulesConfig(**rules), said.append
        )

    return made


def look(watcher: Watcher) -> None:
    """Judge by all rules now."""
    watcher._rules_at = 0.0
    watcher.tick()


def test_a_line_that_is_no_row_of_a_step_is_left_out(tmp_path: Path, make: Make) -> None:
    watcher, columns = make(), list(STEPS.columns)
    first, *rest = [",".join([str(n)] * len(columns)) for n in (1, 2)]
    bad = [",".join([cell] * len(columns)) for cell in ("x", "", "9" * 400, "-1", '"')]
    path = RunDir(tmp_path).steps(0)
    path.write_text("\n".join([",".join(columns), first, *bad, *rest]) + "\n")
    assert [row["step"] for row in RowTail(path).rows()] == ["1", "2"]
    watcher.tick()
    path.write_text("a,b\n1,2\n")
    assert RowTail(path).rows() == [], "it has no steps at all"


def test_an_error_in_one_call_ends_no_ticker_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, done, calls = list[str](), threading.Event(), list[int]()

    class Odd(Ticker):
        def tick(self) -> None:
            calls.append(1)
            if len(calls) > 3:
                done.set()
            raise ValueError(f"call {len(calls)}")

    monkeypatch.setattr(threading, "excepthook", lambda caught: told.append(str(caught.exc_value)))
    ticker = Odd(0.001, "odd")
    ticker.start()
    assert done.wait(10)
    ticker.stop()
    assert told == ["call 1"]


def test_a_watcher_says_once_that_it_failed_and_judges_again_later(
    make: Make, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(evidence: object) -> None:
        raise ZeroDivisionError("by a rule")

    watcher = make()
    with monkeypatch.context() as patch:
        patch.setattr(watching, "judge", fail)
        for _ in range(3):
            watcher._rules_at = 0.0
            watcher._tick()
    assert len(said) == 1 and "by a rule" in said[0]
    assert watcher._rules_at > 0.0, "not at each tick from now on"
    look(watcher)


def test_the_next_look_is_within_a_minute_however_long_one_takes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, clock = make(), [1e9]
    monkeypatch.setattr(watching, "wall_time", lambda: clock[0])

    def judge_slowly(evidence: object) -> list[Finding]:
        clock[0] += 15.0
        return []

    monkeypatch.setattr(watching, "judge", judge_slowly)
    look(watcher)
    assert watcher._rules_at == 1e9 + 60.0
