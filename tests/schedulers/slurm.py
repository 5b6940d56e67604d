"""A real two-node SLURM cluster on this one machine, to run commands in.

    with SlurmCluster(tmp_path) as cluster:
        done = cluster.run(["srun", "-N2", "hostname"])

Three hosts, `login`, `n1` and `n2`, each with a network and a host name of its own on one switch:
what only works over 127.0.0.1, or only because all ranks share a host name, fails here as it would
on two machines. Processes and mounts are in namespaces of the cluster's own, so nothing outside is
touched and the end of the cluster is the end of everything in it.
"""

import functools
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.cli.program import environment

NODES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
LOGIN = "10.99.0.254"
CPUS_PER_NODE = 4  # said to SLURM, whatever this machine has
START_S, STOP_S, POLL_S = 30, 10, 0.1
PROGRAMS = (
    "bash", "env", "hostname", "ip", "mount", "munged", "nsenter", "sbatch", "scontrol", "sinfo",
    "slurmctld", "slurmd", "srun", "unshare",
)  # fmt: skip
DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd"}
ISOLATED = [
    "unshare", "--mount", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child",
]  # fmt: skip

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

# First process of the cluster. It ends, and the kernel all others with it, when its stdin does:
# on leaving the `with`, and just as well when the test process is killed.
INIT = """\
mount --bind hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
hostname login
ip link set lo up
ip link add name switch type bridge
ip address add {login}/24 dev switch
ip link set switch up
munged --force --key-file={folder}/munge.key --socket={folder}/munge.socket \\
    --pid-file={folder}/munged.pid --log-file={folder}/munged.log --seed-file={folder}/munged.seed
slurmctld -D >/dev/null 2>&1 &
unshare --mount --net --uts bash -e node.sh n1 {n1} >&2 &
unshare --mount --net --uts bash -e node.sh n2 {n2} >&2 &
echo up
read -r _
"""

# One node: its cable to the switch in process 1's network, then the daemon. The fresh /sys shows
# the node's own network devices.
NODE = """\
hostname "$1"
mount -t sysfs sysfs /sys
ip link set lo up
ip link add name eth0 type veth peer name "to-$1" netns 1
ip address add "$2/24" dev eth0
ip link set eth0 up
nsenter --target 1 --net ip link set "to-$1" master switch up
exec slurmd -D >/dev/null 2>&1
"""


@dataclass(frozen=True)
class Process:
    """One process of the cluster: its number here, the one that it sees itself, its command."""

    host_pid: int
    pid: int
    command: str


@functools.cache
def why_not() -> str | None:
    """What keeps SLURM from starting on this machine; None if nothing does."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt: slurm-wlm munge iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    cable = ["ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth1"]
    tried = subprocess.run([*ISOLATED, *cable], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


class SlurmCluster:
    """`n1` and `n2` under slurmctld while the `with` lasts; all it writes is in `folder`/slurm.

    The logs and the jobs' spool stay there afterwards for whoever looks into a failed test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "slurm"
        self._outer: subprocess.Popen[str]

    def __enter__(self) -> Self:
        self._write_files()
        self._outer = self._start_init()
        try:
            self._wait_until_idle()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def run(
        self,
        command: list[str],
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on the login node to its end; past `timeout` seconds it is killed."""
        with self.start(command, cwd, env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                self.signal(process, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def start(
        self, command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `command` on the login node, `env` added to this environment.

        The returned process is the door into the namespaces: its streams and exit code are the
        command's, a signal to it is not. Use `signal` for that.
        """
        inside = [*self._enter, "env", f"--chdir={cwd or self.folder}", *command]
        return subprocess.Popen(
            inside, env=self._environment() | (env or {}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to the command that `start` gave `process` for."""
        while process.poll() is None:
            for command in psutil.Process(process.pid).children():
                return command.send_signal(number)

    def processes(self) -> list[Process]:
        """What runs now on the three hosts, SLURM's own daemons and zombies left out."""
        space = os.readlink(self._pid_space)
        found = (_process_in(space, pid) for pid in psutil.pids())
        return [process for process in found if process is not None]

    def _write_files(self) -> None:
        self.folder.mkdir(parents=True)
        names = {"localhost": "127.0.0.1", "login": LOGIN} | NODES
        files = {
            "hosts": "".join(f"{address} {name}\n" for name, address in names.items()),
            "slurm.conf": CONFIG.format(folder=self.folder, cpus=CPUS_PER_NODE),
            "cgroup.conf": CGROUP_CONFIG,
            "init.sh": INIT.format(folder=self.folder, login=LOGIN, **NODES),
            "node.sh": NODE,
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start_init(self) -> subprocess.Popen[str]:
        """The first process, in the new namespaces; back when these are complete."""
        with open(self.folder / "init.log", "w") as log:
            outer = subprocess.Popen(
                [*ISOLATED, "bash", "-e", "init.sh"],
                cwd=self.folder, env=self._environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert outer.stdout is not None
        if outer.stdout.readline() != "up\n":
            outer.wait()
            raise RuntimeError(f"SLURM's hosts were not set up\n{self._logs()}")
        return outer

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_S
        asked = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
        expected = [f"{name} idle" for name in NODES]
        while time.monotonic() < deadline:
            seen = self.run(asked, timeout=START_S).stdout.split("\n")
            if [line.strip() for line in seen if line] == expected:
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"SLURM's nodes are not idle after {START_S} s\n{self._logs()}")

    def _stop(self) -> None:
        """End of stdin, end of process 1; the wait is over when its last process is gone."""
        with self._outer as outer:
            try:
                outer.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                outer.kill()

    def _logs(self, num_lines: int = 15) -> str:
        logs = sorted(self.folder.glob("*.log"))
        tails = [(log.name, log.read_text(errors="replace").splitlines()) for log in logs]
        return "\n".join(f"{name}: {line}" for name, lines in tails for line in lines[-num_lines:])

    def _environment(self) -> dict[str, str]:
        """The tests' environment, without what a SLURM or MPI around the tests has put there."""
        foreign = ("SLURM", "SBATCH", "SALLOC", "OMPI_", "PMI", "MUNGE")
        kept = {k: v for k, v in environment().items() if not k.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def _pid_space(self) -> str:
        return f"/proc/{self._outer.pid}/ns/pid_for_children"

    @property
    def _enter(self) -> list[str]:
        pid_space = f"--pid={self._pid_space}"
        return ["nsenter", f"--target={self._outer.pid}", "--mount", "--net", "--uts", pid_space]


def _process_in(space: str, host_pid: int) -> Process | None:
    """This process if it is alive in that pid namespace and no daemon of SLURM's."""
    try:
        if os.readlink(f"/proc/{host_pid}/ns/pid") != space:
            return None
        status = Path(f"/proc/{host_pid}/status").read_text()
        process = psutil.Process(host_pid)
        command, name = " ".join(process.cmdline()), process.name()
    except (OSError, psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    pid = int(status.split("NSpid:")[1].split("\n")[0].split()[-1])
    return None if pid == 1 or name in DAEMONS or not command else Process(host_pid, pid, command)
