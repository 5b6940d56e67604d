"""The command line's last resort: what is not a bug of ours is not called one."""

import errno
import os
import sys

import pytest

from paceline import cli
from paceline.errors import DiskError, Outcome


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.EACCES, 2, "runs/x/report.html: Permission denied"),
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
