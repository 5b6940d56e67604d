"""`paceline watch`, `diagnose` and `import` as a user types them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.records.heartbeats import Beat
from paceline.records.rundir import RunDir
from tests.cli.program import environment, paceline
from tests.reported import finish, write_run

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "runs" / "one")


def test_a_run_that_is_over_is_shown_once(run: RunDir, tmp_path: Path) -> None:
    finish(run)
    ran = paceline("watch", "runs/one", cwd=tmp_path)
    assert ran.code == 0 and "fixture  ok" in ran.out and "step 20 of 200" in ran.out
    assert "loss" in ran.out and "█" in ran.out and "FFFF" in ran.out
    many = paceline("watch", "runs", "--once", cwd=tmp_path)
    assert many.code == 0 and "1 run, 0 live" in many.out and "one" in many.out
    data = json.loads(paceline("watch", "runs/one", "--json", cwd=tmp_path).out)
    assert data["state"] == "ok" and len(data["ranks"]) == 2
    assert data["ranks"][1]["phases_s"]["backward"] == 0.3


def test_what_is_not_a_folder_or_an_address_is_refused(tmp_path: Path) -> None:
    ran = paceline("watch", "nowhere", cwd=tmp_path)
    assert ran.code == 4 and "nowhere is not a folder" in ran.err
    (tmp_path / "runs").mkdir()
    ran = paceline("watch", "runs", "--serve", "localhost:port", cwd=tmp_path)
    assert ran.code == 2 and "is not a port" in ran.err
    ran = paceline("watch", "--serve", "::1", cwd=tmp_path)
    assert ran.code == 2 and "stands in brackets" in ran.err
    ran = paceline("watch", "runs", "localhost:80", cwd=tmp_path)
    assert ran.code == 2 and "HOST:PORT is for --serve" in ran.err
    ran = paceline("diagnose", "runs", cwd=tmp_path)
    assert ran.code == 4 and "paceline import" in ran.err


def test_the_watchdog_halts_and_leaves_when_the_run_is_over(run: RunDir, tmp_path: Path) -> None:
    (run.root / ".lock").write_text("1 elsewhere\n")
    for rank, age in ((0, 0), (1, 300)):
        run.heartbeat(rank).write_text(Beat(time.time() - age, rank, 20, "backward", 7).to_line())
    words = [sys.executable, "-m", "paceline", "watch", "runs/one", "--halt", "--interval", "0.2"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as dog:  # fmt: skip
        deadline = time.monotonic() + 60
        while not run.halt.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        finish(run)
        out, err = dog.communicate(timeout=60)
    assert out == "heartbeat_stall\n" and dog.returncode == 1, err
    assert "wrote .anomaly_type and .HALT: heartbeat_stall" in err
    assert run.anomaly.read_text() == "heartbeat_stall\n"


def test_a_log_of_another_trainer_is_imported_and_diagnosed(tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    log.write_text("step 5 loss 2.5\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n")
    ran = paceline("import", "job.out", "--out", "theirs", cwd=tmp_path)
    assert ran.code == 0 and ran.out.strip() == "theirs"
    ran = paceline("diagnose", "theirs", cwd=tmp_path)
    assert ran.code == 1 and ran.out.startswith("error: rank 1 about step 5: OutOfMemoryError")
    data = json.loads(paceline("diagnose", "theirs", "--json", cwd=tmp_path).out)
    assert data["state"] == "foreign" and data["findings"][0]["kind"] == "out_of_memory"
    assert "foreign" in paceline("watch", "theirs", cwd=tmp_path).out
    for verb in (("report", "theirs"), ("compare", "theirs", "theirs"), ("export", "theirs")):
        ran = paceline(*verb, cwd=tmp_path)
        assert ran.code == 4 and "hint: paceline diagnose theirs judges it" in ran.err
