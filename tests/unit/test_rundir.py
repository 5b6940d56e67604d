"""The run directory: never two runs in one, never a path outside, never half a file."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.talk import ConsoleTalk
from paceline.errors import ConfigError, DataError, DiskError
from paceline.job import load_job
from paceline.records import Choice, Env, Finding, base, runlock
from paceline.records.files import write_atomic
from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir, slug
from paceline.run import flow
from tests.machines import MACHINE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_tiny", "lm_tiny"),
        ("$(touch x); ../../etc", "touch-x-..-..-etc"),
        ("a\nb", "a-b"),
        ("<script>", "script"),
        ("..", "run"),
        ("/", "run"),
    ],
)
def test_names_are_one_safe_path_component(name: str, expected: str) -> None:
    assert slug(name) == expected
    assert "/" not in slug(name) and slug(name) not in ("", ".", "..")


def test_latest_points_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunDir.create("a", None), RunDir.create("a", None)
    assert first.root != second.root
    assert (tmp_path / "runs" / "latest").resolve() == second.root


def test_a_live_run_keeps_others_out(tmp_path: Path) -> None:
    run = RunDir.create("a", tmp_path / "run")
    with run.lock():
        run.require_fresh()
        with pytest.raises(ConfigError, match=f"live run .process {os.getpid()}"):
            run.lock().__enter__()
    with run.lock():  # the lock is free again once its owner has left
        pass


def beat_on(run: RunDir, over: threading.Event) -> None:
    """As a rank on another machine does."""
    step = 0
    while not over.wait(0.02):
        step += 1
        run.heartbeat(0).write_text(Beat(1e9 + step, 0, step).to_line())


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose lock another machine has taken, on a file system where that is not seen here."""
    monkeypatch.setattr(runlock, "_is_local", lambda folder: False)
    monkeypatch.setattr(runlock, "WATCH_S", 0.4)
    run = RunDir.create("a", tmp_path / "run")
    run.root.joinpath(".lock").write_text("4711 elsewhere\n")
    return run


def test_a_live_run_on_another_machine_keeps_others_out(shared: RunDir) -> None:
    over, said = threading.Event(), list[str]()
    beating = threading.Thread(target=beat_on, args=(shared, over))
    beating.start()
    try:
        for _ in range(2):  # nor does a refusal make it free
            with pytest.raises(ConfigError, match=r"live run \(process 4711 on elsewhere\)"):
                shared.lock(said.append).__enter__()
    finally:
        over.set()
        beating.join()
    assert said[0].startswith("process 4711 on elsewhere has not said that its run is over")


def test_a_machine_that_is_gone_keeps_nobody_out(shared: RunDir) -> None:
    shared.heartbeat(0).write_text(Beat(1e9, 0, 7).to_line())
    started_at = time.monotonic()
    with shared.lock():
        assert time.monotonic() - started_at > 0.3, "it was watched for a while"
    said = list[str]()
    with shared.lock(said.append):
        assert said == [], "who leaves in order leaves no name"


def test_to_look_whether_a_run_lives_takes_nothing_from_it(shared: RunDir) -> None:
    shared.config.touch()
    with pytest.raises(ConfigError, match="never writes over another"):
        shared.require_fresh()
    assert shared.root.joinpath(".lock").read_text() == "4711 elsewhere\n"


def test_a_used_directory_is_not_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="never writes over another"):
        RunDir.create("a", folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"], "something was left in it"


def test_out_in_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a run directory"):
        RunDir.create("a", tmp_path / "file" / "run")


@pytest.mark.parametrize("place", ["checkpoints/x", "new", "link/x", None])
def test_no_run_is_made_inside_another(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention would delete it, and readers would take its files for the other's."""
    other = RunDir.create("a", tmp_path / "other")
    other.config.touch()
    other.launch.touch()
    (other.root / "link").symlink_to(other.root)
    monkeypatch.chdir(other.root)  # where nothing is asked for it would be ./runs/
    for make in (RunDir.require_place, lambda out: RunDir.create("b", out)):
        with pytest.raises(ConfigError, match=f"inside {other.root}: that is another run's own"):
            make(None if place is None else Path(place))
    names = {path.name for path in other.root.iterdir()}
    assert names == {"run.yaml", "launch.json", "link"}, "something was left in it"
    other.launch.unlink()  # a folder of configs is not a run
    assert RunDir.create("b", tmp_path / "other" / "mine").root.is_dir()


def test_a_disk_that_takes_nothing_is_told_from_a_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of outcomes: out of memory or disk is 10, what was typed wrong is 2."""

    def full(self: Path, **_: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot make a run directory: .* Permission denied"):
        RunDir.require_place(tmp_path / "run")
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda *_: read_only)
    with pytest.raises(DiskError, match="cannot make a run directory: .* Read-only file system"):
        RunDir.require_place(tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskError, match="cannot make a run directory: .* No space left"):
        RunDir.create("a", tmp_path / "run")


def test_opening_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        RunDir.open(tmp_path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    with path.open() as reader:
        write_atomic(path, "a new one")
        assert reader.read() == "old", "it was written over"
    assert path.read_text() == "a new one" and list(tmp_path.iterdir()) == [path]


def test_records_carry_their_schema(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    path.write_text('{"schema": 999}')
    with pytest.raises(DataError, match="schema 999, this Paceline reads 1"):
        Env.load(path)
    path.write_text("not json")
    with pytest.raises(DataError, match="is damaged: no Env record"):
        Env.load(path)


def test_a_finding_reads_as_a_sentence() -> None:
    finding = Finding.error("a.b", "is wrong", hint="set a.b=1")
    assert str(finding) == "a.b: is wrong\nhint: set a.b=1"
    assert Choice(requested="auto", value=1, because="why").because == "why"


@pytest.mark.parametrize("place", ["file", "file/run", "full"])
def test_a_bad_place_is_refused_before_anything_is_planned(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    monkeypatch.setattr(flow, "decide", lambda *_: pytest.fail("planned first"))
    with pytest.raises(ConfigError, match="hint: give --out"):
        flow.run_job(load_job("lm_tiny", []), tmp_path / place, ConsoleTalk())
    RunDir.require_place(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    ["[" * 200_000, '{"schema": ' + "9" * 5_001 + "}", '{"schema": 1e999}', "[]", '{"schema": []}'],
    ids=["deep", "long-number", "infinite", "no-map", "no-number"],
)
def test_a_record_that_none_of_ours_is_is_damaged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    path.write_text(content)
    with pytest.raises(DataError, match="is damaged: no Env record"):
        Env.load(path)


def test_only_plain_files_of_a_sane_size_are_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "env.json", tmp_path / "other"
    MACHINE.save(other)
    path.symlink_to(other)
    with pytest.raises(DataError, match="is a link"):
        Env.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a plain file"):
        Env.load(path)
    assert Env.load(other) == MACHINE
    monkeypatch.setattr(base, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="has more than 100"):
        Env.load(other)
