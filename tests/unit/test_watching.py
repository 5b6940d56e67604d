"""The thread that judges a live run: what it reads, how often, and what it tells again."""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.health import RulesConfig
from paceline.health import Evidence, judge
from paceline.records import growing
from paceline.records.cells import parse_chunk
from paceline.records.columns import Layout
from paceline.records.events import iter_events
from paceline.records.findings import RunFinding
from paceline.records.growing import ThinnedTable
from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import STEPS, TELEMETRY, TRAINING
from paceline.records.tails import RowTail
from paceline.run import watching
from paceline.run.watching import Watcher
from paceline.train.heartbeat import MARK, Ticker
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

    def judge_slowly(evidence: object) -> list[RunFinding]:
        clock[0] += 15.0
        return []

    monkeypatch.setattr(watching, "judge", judge_slowly)
    look(watcher)
    assert watcher._rules_at == 1e9 + 60.0


def fill(path: Path, layout: Layout[Any], rows: Iterable[dict[str, Any]]) -> None:
    file = TableFile(path, layout)
    for row in rows:
        file.add(row)
    file.close()


def samples(first: int, last: int, sources: Sequence[str] = ("host",)) -> Iterator[dict[str, Any]]:
    """Yield a second's samples each, of a process that takes 3 MiB more each time."""
    for second in range(first, last):
        for source in sources:
            held = {"rss_bytes": 2**30 + 3 * 2**20 * second} if source == "host" else {}
            yield {"time": second, "source": source, **held}


def test_a_long_table_is_kept_whole_at_its_end_and_thinned_before_it(tmp_path: Path) -> None:
    path, sources = tmp_path / "telemetry.csv", ["host", "gpu0", "gpu1", "gpu2"]
    table = ThinnedTable(path, TELEMETRY, "time", recent=100)
    for first in range(0, 10_000, 70):
        fill(path, TELEMETRY, samples(first, first + 70, sources))
        kept = table.read()
        assert len(kept) <= 4 * 201
    times = kept.column("time")[kept.column("source") == "gpu1"]
    assert times[-100:].tolist() == list(range(9_910, 10_010)), "the end is whole"
    assert times[0] == 0 and set(np.diff(times[:-101])) == {128.0}, "and all before it is known"
    assert {(times == kept.column("time")[kept.column("source") == s]).all() for s in sources}


