"""Trackers: what is sent, and that none of them can hurt a run. Each real one is asked by its own
reader in tests/cli/test_track.py."""

import sys
import time
from pathlib import Path

import pytest

from paceline.job import load_job
from paceline.records.rundir import RunDir
from paceline.track import flow
from paceline.track.__main__ import numbers_of
from paceline.track.flow import Trackers
from paceline.track.sinks import SINKS, config_to_send
from tests.machines import plan


def test_every_name_of_the_key_has_a_sink() -> None:
    names = ",".join(SINKS)
    assert load_job("lm_tiny", [f"observe.trackers=[{names}]"]).config.observe.trackers == [*SINKS]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.track.sinks.find_spec", lambda name: None)
    problems = [str(each) for each in plan("observe.trackers=[wandb]").problems()]
    assert problems == [
        "observe.trackers: wandb was asked for, and wandb is not installed\n"
        "hint: pip install wandb, or 'paceline[trackers]' for all of them"
    ]


def test_secrets_are_not_sent() -> None:
    sent = config_to_send(
        {
            "train": {"steps": 6, "best": "auto"},
            "model": {"num_tokens": 7, "api_key": "k", "hf_config": {"auth_token": "t"}},
            "data": {"root": "s3://me:pass@host/x", "url": "https://host/x", "none": None},
            "launch": {
                "env": {"NCCL_DEBUG": "INFO", "MY_SERVICE": "x"},
                "torchrun_args": ["--rdzv-conf=key=secret"],
                "devices": [0, 1],
            },
        }
    )
    assert sent == {
        "train.steps": 6, "train.best": "auto", "model.num_tokens": 7,
        "data.url": "https://host/x", "launch.env.NCCL_DEBUG": "INFO", "launch.devices": "[0, 1]",
    }  # fmt: skip


def test_columns_have_the_names_that_trackers_group_by() -> None:
    row = {"step": "3", "loss": "1.5", "val_loss": "", "lr": "0.1", "tokens_per_s": "9",
           "warmup": "1", "val/accuracy": "0.5", "train/x": "nan"}  # fmt: skip
    found = numbers_of(row)
    assert str(found.pop("train/x")) == "nan"
    assert found == {
        "train/loss": 1.5, "optim/lr": 0.1, "speed/tokens_per_s": 9.0, "val/accuracy": 0.5,
    }  # fmt: skip


def run_with(
    program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, work_s: float = 0.0
) -> tuple[list[str], list[str], float]:
    """Run a program in the place of a tracker; what is said, what is noted, how long the end
    took."""
    said = list[str]()
    (folder / "fake.py").write_text(program)
    real = flow.subprocess.Popen

    def fake(argv: list[str], **more: object) -> object:
        return real([sys.executable, str(folder / "fake.py"), *argv[3:]], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(flow.subprocess, "Popen", fake)
    with Trackers(RunDir(folder), ["wandb"], said.append, last_s=0.5) as trackers:
        time.sleep(work_s)
        trackers.outcome = "ok"
        began = time.monotonic()
    return said, trackers.notes, time.monotonic() - began


def test_a_tracker_that_fails_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "LAST_S", 20.0)
    program = "import sys\nsys.exit('CommError: no network')"
    said, notes, _ = run_with(program, tmp_path, monkeypatch, work_s=1.5)
    assert notes == [
        "tracker wandb failed, and the run goes on without it: CommError: no network"
        " (tracker_wandb.log)"
    ]
    assert said == [f"warning: {notes[0]}"]


def test_a_tracker_that_hangs_is_killed_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    _, notes, took_s = run_with(program, tmp_path, monkeypatch)
    assert len(notes) == 1 and "was killed: it had not sent all 0.5 s after" in notes[0]
    assert took_s < 10


def test_a_tracker_is_told_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, pathlib\nword = sys.stdin.readline()\n"
        "pathlib.Path(sys.argv[2], 'word').write_text(f'{sys.argv[1]} {word}')"
    )
    monkeypatch.setattr(flow.Trackers.__init__, "__defaults__", (20.0,))
    said = list[str]()
    real = flow.subprocess.Popen
    (tmp_path / "fake.py").write_text(program)
    monkeypatch.setattr(
        flow.subprocess,
        "Popen",
        lambda argv, **more: real([sys.executable, str(tmp_path / "fake.py"), *argv[3:]], **more),
    )
    with Trackers(RunDir(tmp_path), ["aim"], said.append) as trackers:
        trackers.outcome = "nan"
    assert (tmp_path / "word").read_text() == "aim nan\n" and not said
