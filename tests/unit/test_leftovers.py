"""What a killed process leaves behind is removed by the next one, and nothing else is."""

import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from paceline.data.text import TextData, prepare_tokens
from paceline.machine import fork_server
from paceline.records.files import sweep_torn, write_atomic


def make_folder_as_a_supervisor(parent: Path, tell: int) -> None:
    """In a process of its own: make the temporary folder, tell its name, and wait."""
    tempfile.tempdir = str(parent)
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    os.write(tell, fork_server.temporary_folder().encode())
    time.sleep(100)


def test_folders_of_dead_supervisors_are_swept_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fork_server, "MAX_TEMPORARY", 1000
    )  # the path of this test's folder is long
    heard, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        make_folder_as_a_supervisor(tmp_path, tell)
        os._exit(0)
    os.close(tell)
    made = Path(os.read(heard, 4096).decode())
    os.close(heard)
    assert made.parent == tmp_path
    (made / "listener-x").touch()  # the socket of its fork server
    foreign = tmp_path / "pymp-foreign"  # of a program that is not ours
    foreign.mkdir()
    linked = tmp_path / "pymp-link"
    linked.symlink_to(foreign)
    fork_server.sweep_folders(tmp_path)
    assert made.is_dir(), "its owner lives"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    fork_server.sweep_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pymp-foreign", "pymp-link"]


def test_torn_files_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    names = [".result.json.a8_k2zq1", ".report.html.abcdefgh", ".lock", ".HALT", ".env.json.x"]
    old = time.time() - 3600
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (old, old))
    (tmp_path / ".plan.json.justnow_").touch()
    with (tmp_path / ".report.html.abcdefgh").open("rb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)  # somebody writes it now, very slowly
        sweep_torn(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*names[1:], ".plan.json.justnow_"}
    write_atomic(tmp_path / "result.json", "{}")
    assert (tmp_path / "result.json").read_text() == "{}"


def test_half_built_tokens_are_swept_by_who_builds_them(corpus: Path, tmp_path: Path) -> None:
    data = TextData(source=str(corpus), cache_dir=str(tmp_path / "cache"))
    home, _ = prepare_tokens(data, lambda text: None)
    home.rename(home.with_name(f".{home.name}.killed"))
    (home.parent / ".another.set").mkdir()
    again, _ = prepare_tokens(data, lambda text: None)
    assert again == home and home.is_dir()
    assert not home.with_name(f".{home.name}.killed").exists()
    assert (home.parent / ".another.set").is_dir()
