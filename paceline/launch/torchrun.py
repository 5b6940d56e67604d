"""torchrun: torch's own agent, one per node; the agents meet over c10d.

On several nodes the same command is run on each; this process runs the one of this node.
"""

import shlex
import sys
import uuid

from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import run_command
from paceline.launch.ending import Ending
from paceline.machine.hosts import free_port, read_hostfile
from paceline.machine.launchers import TorchrunConfig
from paceline.records import Finding, LaunchPlan
from paceline.records.rundir import RunDir


class TorchrunLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        crew, settings = order.crew, TorchrunConfig.of(order.settings)
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(crew.num_nodes)),
            *("--nproc-per-node", str(crew.per_node)),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", _endpoint(order)),
            *("--rdzv-id", uuid.uuid5(uuid.NAMESPACE_URL, order.run_dir).hex),
            *("--max-restarts", "0"),
            *settings.torchrun_args,
            *("-m", order.task.module, order.run_dir),
        ]
        plan = draw_plan(order, argv, _hosts(order))
        return plan.model_copy(update={"findings": [*plan.findings, *_elsewhere(plan)]})

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_command(launch, run)


def _elsewhere(plan: LaunchPlan) -> list[Finding]:
    """Tell the user to start torchrun on the other machines: it starts ranks on its own."""
    others = plan.crew.num_nodes - 1
    if not others:
        return []
    machines = "1 machine" if others == 1 else f"{others} machines"
    return [
        Finding(
            severity="note",
            where="torchrun",
            what=f"run this on the other {machines}, in this folder: {shlex.join(plan.argv)}",
        )
    ]


def _endpoint(order: LaunchOrder) -> str:
    """Return where agents meet: any port of loopback on one node, a named host on several."""
    asked = TorchrunConfig.of(order.settings).rdzv_endpoint
    if asked != "auto":
        return asked
    if order.crew.num_nodes == 1:
        return "localhost:0"
    return f"{_hosts(order)[0]}:{free_port()}"


def _hosts(order: LaunchOrder) -> list[str]:
    """Return a name per node. Agents get their ranks in the order in which they arrive, so beyond
    this node the names are only numbers."""
    count, hostfile = order.crew.num_nodes, TorchrunConfig.of(order.settings).hostfile
    if hostfile != "none":
        named = [host.name for host in read_hostfile(hostfile)]
        return (named + [f"node{n}" for n in range(len(named), count)])[:count]
    return [order.env.host, *(f"node{n}" for n in range(1, count))]
