"""Hosts on this one machine, as network namespaces: `login`, `n1` and `n2` on one switch.

Each has a network and a host name of its own: what only works over 127.0.0.1, or only because all
ranks share a host name, fails here as it would on two machines. Processes and mounts are in
namespaces of the cluster's own, so nothing outside is touched and the end of the cluster is the end
of everything in it. `SlurmCluster` (slurm.py) and `SshCluster` (sshd.py) say what runs there.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import psutil

from tests.cli.program import environment

NODES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
LOGIN, DOWN = "10.99.0.254", "10.99.0.3"  # nobody has the address of `n3`
START_S, STOP_S, POLL_S = 30, 10, 0.1
PROGRAMS = ("bash", "env", "hostname", "ip", "mount", "nsenter", "unshare")
ISOLATED = [
    "unshare", "--mount", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child",
]  # fmt: skip

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
{daemons}
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
{daemon}
"""


@dataclass(frozen=True)
class Process:
    """One process of the cluster: its number here, the one that it sees itself, its command."""

    host_pid: int
    pid: int
    command: str


def why_no_namespaces(programs: Iterable[str], packages: str) -> str | None:
    """What keeps hosts with these programs from being made here; None if nothing does."""
    missing = [name for name in (*PROGRAMS, *programs) if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt: {packages} iproute2 util-linux)"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    cable = ["ip", "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth1"]
    tried = subprocess.run([*ISOLATED, *cable], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces: {tried.stderr.strip()}"


class Cluster:
    """`login`, `n1` and `n2` while the `with` lasts; all it writes is in a folder of its own, and
    stays there afterwards for whoever looks into a failed test."""

    name: ClassVar[str]
    on_login: ClassVar[str] = ""  # what is started there, in bash
    on_node: ClassVar[str]  # what a node becomes in the end
    foreign: ClassVar[tuple[str, ...]] = ("SLURM", "SBATCH", "SALLOC", "OMPI_", "PMI", "MUNGE")
    daemons: ClassVar[set[str]] = set()  # programs that `processes` leaves out

    def __init__(self, folder: Path) -> None:
        self.folder = folder / self.name
        self._outer: subprocess.Popen[str]

    def write_files(self) -> None:
        """Write what the daemons need, into `folder`."""

    def wait_until_up(self) -> None:
        """Return when commands can be run on all hosts."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._write_scripts()
        self.write_files()
        self._outer = self._start_init()
        try:
            self.wait_until_up()
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
            inside, env=self.environment() | (env or {}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to the command that `start` gave `process` for."""
        while process.poll() is None:
            for command in psutil.Process(process.pid).children():
                return command.send_signal(number)

    def processes(self) -> list[Process]:
        """What runs now on the three hosts, the cluster's own daemons and zombies left out."""
        space = os.readlink(self._pid_space)
        found = (_process_in(space, pid, self.daemons) for pid in psutil.pids())
        return [process for process in found if process is not None]

    def _write_scripts(self) -> None:
        self.folder.mkdir(parents=True)
        names = {"localhost": "127.0.0.1", "login": LOGIN, "n3": DOWN} | NODES
        daemons = self.on_login.format(folder=self.folder)
        files = {
            "hosts": "".join(f"{address} {name}\n" for name, address in names.items()),
            "init.sh": INIT.format(daemons=daemons, login=LOGIN, **NODES),
            "node.sh": NODE.format(daemon=self.on_node.format(folder=self.folder)),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def _start_init(self) -> subprocess.Popen[str]:
        """The first process, in the new namespaces; back when these are complete."""
        with open(self.folder / "init.log", "w") as log:
            outer = subprocess.Popen(
                [*ISOLATED, "bash", "-e", "init.sh"],
                cwd=self.folder, env=self.environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert outer.stdout is not None
        if outer.stdout.readline() != "up\n":
            outer.wait()
            raise RuntimeError(f"the hosts were not set up\n{self.logs()}")
        return outer

    def _stop(self) -> None:
        """End of stdin, end of process 1; the wait is over when its last process is gone."""
        with self._outer as outer:
            try:
                outer.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                outer.kill()

    def logs(self, num_lines: int = 15) -> str:
        logs = sorted(self.folder.glob("*.log"))
        tails = [(log.name, log.read_text(errors="replace").splitlines()) for log in logs]
        return "\n".join(f"{name}: {line}" for name, lines in tails for line in lines[-num_lines:])

    def environment(self) -> dict[str, str]:
        """The tests' environment, without what a scheduler around the tests has put there."""
        return {k: v for k, v in environment().items() if not k.startswith(self.foreign)}

    @property
    def _pid_space(self) -> str:
        return f"/proc/{self._outer.pid}/ns/pid_for_children"

    @property
    def _enter(self) -> list[str]:
        pid_space = f"--pid={self._pid_space}"
        return ["nsenter", f"--target={self._outer.pid}", "--mount", "--net", "--uts", pid_space]


def _process_in(space: str, host_pid: int, daemons: set[str]) -> Process | None:
    """This process if it is alive in that pid namespace and no daemon of the cluster."""
    try:
        if os.readlink(f"/proc/{host_pid}/ns/pid") != space:
            return None
        status = Path(f"/proc/{host_pid}/status").read_text()
        process = psutil.Process(host_pid)
        command, name = " ".join(process.cmdline()), process.name()
    except (OSError, psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    pid = int(status.split("NSpid:")[1].split("\n")[0].split()[-1])
    return None if pid == 1 or name in daemons or not command else Process(host_pid, pid, command)