def test_a_thinned_table_takes_steps_again_that_a_new_attempt_does(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    table = ThinnedTable(path, TRAINING, "step", recent=100)
    fill(path, TRAINING, ({"step": step, "loss": 1.0} for step in range(1, 51)))
    table.read()
    file = TableFile(path, TRAINING, kept=30)
    file.add({"step": 31, "loss": 2.0})
    file.widen(["val/new"])
    file.close()
    kept = table.read()
    assert kept.column("step").tolist() == list(range(1, 32)) and kept.column("loss")[-1] == 2.0
    file.amend_last("val_loss", 5.0)
    assert table.read().column("val_loss")[-1] == 5.0 and len(table.read()) == 31
    table.skip()
    assert len(table.read()) == 0
    TableFile(path, TRAINING, kept=10).close()
    assert len(table.read()) <= 10


def test_a_look_takes_in_what_is_new_and_no_more(
    tmp_path: Path, make: Make, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in 0.7: after 1 h of 64 ranks a look took 15 s, and the next was 2 h later."""
    run, watcher = RunDir(tmp_path), make()
    seen = list[int]()

    def parse(path: Path, text: str, *more: Any) -> Any:
        seen.append(text.count("\n"))
        return parse_chunk(path, text, *more)

    monkeypatch.setattr(growing, "parse_chunk", parse)
    for first in range(0, 1000, 10):
        fill(run.telemetry_of(0), TELEMETRY, samples(first, first + 10))
        training = ({"step": n, "loss": 3.0, "grad_norm": 1.0} for n in range(first, first + 10))
        fill(run.training, TRAINING, training)
        look(watcher)
    assert max(seen) == 10 and sum(seen) == 2000
    assert len(said) == 1 and "memory of rank 0 grows all the time" in said[0]


def test_what_an_earlier_attempt_has_sampled_is_not_judged(
    tmp_path: Path, make: Make, said: list[str]
) -> None:
    run = RunDir(tmp_path)
    fill(run.telemetry_of(0), TELEMETRY, samples(0, 200))
    watcher = make()
    fill(run.telemetry_of(0), TELEMETRY, samples(200, 205))
    look(watcher)
    assert said == [] and len(watcher._all(1e9).telemetry[0]) == 5


def test_a_long_run_that_becomes_slower_is_told_by_thinned_rows(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    table = ThinnedTable(path, TRAINING, "step", recent=500)
    slower = ({"step": n, "loss": 3.0, "step_s": 1 + n / 8000} for n in range(1, 8001))
    fill(path, TRAINING, slower)
    (found,) = [f for f in judge(Evidence(1, training=table.read())) if "drift" in f.kind]
    assert found.evidence["early_s"] == pytest.approx(1.15, abs=0.01)
    # The middle of the last tenth, or later: of 800 steps the first 300 are thinned.
    assert 1.95 <= found.evidence["late_s"] < 2.0


def train(watcher: Watcher, path: Path, first: int, last: int, **odd: dict[int, Any]) -> None:
    """Write steps of which some have other values, and judge."""
    usual = {"loss": [3 + 0.01 * n for n in range(7)], "grad_norm": [1.0]}
    fill(
        path,
        TRAINING,
        (
            {"step": n, "step_s": 0.1}
            | {name: odd.get(name, {}).get(n, v[n % len(v)]) for name, v in usual.items()}
            for n in range(first, last + 1)
        ),
    )
    look(watcher)


@pytest.mark.parametrize(
    ("kind", "column", "bad"),
    [("loss_spike", "loss", 9.0), ("nan_loss", "loss", math.nan), ("zero_grad", "grad_norm", 0.0),
     ("gradient_explosion", "grad_norm", 500.0)],
)  # fmt: skip
def test_what_happens_again_is_told_and_acted_on_again(
    kind: str, column: str, bad: float, tmp_path: Path, make: Make
) -> None:
    """Found in 0.7: of spikes in steps 50, 300 and 600 only the first was told."""
    run, watcher = RunDir(tmp_path), make(**{kind: "checkpoint"})
    for first, odd in ((1, 50), (101, None), (201, 250), (301, None), (401, 450)):
        train(watcher, run.training, first, first + 99, **{column: {odd: bad} if odd else {}})
        assert run.checkpoint_request.exists() == (odd is not None)
        run.checkpoint_request.unlink(missing_ok=True)
        look(watcher)
        assert not run.checkpoint_request.exists(), "it only stands"
    assert [(e.kind, e.step) for e in iter_events(run.events)] == [
        (kind, 50), (kind, 250), (kind, 450)
    ]  # fmt: skip


def test_what_goes_on_is_told_once_and_again_where_it_was_over(tmp_path: Path, make: Make) -> None:
    run, watcher = RunDir(tmp_path), make()
    bad = dict.fromkeys([*range(40, 81), *range(95, 121)], math.nan)
    for first in range(1, 121, 10):
        train(watcher, run.training, first, first + 9, loss=bad)
    before, again = iter_events(run.events)
    assert (before.step, again.step) == (40, 95)
    assert "in 47 steps, first in step 40 and last in step 100" in again.words


def test_steps_that_are_taken_again_are_told_again(tmp_path: Path, make: Make) -> None:
    run, watcher = RunDir(tmp_path), make()
    train(watcher, run.training, 1, 100, loss={90: 9.0})
    TableFile(run.training, TRAINING, kept=60).close()
    look(watcher)
    train(watcher, run.training, 61, 100, loss={80: 9.0})
    assert [e.step for e in iter_events(run.events)] == [90, 80]


def test_events_of_one_kind_have_an_end(tmp_path: Path, make: Make) -> None:
    run, watcher = RunDir(tmp_path), make()
    for first in range(1, 31):
        train(watcher, run.training, 2 * first - 1, 2 * first, grad_norm={2 * first: 0.0})
    assert len(list(iter_events(run.events))) == watching.MAX_REPEATS


@pytest.mark.parametrize("off_s", [-900, 0, 900])
def test_silence_is_told_by_this_machine_s_clock_alone(
    off_s: int, tmp_path: Path, make: Make, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in 0.7: a file server whose clock was 180 s behind made all ranks silent."""
    run, clock = RunDir(tmp_path), [1e9]
    monkeypatch.setattr(watching, "wall_time", lambda: clock[0])

    def beat(step: int) -> None:
        run.heartbeat(0).write_text(Beat(clock[0], 0, step, "forward", step).to_line())
        run.step_mark(0).write_bytes(MARK.pack(step))
        for path in (run.heartbeat(0), run.step_mark(0)):
            os.utime(path, (clock[0] + off_s, clock[0] + off_s))

    run.make_rank(0)
    beat(7)
    clock[0] += 3600  # what is there is of an earlier attempt
    watcher = make()
    for _ in range(30):
        clock[0] += 10
        look(watcher)
    assert said == [], "it has not begun"
    for step in range(1, 40):
        clock[0] += 10
        beat(step)
        look(watcher)
    assert said == [], "it is alive"
    for _ in range(20):
        clock[0] += 10
        look(watcher)
    # Ten seconds between looks: 120 s are over in the 13th, 180 s in the 19th.
    told = {e.kind: e.evidence for e in iter_events(run.events)}
    assert list(told) == ["throughput_flatline", "heartbeat_stall"]
    assert (told["throughput_flatline"]["idle_s"], told["heartbeat_stall"]["silent_s"]) == (
        130,
        190,
    )
