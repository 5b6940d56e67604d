"""The same job under every launcher, real ones: the losses are those of the local launcher."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import environment, free_port, paceline
from tests.schedulers.slurm import SlurmCluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = [
    "lm_tiny", "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=16",
    "model.dim=32", "model.num_layers=2", "train.steps=5", "train.eval_every=off",
    "launch.device=cpu", "train.log_every=1", "optim.name=sgd",
]  # fmt: skip
PACELINE = [sys.executable, "-m", "paceline"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

needs_slurm = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
needs_deepspeed = pytest.mark.skipif(
    not (Path(sys.executable).parent / "deepspeed").exists(), reason="deepspeed is not installed"
)


def losses(run: Path) -> list[float]:
    result = json.loads((run / "result.json").read_text())
    assert result["outcome"] == "ok" and result["steps"] == 5
    rows = (run / "training.csv").read_text().splitlines()[1:]
    return [float(row.split(",")[1]) for row in rows]


def launcher_of(run: Path) -> str:
    return str(json.loads((run / "launch.json").read_text())["launcher"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Losses of the local launcher, by the number of ranks."""
    folder = tmp_path_factory.mktemp("local")
    found = {}
    for ranks in (2, 4):
        ran = paceline("train", *JOB, f"launch.nproc={ranks}", "--out", f"r{ranks}", cwd=folder)
        assert ran.code == 0, ran.err
        found[ranks] = losses(folder / f"r{ranks}")
    assert len(set(found[2])) == 5, "it learns"
    return found


def run(argv: list[str], cwd: Path, **env: str) -> None:
    """A real launcher, with this environment's programs on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        argv, cwd=cwd, env=environment(**env) | {"PATH": path}, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def same(run: Path, losses_expected: list[float]) -> None:
    assert losses(run) == pytest.approx(losses_expected, abs=1e-6)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_under_torchrun(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = [*TORCHRUN, "--nproc-per-node", "2", "-m", "paceline", "train", *JOB, "--out", "run"]
    run(argv, tmp_path)
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "torchrun"


def test_torchrun_started_by_paceline(expected: dict[int, list[float]], tmp_path: Path) -> None:
    ran = paceline(
        "train", *JOB, "launch.launcher=torchrun", "launch.nproc=2",
        "launch.torchrun_args=[--log-dir,logs]", "launch.env.MY_FLAG=1e5", "--out", "run",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    same(tmp_path / "run", expected[2])
    assert (tmp_path / "logs").is_dir(), "torchrun_args reached torchrun"


@needs_deepspeed
def test_under_deepspeed(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", free_port(), "--module", "paceline"]
    run([*argv, "train", *JOB, "--out", "run"], tmp_path, DS_ACCELERATOR="cpu")
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "deepspeed"


@needs_deepspeed
def test_deepspeed_started_by_paceline(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = [*PACELINE, "train", *JOB, "launch.launcher=deepspeed", "launch.nproc=2"]
    run([*argv, "--out", "run"], tmp_path, DS_ACCELERATOR="cpu")
    same(tmp_path / "run", expected[2])


@needs_mpi
def test_under_mpirun(expected: dict[int, list[float]], tmp_path: Path) -> None:
    run(["mpirun", "-n", "2", *PACELINE, "train", *JOB, "--out", "run"], tmp_path, **AS_ROOT)
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "mpi"


@needs_mpi
def test_mpirun_started_by_paceline(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = [*PACELINE, "train", *JOB, "launch.launcher=mpi", "launch.nproc=2", "--out", "run"]
    run(argv, tmp_path, **AS_ROOT)
    same(tmp_path / "run", expected[2])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@needs_slurm
def test_under_srun_on_two_nodes(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    argv = ["srun", "-N2", "--ntasks-per-node=2", *PACELINE, "train", *JOB, "--out", "run"]
    done = cluster.run(argv, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", expected[4])
    ranks = json.loads((tmp_path / "run/launch.json").read_text())["ranks"]
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert cluster.processes() == []


@needs_slurm
def test_srun_started_by_paceline(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    argv = ["salloc", "-N2", "--ntasks-per-node=2", *PACELINE, "train", *JOB]
    argv += ["launch.launcher=slurm", "launch.nproc=2", "--out", "run"]
    done = cluster.run(argv, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", expected[4])
    assert cluster.processes() == []


@needs_slurm
def test_a_lone_process_in_a_job_waits_for_nobody(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    words = " ".join([*PACELINE, "train", *JOB, "launch.nproc=2", "--out", "run"])
    script.write_text(f"#!/bin/bash\n{words}\n")
    done = cluster.run(
        ["sbatch", "--wait", "-N2", "--ntasks-per-node=2", str(script)], cwd=tmp_path, timeout=120
    )
    said = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert done.returncode == 0, said
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "local" and "has 2 nodes" in said


@needs_slurm
@needs_mpi
def test_mpirun_inside_a_slurm_job(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    argv = ["salloc", "-N2", "--ntasks-per-node=2", "mpirun", "-n", "4", *PACELINE, "train", *JOB]
    done = cluster.run([*argv, "--out", "run"], cwd=tmp_path, env=AS_ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", expected[4])
    assert launcher_of(tmp_path / "run") == "mpi"
