"""mpirun of Open MPI, as a starter of processes: ranks never call MPI."""

import signal
import subprocess

from paceline.errors import ClusterError
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import member_argv, require_program, run_command
from paceline.launch.ending import Ending
from paceline.launch.member import TRUSTED
from paceline.machine.hosts import first_hosts, free_port
from paceline.machine.launchers import HostfileConfig
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir


class MpiLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        crew, hostfile = order.crew, HostfileConfig.of(order.settings).hostfile
        hosts = [order.env.host] * crew.num_nodes
        where: list[str] = []
        meet: list[str] = []
        if hostfile != "none":
            hosts = first_hosts(hostfile, crew.num_nodes)
            where = ["--hostfile", hostfile]
        if crew.num_nodes > 1:
            # MPI does not tell where rank 0 runs; by slot it is the first host of the file.
            meet = ["-x", f"MASTER_ADDR={hosts[0]}", "-x", f"MASTER_PORT={free_port()}"]
            meet += ["-x", TRUSTED]  # what is set in this process stays on this machine
        argv = [
            "mpirun",
            *("-n", str(crew.world_size)),
            *("--map-by", f"ppr:{crew.per_node}:node"),
            "--oversubscribe",  # more ranks than cores is the plan's to judge
            *("--bind-to", "none"),  # Open MPI would pin each rank, and its threads, to one core
            *where,
            *meet,
            *member_argv(order),
        ]
        return draw_plan(order, argv, hosts)

    def require_ready(self, order: LaunchOrder) -> None:
        require_program("mpirun", "install Open MPI, or choose another launch.launcher")
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
        if "Open MPI" not in version and "Open RTE" not in version:
            raise ClusterError(
                "this mpirun is not Open MPI's, whose flags launch.launcher=mpi uses\n"
                "hint: start it yourself: mpirun -n 2 paceline train RECIPE"
            )

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        # mpirun kills its ranks a second after TERM, and passes USR2 on.
        return run_command(launch, run, stop=signal.SIGUSR2)
