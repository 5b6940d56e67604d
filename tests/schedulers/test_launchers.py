"""The same job under every launcher, real ones: the losses are those of the local launcher."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.program import environment, free_port, paceline
from tests.jobs import write_line_job
from tests.schedulers.slurm import SlurmCluster, why_not
from tests.skips import needs_deepspeed, needs_mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = [
    "lm_tiny", "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=16",
    "model.dim=32", "model.num_layers=2", "train.steps=5", "train.eval_every=off",
    "launch.device=cpu", "train.log_every=1", "optim.name=sgd",
]  # fmt: skip
PACELINE = [sys.executable, "-m", "paceline"]
BROKEN = "if os.environ['RANK'] == '1': raise ValueError('my own bug')"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

needs_slurm = pytest.mark.skipif(why_not() is not None, reason=f"SLURM: {why_not()}")
nightly = pytest.mark.nightly


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


@nightly
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


@nightly
@needs_deepspeed
def test_under_deepspeed(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", free_port(), "--module", "paceline"]
    run([*argv, "train", *JOB, "--out", "run"], tmp_path, DS_ACCELERATOR="cpu")
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "deepspeed"


@nightly
@needs_deepspeed
def test_deepspeed_started_by_paceline(expected: dict[int, list[float]], tmp_path: Path) -> None:
    argv = [*PACELINE, "train", *JOB, "launch.launcher=deepspeed", "launch.nproc=2"]
    run([*argv, "--out", "run"], tmp_path, DS_ACCELERATOR="cpu")
    same(tmp_path / "run", expected[2])


DEEPSPEED = ["strategy.name=deepspeed", "strategy.stage=2"]


@nightly
@needs_deepspeed
def test_deepspeed_under_its_own_launcher(expected: dict[int, list[float]], tmp_path: Path) -> None:
    """The strategy under the launcher of the same name: the losses of ddp under ours."""
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", free_port(), "--module", "paceline"]
    run([*argv, "train", *JOB, *DEEPSPEED, "--out", "run"], tmp_path, DS_ACCELERATOR="cpu")
    same(tmp_path / "run", expected[2])
    assert launcher_of(tmp_path / "run") == "deepspeed"


@needs_deepspeed
def test_deepspeed_under_our_launcher(expected: dict[int, list[float]], tmp_path: Path) -> None:
    ran = paceline("train", *JOB, *DEEPSPEED, "launch.nproc=2", "--out", "run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    same(tmp_path / "run", expected[2])
    assert "DeepSpeed's config" in (tmp_path / "run/ranks/rank1/log.txt").read_text()


@nightly
@needs_mpi
@needs_deepspeed
def test_deepspeed_under_mpirun(expected: dict[int, list[float]], tmp_path: Path) -> None:
    """Where LOCAL_RANK has another name."""
    argv = ["mpirun", "-n", "2", *PACELINE, "train", *JOB, *DEEPSPEED, "--out", "run"]
    run(argv, tmp_path, **AS_ROOT)
    same(tmp_path / "run", expected[2])


@nightly
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


@nightly
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


@nightly
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


@nightly
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


def batch(cluster: SlurmCluster, folder: Path, *overrides: str) -> Path:
    """The script that `paceline plan --sbatch` writes; `paceline` is on its PATH."""
    bin_folder = str(Path(sys.executable).parent)
    argv = [*PACELINE, "plan", *JOB, "launch.launcher=slurm", *overrides, "--sbatch", "job.sh"]
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    done = cluster.run(argv, cwd=folder, env={"PATH": path}, timeout=60)
    assert done.returncode == 0, done.stderr
    return folder / "job.sh"


@nightly
@needs_slurm
def test_the_batch_script_trains_on_its_two_nodes(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = batch(cluster, tmp_path, "launch.nproc=2", "launch.nnodes=2")
    done = cluster.run(["sbatch", "--wait", script.name], cwd=tmp_path, timeout=120)
    said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert done.returncode == 0, said
    (made,) = (tmp_path / "runs").glob("lm_tiny-*")
    same(made, expected[4])


FAKE = """#!/bin/bash
# In the place of paceline: told that time is up, it says 75 once, and 0 after the requeue.
echo "start ${SLURM_RESTART_COUNT:-0}" >> story.txt
[ "$SLURM_RESTART_COUNT" = 1 ] && exit 0
trap 'echo told >> story.txt; exit 75' USR2
while true; do sleep 0.1; done
"""


@needs_slurm
def test_the_batch_script_passes_usr2_on_and_requeues_on_75(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = batch(cluster, tmp_path, "launch.nproc=1", "launch.nnodes=1")
    fake = tmp_path / "fake"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    program = f"{sys.executable} -m paceline"
    script.write_text(script.read_text().replace(str(program), str(fake)))
    submitted = cluster.run(["sbatch", "--parsable", script.name], cwd=tmp_path, timeout=60)
    job, story = submitted.stdout.strip(), tmp_path / "story.txt"
    wait_for(story, "start 0")
    cluster.run(["scancel", "--batch", "--signal=USR2", job], timeout=60)
    wait_for(story, "start 1")
    assert story.read_text().split("\n")[:3] == ["start 0", "told", "start 1"]


def wait_for(file: Path, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not (file.is_file() and text in file.read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in {file.name}"
        time.sleep(0.1)


@nightly
@needs_slurm
def test_a_requeued_job_goes_on_from_its_checkpoint(cluster: SlurmCluster, tmp_path: Path) -> None:
    slow = ["launch.nproc=1", "launch.nnodes=2", "train.steps=3000"]
    script = batch(cluster, tmp_path, *slow)
    submitted = cluster.run(["sbatch", "--parsable", script.name], cwd=tmp_path, timeout=60)
    job = submitted.stdout.strip()
    made = tmp_path / f"runs/lm_tiny-{job}"
    wait_for(made / "training.csv", "\n3,")
    cluster.run(["scancel", "--batch", "--signal=USR2", job], timeout=60)
    wait_for(made / "attempts/1/result.json", "preempted", 120)  # moved there by the second job
    first = json.loads((made / "attempts/1/attempt.json").read_text())
    wait_for(made / "result.json", "outcome", 150)
    result = json.loads((made / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("ok", 3000)
    assert result["attempts"][1]["first_step"] > first["last_step"], "no step was taken twice"


@nightly
@needs_slurm
def test_scancel_ends_ranks_in_order(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Ranks under srun get TERM and leave with a checkpoint; nothing is left."""
    argv = ["srun", "-N2", "--ntasks-per-node=1", *PACELINE, "train", *JOB, "train.steps=99999"]
    process = cluster.start([*argv, "--out", "run"], cwd=tmp_path)
    wait_for(tmp_path / "run/training.csv", "\n3,")
    cluster.run(["scancel", "--user=root", "--signal=TERM"], timeout=60)
    process.communicate(timeout=60)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["outcome"] == "preempted" and process.returncode != 0
    assert cluster.processes() == []


