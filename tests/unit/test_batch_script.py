"""The SLURM batch script, run by bash with stand-ins for paceline and scontrol."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.launch.slurm import SlurmLauncher, batch_script, own_command
from tests.machines import order_of

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
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    program(tmp_path / "scontrol", SCONTROL)
    # Called by its path: the folder it lies in need not be on PATH.
    monkeypatch.setattr("sys.argv", [str(program(tmp_path / "bin" / "paceline", PACELINE))])
    order = order_of("launch.nproc=1", "launch.device=cpu")
    text = batch_script("job", "job.sh", order, ["mine.py:Job", "train.steps=9"])
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


GPUS = ("launch.device=cuda", "launch.nproc=8", "launch.nnodes=2", "data.num_workers=4")
SITE = (
    "launch.slurm_args=[--gres=gpu:8,--gpu-bind=closest,--partition=batch,--account=abc,"
    "--time=01:00:00]"
)


def options(*overrides: str) -> list[str]:
    text = batch_script("job", "job.sh", order_of(*overrides), ["lm_tiny"])
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_site_options_are_lines_of_the_script() -> None:
    """Four loaders, and a rank on a GPU has two threads of its own."""
    plain = options(*GPUS[:-1])  # this machine's cores say nothing of the nodes'
    assert "--gpus-per-node=8" in plain and "--cpus-per-task=6" in plain
    told = options(*GPUS, SITE)
    assert {"--gres=gpu:8", "--partition=batch", "--account=abc", "--time=01:00:00"} <= set(told)
    assert "--gpu-bind=closest" in told and "--gpus-per-node=8" not in told
    assert "--cpus-per-task=7" in options(*GPUS, "launch.slurm_args=[--cpus-per-task=7]")
    only = options(*GPUS, "launch.slurm_args=[--cpu-bind=cores]")
    assert "--cpu-bind=cores" not in only, "sbatch does not know it"


def test_srun_gets_them_and_cores_for_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE", raising=False)
    argv = SlurmLauncher().plan(order_of(*GPUS, SITE)).argv
    assert "--gpu-bind=closest" in argv and "--cpus-per-task=6" in argv
    assert argv.index("--gpu-bind=closest") < argv.index("RUN_DIR")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "56(x2),32")
    assert "--cpus-per-task=4" in SlurmLauncher().plan(order_of(*GPUS)).argv, "32 cores for 8"
    cpu = ("launch.device=cpu", "launch.env.OMP_NUM_THREADS=3", "data.num_workers=2")
    assert "--cpus-per-task=5" in SlurmLauncher().plan(order_of(*cpu)).argv


@pytest.mark.parametrize(
    "argument",
    [
        "--task-prolog=/tmp/x", "--task-prol=/tmp/x", "--prolog=x", "--epilog=x", "--bcast=x",
        "--multi-prog", "--export=ALL,LD_PRELOAD=x", "--export=PYTHONPATH=x", "--get-user-env",
        "--container=x", "--mpi=x", "--output=/etc/x", "--wrap=x", "--ntasks=9", "-p", "batch",
        "--comment=a b", "--comment=$(id)", "--comment=x\n#SBATCH --prolog=y", "--time=1;x",
    ],
)  # fmt: skip
def test_what_could_run_a_program_is_refused(argument: str, tmp_path: Path) -> None:
    """Wherever it stands, in a file or on the command line."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"workload: lm\nlaunch:\n  slurm_args: [{json.dumps(argument)}]\n")
    with pytest.raises(ConfigError, match="(?s)launch.slurm_args.*hint"):
        load_job(str(file), [])


def test_the_program_is_the_one_that_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = program(tmp_path / "paceline", PACELINE)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr("sys.argv", [str(called)])
    assert own_command() == [str(called)]
    monkeypatch.setattr("sys.argv", ["/somewhere/paceline/__main__.py"])
    assert own_command() == [sys.executable, "-m", "paceline"]
