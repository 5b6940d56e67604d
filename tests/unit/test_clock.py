"""A clock that is set by hours while a run goes on, in either direction, and clocks of machines
that differ: no deadline passes early or late, no other rank is blamed, no duration is wrong."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.launch.archive import measure_ettr
from paceline.launch.deadlines import Deadlines, explain_missed
from paceline.records import Attempt, Limits, RankEnd
from paceline.records.disk import Appender
from paceline.records.heartbeats import Beat, iter_beats, last_beat
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.train import heartbeat
from tests.machines import draw

HOURS = 3600 * 5
LIMITS = Limits(start_s=300, progress_s=60, total_s=10_000, grace_s=1, collective_s=1)


def set_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)


@pytest.mark.parametrize("by_s", [HOURS, -HOURS])
def test_moments_of_one_process_do_not_jump(by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall_time()
    assert abs(before - time.time()) < 60, "the time of day"
    set_clock(monkeypatch, by_s)
    assert 0 <= wall_time() - before < 60


@pytest.mark.parametrize("by_s", [HOURS, -HOURS])
def test_a_beat_after_a_jump_is_a_beat_and_a_standstill_is_one(by_s: float, tmp_path: Path) -> None:
    """Even if heartbeats told the jump: their time is only compared with its last value."""
    run, now = RunDir(tmp_path), SimpleNamespace(s=0.0)
    deadlines = Deadlines(run, [0], LIMITS, lambda: float(now.s))
    found = {}
    for second in range(1, 300, 2):
        step = min(second, 150)  # from then on it stands still
        told = 1e9 + second + (by_s if second > 100 else 0)
        run.heartbeat(0).write_text(Beat(told, 0, step, "forward", step).to_line())
        now.s = second
        found[second] = deadlines.missed()
    first = min(second for second, missed in found.items() if missed == "progress")
    assert 210 <= first <= 214, "60 s after the last step"


def test_the_seconds_of_silence_are_counted_here_and_not_read_from_clocks(tmp_path: Path) -> None:
    """Rank 1 froze before the clock was set back: its last beat looks like the newest of all."""
    run, now = RunDir(tmp_path), SimpleNamespace(s=0.0)
    draw("launch.nproc=2", "launch.device=cpu").save(run.launch)
    deadlines = Deadlines(run, [0, 1], LIMITS, lambda: float(now.s))
    for second in range(1, 80):
        now.s = second
        if second < 10:
            run.heartbeat(1).write_text(Beat(1e9 + second, 1, 7, "forward", 70).to_line())
        told = 1e9 + second - (HOURS if second > 10 else 0)
        run.heartbeat(0).write_text(Beat(told, 0, 7, "forward", 70).to_line())
        deadlines.missed()
    silence = {rank: deadlines.silent_s(rank) for rank in (0, 1)}
    assert silence[0] < 2 and 68 <= silence[1] <= 72
    ends = {r: RankEnd(rank=r, host="h", exit_code=-9, silent_s=s) for r, s in silence.items()}
    rank, why = explain_missed(run, ends, "progress")
    assert rank == 1 and "its heartbeat stopped before the others'" in why


def test_a_machine_whose_clock_is_behind_is_not_blamed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    draw("launch.nproc=2", "launch.device=cpu").save(run.launch)
    run.heartbeat(0).write_text(Beat(1e9, 0, 7, "backward", 70).to_line())
    run.heartbeat(1).write_text(Beat(1e9 + HOURS, 1, 7, "data", 70).to_line())
    ends = {rank: RankEnd(rank=rank, host="h", exit_code=-9, silent_s=0.5) for rank in (0, 1)}
    assert explain_missed(run, ends, "progress")[0] == 1, "who is behind, by steps and phases"


def test_an_attempt_that_seems_to_end_before_it_began_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("step,step_s\n1,2.0\n2,4.0\n")
    rows = read_training(tmp_path / "training.csv")
    attempts = [
        Attempt(number=1, resume=False, started_at=5000.0, ended_at=100.0),
        Attempt(number=2, resume=True, started_at=200.0, ended_at=212.0),
    ]
    assert measure_ettr(rows, attempts) == 0.5


def test_heartbeats_of_a_long_run_take_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "MAX_BEATS", 5)
    path, at = tmp_path / "heartbeat_rank0.jsonl", SimpleNamespace(step=0, phase="data", marks=0)
    beats = heartbeat.Heartbeat(Appender(path, hold=0), 0, at, 1.0)
    for step in (*range(1, 8), 10**9, 8):  # a long line, then a shorter one in its place
        at.step = at.marks = step
        beats.tick()
    assert [beat.step for beat in iter_beats(path)] == [1, 2, 3, 4, 5, 8]
    assert last_beat(path).step == 8
    assert path.stat().st_size == 6 * 128