@needs_slurm
def test_the_rank_that_fails_on_another_node_is_named(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    write_line_job(tmp_path, BROKEN)
    argv = ["srun", "-N2", "--ntasks-per-node=1", *PACELINE, "train", "job.py:Job"]
    argv += ["train.steps=5", "train.micro_batch_size=4", "launch.device=cpu", "--out", "run"]
    done = cluster.run(argv, cwd=tmp_path, timeout=90)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["outcome"] == "crashed" and done.returncode == 5
    assert (result["failure"]["rank"], result["failure"]["host"]) == (1, "n2")
    assert "ValueError: my own bug" in done.stderr
    assert cluster.processes() == []


@nightly
@needs_slurm
def test_two_torchrun_agents_meet_as_two_nodes(
    expected: dict[int, list[float]], cluster: SlurmCluster, tmp_path: Path
) -> None:
    """One agent in each of the cluster's hosts, which have networks of their own."""
    argv = ["srun", "-N2", "--ntasks-per-node=1", *TORCHRUN, "--nnodes", "2"]
    argv += ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:14300"]
    argv += ["--rdzv-id", "two", "-m", "paceline", "train", *JOB, "--out", "run"]
    done = cluster.run(argv, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    same(tmp_path / "run", expected[4])
    launch = json.loads((tmp_path / "run/launch.json").read_text())
    assert launch["launcher"] == "torchrun"
    assert {rank["host"] for rank in launch["ranks"]} == {"n1", "n2"}


@nightly
def test_paceline_starts_one_torchrun_of_two(
    expected: dict[int, list[float]], tmp_path: Path
) -> None:
    """It names the command for the other node; two agents on loopback stand for two machines."""
    port = free_port()
    words = ["train", *JOB, "launch.launcher=torchrun", "launch.nnodes=2", "launch.nproc=1"]
    words += [f"launch.rdzv_endpoint=localhost:{port}", "--out", "run"]
    first = subprocess.Popen(
        [*PACELINE, *words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "run/launch.json", "argv")
    launch = json.loads((tmp_path / "run/launch.json").read_text())
    second = subprocess.run(
        launch["argv"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    _, err = first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err + second.stderr
    assert "run this on the other 1 machine" in err
    same(tmp_path / "run", expected[2])


@nightly
@needs_slurm
def test_check_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = ["srun", "-N2", "--ntasks-per-node=1", *PACELINE, "check", "--json"]
    done = cluster.run(argv, cwd=tmp_path, timeout=120)
    report = json.loads(done.stdout)
    assert report["fit"] and done.returncode == 0, done.stdout
    assert [rank["host"] for rank in report["ranks"]] == ["n1", "n2"]
    assert report["group"]["correctness"]["wrong"] == [] and len(report["group"]["pairs"]) == 1


STARTERS = [
    pytest.param("torchrun", signal.SIGKILL, marks=nightly),
    pytest.param("mpi", signal.SIGINT, marks=[needs_mpi, nightly]),
    pytest.param("deepspeed", signal.SIGKILL, marks=[needs_deepspeed, nightly]),
    pytest.param("torchrun", signal.SIGINT, marks=nightly),
    pytest.param("mpi", signal.SIGKILL, marks=[needs_mpi, nightly]),
    pytest.param("deepspeed", signal.SIGINT, marks=[needs_deepspeed, nightly]),
]


@pytest.mark.parametrize(("by", "number"), STARTERS)
def test_nothing_outlives_a_command_that_paceline_started(
    by: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Some launchers leave their ranks behind when they are ended; we do not."""
    mark = uuid.uuid4().hex
    env = environment(**AS_ROOT, DS_ACCELERATOR="cpu", TEST_MARK=mark)
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["train", *JOB, "train.steps=99999", f"launch.launcher={by}", "launch.nproc=2"]
    process = subprocess.Popen(
        [*PACELINE, *words, "--out", "run"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    wait_for(tmp_path / "run/training.csv", "\n3,")
    assert marked(mark)
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + 10
    while marked(mark):
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.1)
    if number == signal.SIGINT:
        assert process.returncode == 130
        result = json.loads((tmp_path / "run/result.json").read_text())
        assert result["outcome"] == "interrupted"


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("TEST_MARK") == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
