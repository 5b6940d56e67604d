"""Writes to disks that are full or read-only, on real ones: what is held back, dropped, said."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.data.base import TextData
from paceline.data.text import prepare_tokens
from paceline.errors import DiskError
from paceline.launch.archive import begin_attempt
from paceline.launch.deadlines import Deadlines
from paceline.launch.follow import Follower
from paceline.launch.supervisor import log_line
from paceline.machine.fork_server import temporary_folder
from paceline.records import Limits, list_unwritten
from paceline.records.disk import LOG_BYTES, Appender, LogStream, Loss, Losses, reserve, save_last
from paceline.records.files import write_atomic
from paceline.records.heartbeats import Beat, last_beat
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import (
    STEPS,
    TRAINING,
    read_checkpoints,
    read_steps,
    read_training,
)
from paceline.train.heartbeat import Heartbeat, StepMark, read_mark
from tests.disks import break_disk, breakable_disk, fill, needs_mounts, small_disk
from tests.saved import build_saver, save

pytestmark = needs_mounts


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "256k") as made:
        yield made


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    with breakable_disk(tmp_path / "broken") as made:
        yield made


def lines(first: int, last: int) -> bytes:
    return b"".join(b"line %04d of those that are written\n" % n for n in range(first, last + 1))


# Lines


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(disk: Path) -> None:
    lost, path = Losses(), disk / "log"
    file = Appender(path, lost)
    file.append(lines(1, 40))
    assert file.flush() and not lost.by_file
    filling = fill(disk)
    for first in range(41, 241, 20):
        file.append(lines(first, first + 19))
        file.flush()
    half = path.read_bytes()
    assert len(half) % 4096 == 0 and not half.endswith(b"\n"), "the disk has cut a line"
    missing = len(lines(1, 240)) - len(half)
    assert lost.by_file[path].num_bytes == missing
    assert lost.by_file[path].error == "No space left on device"
    filling.unlink()
    assert file.flush()
    file.close()
    assert path.read_bytes() == lines(1, 240)
    assert lost.by_file[path].num_bytes == 0 and lost.by_file[path].num_writes >= 5


def test_what_is_held_back_does_not_grow_and_no_line_is_cut(disk: Path) -> None:
    lost, path = Losses(), disk / "log"
    file = Appender(path, lost, hold=1000)
    file.append(lines(1, 40))
    file.flush()
    filling = fill(disk)
    for first in range(41, 9001, 20):
        file.append(lines(first, first + 19))
        file.flush()
    assert len(file._held) < 1100
    filling.unlink()
    file.append(lines(9001, 9001))
    file.close()
    found = path.read_bytes()
    kept = found.splitlines(keepends=True)
    assert all(line in lines(1, 9001) and len(line) == 36 for line in kept)
    assert kept[-1] == lines(9001, 9001) and len(kept) < 250
    assert lost.by_file[path].num_bytes == len(lines(1, 9001)) - len(found)


def test_half_a_line_does_not_stay_behind(disk: Path) -> None:
    path = disk / "log"
    fill(disk)
    with path.open("wb") as file:
        file.write(b"")
    (disk / "filling").unlink()
    log = Appender(path)
    log.append(lines(1, 100))
    log.flush()
    fill(disk)
    log.append(lines(101, 300))
    log.close()
    assert path.read_bytes() == lines(1, 113), "4096 is in the 114th line"


def test_a_line_that_many_processes_add_to_one_log(disk: Path) -> None:
    run = RunDir(disk)
    log_line(run, "before")
    filling = fill(disk)
    for _ in range(200):
        log_line(run, "while the disk was full" * 5)
    filling.unlink()
    log_line(run, "after")
    said = run.launcher_log.read_text().splitlines()
    assert said[0].endswith(": before") and said[-1].endswith(": after")
    assert all(line.endswith("full") for line in said[1:-1])
    (unwritten,) = list_unwritten(run)
    assert unwritten.file == "launcher.log" and unwritten.num_writes == 200 - len(said[1:-1])


def test_output_of_a_rank_is_dropped_not_raised(disk: Path) -> None:
    lost, path = Losses(), disk / "log.txt"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    file = Appender(path, lost, LOG_BYTES, handle=handle)
    stream, other = (LogStream.open_text(file, handle) for _ in range(2))
    print("before", file=stream)
    filling = fill(disk)
    for number in range(3000):
        print("while full", number, "x" * 100, file=stream if number % 3 else other)
    assert lost.by_file[path].num_bytes > 100_000
    filling.unlink()
    print("after", file=other)
    said = path.read_text().splitlines()
    assert said[0] == "before" and said[-1] == "after"
    assert all(line.startswith("while full ") and line.endswith("x" * 100) for line in said[1:-1])
    os.close(handle)


def test_threads_and_children_print_into_one_log(disk: Path) -> None:
    """Found by filling disks at random: a save that fails is logged by its thread."""
    file = Appender(disk / "log", hold=1 << 20)
    fill(disk)

    def write(who: int) -> None:
        for number in range(2000):
            file.append(b"thread %d says %d\n" % (who, number))
            file.flush()

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    with file._alone():  # a child must not wait for what its parent holds
        child = os.fork()
        if child == 0:
            file.append(b"child\n")
            os._exit(0 if file._held + file._new == b"child\n" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for thread in threads:
        thread.join()
    (disk / "filling").unlink()
    file.close()
    said = file.path.read_text().splitlines()
    assert sorted(said) == sorted(f"thread {w} says {n}" for w in range(4) for n in range(2000))


def test_a_line_that_never_ends_is_not_held_without_bound(disk: Path) -> None:
    file = Appender(disk / "log", hold=1000)
    file.append(b"progress")
    file.flush()
    filling = fill(disk)
    for number in range(2000):
        file.append(b"\r%d of 2000" % number)
        file.flush()
    assert len(file._held) <= 1000
    filling.unlink()
    file.append(b"\nafter\n")
    file.close()
    assert file.path.read_bytes().endswith(b"\nafter\n")


# Tables


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1 / step, "step_s": 0.25}


def test_a_table_says_which_rows_are_missing(disk: Path) -> None:
    lost, path = Losses(), disk / "training.csv"
    file = TableFile(path, TRAINING, lost=lost)
    file.hold = 2000
    for step in range(1, 1001):
        if step == 101:
            filling = fill(disk)
        if step == 900:
            filling.unlink()
        file.add(row(step))
        file.flush()
    file.close()
    found = [each.step for each in read_training(path)]
    ((first, last),) = lost.by_file[path].missing
    assert found == [*range(1, first), *range(last + 1, 1001)] and 101 <= first < 250
    assert 800 < last < 900, "the newest were held back, and written"
    assert lost.by_file[path].num_bytes > 0


def test_a_table_that_begins_on_a_full_disk_has_its_header_first(disk: Path) -> None:
    lost, path, filling = Losses(), disk / "steps.csv", fill(disk)
    file = TableFile(path, STEPS, lost=lost)
    file.hold = 500
    for step in range(1, 101):
        file.add({"step": step, "wall_s": 0.5})
        file.flush()
    filling.unlink()
    file.close()
    rows = read_steps(path)
    ((first, last),) = lost.by_file[path].missing
    assert (first, rows[0].step, rows[-1].step) == (1, last + 1, 100)
    assert path.read_text().startswith("step,warmup,")


def test_a_table_on_a_disk_that_stays_full_loses_its_end_and_says_so(disk: Path) -> None:
    lost, path = Losses(), disk / "training.csv"
    file = TableFile(path, TRAINING, lost=lost)
    for step in range(1, 301):
        if step == 11:
            fill(disk)
        file.add(row(step))
        file.flush()
    file.close()
    assert path.read_bytes().endswith(b"\n")
    last = read_training(path)[-1].step
    assert lost.by_file[path].missing == [(last + 1, 300)]


def test_a_full_disk_takes_the_cut_of_a_resumed_run_and_keeps_a_row_whole(disk: Path) -> None:
    lost, path = Losses(), disk / "training.csv"
    file = TableFile(path, TRAINING)
    step = 0
    while path.stat().st_size % 4096 < 4086:
        step += 1  # until a longer row would need another page
        file.add(row(step))
        file.flush()
    file.close()
    fill(disk)
    before = path.read_bytes()
    again = TableFile(path, TRAINING, kept=step, lost=lost)
    again.amend_last("val_loss", 0.123456789)
    assert path.read_bytes() == before and lost.by_file[path].num_bytes == 11
    again.close()
    TableFile(path, TRAINING, kept=step - 5).close()
    assert [each.step for each in read_training(path)] == list(range(1, step - 4))


def test_spans_of_missing_steps_are_few() -> None:
    loss = Loss()
    for step in [3, 4, 4, 5, 9, *range(20, 200, 2)]:
        loss.miss_step(step)
    assert loss.missing[:3] == [(3, 5), (9, 9), (20, 20)]
    assert len(loss.missing) == 16 and loss.missing[-1][1] == 198


# Whole files


def test_a_record_has_its_place_on_a_full_disk(disk: Path) -> None:
    path = disk / "result.json"
    reserve(path, 8192)
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*/other.json'"):
        write_atomic(disk / "other.json", "x" * 5000)
    save_last(path, "x" * 8000)
    assert path.read_text() == "x" * 8000
    assert sorted(os.listdir(disk)) == ["filling", "result.json"], "nothing else is left"
    with pytest.raises(OSError, match="No space left"):
        reserve(disk / "end.json", 4096)
    assert sorted(os.listdir(disk)) == ["filling", "result.json"]


def test_a_record_that_has_outgrown_its_place(disk: Path) -> None:
    path, lost = disk / "result.json", Losses()
    reserve(path, 4096)
    filling = fill(disk)
    assert not lost.keep(path, "x" * 20_000, save_last)
    assert lost.by_file[path].num_bytes == 20_000 and not path.exists()
    filling.unlink()
    assert lost.keep(path, "y" * 20_000, save_last) and lost.by_file[path].num_bytes == 0
    assert path.read_text() == "y" * 20_000


def test_a_disk_that_is_full_for_days_is_told_in_a_few_notes(disk: Path) -> None:
    saver = build_saver(disk / "checkpoints")
    save(saver, 1)
    filling = fill(disk)
    for step in range(2, 40):
        save(saver, step)
    assert len(saver.notes) == 9 and "step 2 not written" in saver.notes[0]
    assert saver.notes[-1].startswith("30 more such notes") and "step 39" in saver.notes[-1]
    filling.unlink()
    save(saver, 40)
    saver.close()
    rows = read_checkpoints(disk / "checkpoints.csv")
    assert [each.step for each in rows if each.is_written] == [1, 40] and len(rows) == 40
    assert saver.writer.folder.steps() == [40, 1]


def test_no_temporary_file_can_be_made(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(disk)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(disk)])
    with pytest.raises(DiskError, match="hint: .* TMPDIR"):
        temporary_folder()


def test_a_token_cache_without_room_is_a_plain_error(disk: Path, corpus: Path) -> None:
    fill(disk)
    data = TextData(source=str(corpus), cache_dir=str(disk))
    with pytest.raises(DiskError, match="data.cache_dir") as raised:
        prepare_tokens(data, lambda text: None)
    assert raised.value.exit_code == 10 and "hint: free space" in str(raised.value)
    assert not [path for path in (disk / "tokens").iterdir() if path.suffix != ".lock"]


def test_a_token_cache_that_is_read_only_serves_what_it_has(broken: Path, corpus: Path) -> None:
    data = TextData(source=str(corpus), cache_dir=str(broken))
    first = prepare_tokens(data, lambda text: None)
    break_disk(broken)
    assert prepare_tokens(data, lambda text: None) == first
    with pytest.raises(DiskError, match="Read-only file system"):
        prepare_tokens(data.model_copy(update={"val_fraction": 0.5}), lambda text: None)


# Signs of life


class At:
    step, phase, marks = 3, "forward", 17


def test_a_rank_that_cannot_write_its_heartbeat_tells_it(broken: Path) -> None:
    run, told = RunDir(broken), list[Beat]()
    mark = StepMark(run.root / "step", run.lost)
    heart = Heartbeat(Appender(run.heartbeat(0), run.lost, hold=0), 0, At(), 1.0, told.append)
    heart.tick()
    break_disk(broken)
    heart.tick()
    mark.set(4)  # a mapped page would end this process here, or at its next write-back
    assert last_beat(run.heartbeat(0)).step == 3 and len(told) == 1 and told[0].marks == 17
    assert {each.error for each in list_unwritten(run)} == {"Read-only file system"}
    assert {each.file for each in list_unwritten(run)} == {"heartbeat_rank0.jsonl", "step"}


def test_a_rank_whose_file_stands_still_is_alive_by_what_it_tells(tmp_path: Path) -> None:
    run, now = RunDir(tmp_path), [0.0]
    limits = Limits(start_s=300, progress_s=60, total_s=None, grace_s=1, collective_s=1)
    run.heartbeat(0).write_text(Beat(1.0, 0, 1, "forward", 5).to_line())
    told = Beat()
    watched = Deadlines(run, {0: lambda: told}, limits, lambda: now[0])
    unwatched = Deadlines(run, [0], limits, lambda: now[0])
    for second in range(1, 200):
        now[0] = float(second)
        told = Beat(float(second), 0, 1 + second, "forward", 5 * second)
        assert watched.missed() is None
        missed = unwatched.missed()
    assert missed == "progress"
    for second in range(200, 300):  # it beats, and stands still
        now[0] = float(second)
        told = Beat(float(second), 0, 200, "forward", 1000)
        missed = watched.missed()
    assert missed == "progress"


def test_a_rank_whose_step_mark_moves_is_alive(disk: Path) -> None:
    run, now = RunDir(disk), [0.0]
    limits = Limits(start_s=300, progress_s=60, total_s=None, grace_s=1, collective_s=1)
    run.make_rank(0)
    mark = StepMark(run.step_mark(0), run.lost)
    run.heartbeat(0).write_text(Beat(1.0, 0, 1, "forward", 5).to_line())
    fill(disk)
    deadlines = Deadlines(run, [0], limits, lambda: now[0])
    for second in range(1, 400):
        now[0] = float(second)
        mark.set(second)
        assert deadlines.missed() is None
    assert read_mark(run.step_mark(0)) == 399 and not run.lost.by_file


def test_who_follows_a_run_says_once_that_its_log_cannot_be_written(disk: Path) -> None:
    run, said = RunDir(disk), list[str]()
    begin_attempt(run, resume=False)
    run.make_rank(0)
    follower = Follower(run, 1, lambda row: None, said.append)
    run.rank_log(0).write_bytes(lines(1, 300))
    filling = fill(disk)
    for _ in range(3):
        follower.tick()
    why = "train.log: No space left on device"
    assert said == [f"warning: the run's files cannot be written ({why}); it goes on"]
    filling.unlink()
    follower.tick()
    assert run.train_log.read_text().count("[rank 0] line ") == 300


# The run directory


def test_a_directory_that_is_deleted_is_the_error_and_stays_deleted(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    with pytest.raises(DiskError, match="was deleted, renamed or replaced"), run.needed():
        run.root.rmdir()
        with pytest.raises(FileNotFoundError):
            run.make_rank(0)
        log_line(run, "nobody reads this")
        raise FileNotFoundError("launch.json")
    assert not run.root.exists()
    run.root.mkdir()
    with pytest.raises(DiskError), run.needed():
        run.root.rename(tmp_path / "moved")
        run.root.mkdir()


def test_a_full_disk_before_ranks_start_is_a_plain_error(disk: Path) -> None:
    run = RunDir(disk)
    fill(disk)
    with pytest.raises(DiskError, match="plan.json cannot be written: No space left") as raised:
        with run.needed():
            write_atomic(run.plan, json.dumps(["x" * 5000]))
    assert raised.value.exit_code == 10


def test_a_disk_that_takes_nothing_for_a_while_holds_nobody_up(tmp_path: Path) -> None:
    """A pipe that is full is the slowest disk there is; what was said meanwhile comes in order."""
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * room)
    file = Appender(tmp_path / "log", handle=writer)
    began = time.monotonic()
    for number in range(100):
        file.append(f"{number}\n".encode())
        file.flush_soon(patience_s=0.1)
    assert time.monotonic() - began < 1, "one wait of 0.1 s, and no other"
    with os.fdopen(reader, "rb") as held:
        assert held.read(room) == b"." * room
        file.close()
        told = held.read()
    assert told.split() == [str(number).encode() for number in range(100)]


def test_what_was_printed_is_there_when_the_process_dies_next(tmp_path: Path) -> None:
    words = """
import os, sys
from pathlib import Path
from paceline.records.disk import PATIENCE_S, Appender, LogStream
sys.stdout = LogStream.open_text(Appender(Path("log")), 1, PATIENCE_S)
for number in range(50):
    print(number)
os._exit(7)
"""
    ran = subprocess.run([sys.executable, "-c", words], cwd=tmp_path)
    assert ran.returncode == 7
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(50)]
