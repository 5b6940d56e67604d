"""The command line's last resort: what is not a bug of ours is not called one."""

import errno
import os
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import DiskError, Outcome


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.EACCES, 2, "runs/x/report.html: Permission denied"),
        (errno.EPERM, 2, "runs/x/report.html: Operation not permitted"),
        (errno.EISDIR, 2, "hint: a folder stands where a file belongs"),
        (errno.ELOOP, 2, "report.html: Too many levels of symbolic links"),
        (errno.ENAMETOOLONG, 2, "hint: choose a shorter name"),
        (errno.ENOSPC, DiskError.outcome.exit_code, "report.html cannot be written: No space left"),
        (errno.ENXIO, Outcome.CRASHED.exit_code, "this is a bug in Paceline"),
    ],
)
def test_errors_of_files(
    number: int, code: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail() -> None:
        raise OSError(number, os.strerror(number), "runs/x/report.html")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["paceline", "report"])
    with pytest.raises(SystemExit) as left:
        cli._run()
    assert left.value.code == code and said in capsys.readouterr().err


def test_a_link_to_itself_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SystemExit) as left, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["paceline", "report", str(tmp_path / "loop")])
        cli._run()
    assert left.value.code == 2 and "a link leads to itself" in capsys.readouterr().err
