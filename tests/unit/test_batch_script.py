"""The SLURM batch script, run by bash with stand-ins for paceline and scontrol."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.launch.slurm import batch_script
from tests.machines import draw

# Told that time is up it says 75, as a run does that has written its checkpoint.
PACELINE = """#!/bin/bash
echo "paceline $*" >> story.txt
trap 'exit 75' USR2
mkdir -p runs/job-7
if [ -f finish ]; then exit 0; fi
touch runs/job-7/run.yaml
while true; do sleep 0.02; done
"""
SCONTROL = "#!/bin/bash\necho scontrol $* >> story.txt\n"


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program(tmp_path / "paceline", PACELINE)
    program(tmp_path / "scontrol", SCONTROL)
    crew = draw("launch.nproc=1", "launch.device=cpu", by="slurm").crew
    text = batch_script("job", "job.sh", crew, ["mine.py:Job", "train.steps=9"])
    return program(tmp_path / "job.sh", text)


def start(job: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(job)], cwd=job.parent, start_new_session=True)


def test_a_warning_requeues_the_job_and_the_next_one_goes_on(job: Path) -> None:
    folder, first = job.parent, start(job)
    deadline = time.monotonic() + 20
    while not (folder / "runs/job-7/run.yaml").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR2)
    assert first.wait(20) == 75
    (folder / "finish").touch()
    assert start(job).wait(20) == 0, "and no requeue any more"
    assert (folder / "story.txt").read_text().splitlines() == [
        "paceline train mine.py:Job train.steps=9 launch.launcher=slurm --out runs/job-7",
        "scontrol requeue 7",
        "paceline train --resume runs/job-7 launch.launcher=slurm",
    ]
