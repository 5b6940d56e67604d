"""A real two-node SLURM cluster on this one machine, to run commands in.

    with SlurmCluster(tmp_path) as cluster:
        done = cluster.run(["srun", "-N2", "hostname"])

Its hosts are those of cluster.py.
"""

import functools
import os
import time

from tests.schedulers.cluster import NODES, POLL_S, START_S, Cluster, why_no_namespaces

__all__ = ["NODES", "SlurmCluster", "why_not"]

CPUS_PER_NODE = 4  # said to SLURM, whatever this machine has
PROGRAMS = ("munged", "sbatch", "scontrol", "sinfo", "slurmctld", "slurmd", "srun")

# cred_expire is also how long a requeued job waits to start again: 120 s unless told, 5 at least.
# sched_interval is when it is then looked at: every 60 s unless told.
CONFIG = """\
ClusterName=paceline
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=5
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n[1-2] CPUs={cpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The default would look at this machine's cgroups; with the plugins above this one uses none.
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\n"

ON_LOGIN = """\
munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket \\
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed
slurmctld -D >/dev/null 2>&1 &
"""


@functools.cache
def why_not() -> str | None:
    """What keeps SLURM from starting on this machine; None if nothing does."""
    return why_no_namespaces(PROGRAMS, "slurm-wlm munge")


class SlurmCluster(Cluster):
    """`n1` and `n2` under slurmctld, which runs on `login`."""

    name = "slurm"
    on_login = ON_LOGIN
    on_node = "exec slurmd -D >/dev/null 2>&1"
    daemons = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd"}

    def write_files(self) -> None:
        text = CONFIG.format(folder=self.folder, cpus=CPUS_PER_NODE)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONFIG)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        asked = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
        expected = [f"{name} idle" for name in NODES]
        while time.monotonic() < deadline:
            seen = self.run(asked, timeout=START_S).stdout.split("\n")
            if [line.strip() for line in seen if line] == expected:
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"SLURM's nodes are not idle after {START_S} s\n{self.logs()}")

    def environment(self) -> dict[str, str]:
        return super().environment() | {"SLURM_CONF": str(self.folder / "slurm.conf")}
