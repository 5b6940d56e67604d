"""torchrun: torch's own agent, one per node.

With a hostfile we start the agent of every machine, over ssh, and rank 0 is on the first of them.
Without, the same command is run on each by the user; the agents meet over c10d, and this process
runs the one of this node.
"""

import shlex
import sys
import uuid

from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import run_command
from paceline.launch.each_host import NODE, each_host_argv
from paceline.launch.ending import Ending
from paceline.launch.ssh import require_hosts
from paceline.machine.hosts import first_hosts, free_port
from paceline.machine.launchers import TorchrunConfig
from paceline.records import Finding, LaunchPlan
from paceline.records.rundir import RunDir


class TorchrunLauncher:
    def require_ready(self, order: LaunchOrder) -> None:
        if _has_hostfile(order):
            require_hosts(_hosts(order), ["torch"])

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        hosts = _hosts(order)
        if _has_hostfile(order):
            meet = ["--rdzv-backend", "static", "--node-rank", NODE]
            return draw_plan(order, each_host_argv(order, _agent(order, hosts, meet)), hosts)
        plan = draw_plan(order, _agent(order, hosts, ["--rdzv-backend", "c10d"]), hosts)
        return plan.model_copy(update={"findings": [*plan.findings, *_elsewhere(plan)]})

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_command(launch, run)


def _agent(order: LaunchOrder, hosts: list[str], meet: list[str]) -> list[str]:
    crew = order.crew
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(crew.num_nodes)),
        *("--nproc-per-node", str(crew.per_node)),
        *meet,
        *("--rdzv-endpoint", _endpoint(order, hosts)),
        *("--rdzv-id", uuid.uuid5(uuid.NAMESPACE_URL, order.run_dir).hex),
        *("--max-restarts", "0"),
        *TorchrunConfig.of(order.settings).torchrun_args,
        *("-m", order.task.module, order.run_dir),
    ]


def _elsewhere(plan: LaunchPlan) -> list[Finding]:
    """Tell the user to start torchrun on the other machines: it starts ranks on its own."""
    others = plan.crew.num_nodes - 1
    if not others:
        return []
    machines = "1 machine" if others == 1 else f"{others} machines"
    return [
        Finding.note(
            "torchrun",
            f"run this on the other {machines}, in this folder: {shlex.join(plan.argv)}",
            hint="or name them in launch.hostfile: then Paceline starts it there, over ssh",
        )
    ]


def _endpoint(order: LaunchOrder, hosts: list[str]) -> str:
    """Return where agents meet: any port of loopback on one node, a named host on several."""
    asked = TorchrunConfig.of(order.settings).rdzv_endpoint
    if asked != "auto":
        return asked
    if order.crew.num_nodes == 1 and not _has_hostfile(order):
        return "localhost:0"
    return f"{hosts[0]}:{free_port()}"


def _has_hostfile(order: LaunchOrder) -> bool:
    return TorchrunConfig.of(order.settings).hostfile != "none"


def _hosts(order: LaunchOrder) -> list[str]:
    """Return a name per node. Agents that meet over c10d get their ranks in the order in which they
    arrive, so beyond this node the names are only numbers."""
    count = order.crew.num_nodes
    if _has_hostfile(order):
        return first_hosts(TorchrunConfig.of(order.settings).hostfile, count)
    return [order.env.host, *(f"node{n}" for n in range(1, count))]
