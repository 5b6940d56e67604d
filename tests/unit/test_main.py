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
    monkeypatch.setattr(cli, "users_line", lambda error: "")  # as if it were raised by us
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


def test_a_line_of_the_jobs_own_is_no_bug_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Methods that a plan asks, such as flops, are called from many places."""
    job = tmp_path / "job.py"
    job.write_text(
        "from torch import nn\nfrom paceline import Workload\n"
        "class Job(Workload):\n"
        "    def build_model(self, config): return nn.Linear(2, 2)\n"
        "    def build_data(self, config, split): return [0] * 64\n"
        "    def loss(self, model, batch): return batch.sum(), len(batch)\n"
        "    def flops(self, config): return 2 * config.model.width\n"
    )
    with pytest.raises(SystemExit) as left, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["paceline", "plan", f"{job}:Job", "launch.device=cpu"])
        cli._run()
    said = capsys.readouterr().err
    assert left.value.code == Outcome.CRASHED.exit_code and "bug in Paceline" not in said
    assert "job.py:7 in flops: AttributeError: 'Section' object has no attribute 'width'" in said
