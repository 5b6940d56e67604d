"""The SLURM cluster of the tests: two nodes that differ, and nothing left of them afterwards."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.bench import wait_until
from tests.schedulers.slurm import NODES, SlurmCluster, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"SLURM: {why_not()}"),
]
SHOW = "echo $SLURM_NODEID $SLURMD_NODENAME $(hostname) $(getent hosts $(hostname) | cut -d' ' -f1)"
GONE_S = 10


def test_two_nodes_and_nothing_left(tmp_path: Path) -> None:
    hosts, mounts = Path("/etc/hosts").read_text(), Path("/proc/mounts").read_text()
    with SlurmCluster(tmp_path) as cluster:
        shown = cluster.run(["srun", "-N2", "--ntasks-per-node=1", "bash", "-c", SHOW])
        sleeping = cluster.start(["srun", "-N2", "bash", "-c", "echo here; exec sleep 1234"])
        assert sleeping.stdout is not None
        assert [sleeping.stdout.readline() for _ in NODES] == ["here\n", "here\n"]
        # A shell has said it; a moment later it is the sleep.
        wait_until(lambda: _commands(cluster).count("sleep 1234") == len(NODES), 10, "both sleep")
        inside = cluster.processes()
    sleeping.communicate()
    expected = [f"{i} {name} {name} {address}" for i, (name, address) in enumerate(NODES.items())]
    assert sorted(shown.stdout.splitlines()) == expected, shown.stderr
    assert not [process for process in inside if psutil.pid_exists(process.host_pid)]
    assert not _of(tmp_path)
    assert Path("/etc/hosts").read_text() == hosts
    assert Path("/proc/mounts").read_text() == mounts


def test_a_killed_test_process_takes_the_cluster_with_it(tmp_path: Path) -> None:
    source = (
        "import sys, time; from pathlib import Path; from tests.schedulers.slurm import *\n"
        "with SlurmCluster(Path(sys.argv[1])): print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert _of(tmp_path)
        owner.kill()
    deadline = time.monotonic() + GONE_S
    while _of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _of(tmp_path)


def _of(folder: Path) -> list[int]:
    """The processes that run in `folder` or name it, as all daemons of the cluster do."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [process.cwd(), *process.cmdline()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in text for text in told):
            found.append(process.pid)
    return found


def _commands(cluster: SlurmCluster) -> list[str]:
    return [process.command for process in cluster.processes()]
