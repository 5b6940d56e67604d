"""torchrun: torch's own agent, one a node; the agents meet over c10d.

On several nodes the same command is run on each; this process runs the one of this node.
"""

import shlex
import socket
import sys
import uuid

from paceline.launch.base import MEMBER, LaunchEnd, LaunchOrder, draw_plan
from paceline.launch.command import run_command
from paceline.machine.hosts import read_hostfile
from paceline.records import Finding, LaunchPlan
from paceline.records.rundir import RunDir


class TorchrunLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        crew, settings = order.crew, order.settings
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(crew.num_nodes)),
            *("--nproc-per-node", str(crew.per_node)),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", _endpoint(order)),
            *("--rdzv-id", uuid.uuid5(uuid.NAMESPACE_URL, order.run_dir).hex),
            *("--max-restarts", "0"),
            *settings.torchrun_args,
            *MEMBER,
            order.run_dir,
        ]
        plan = draw_plan(order, argv, _hosts(order))
        return plan.model_copy(update={"findings": [*plan.findings, *_elsewhere(plan)]})

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        return run_command(launch, run)


def _elsewhere(plan: LaunchPlan) -> list[Finding]:
    """torchrun starts ranks on its own machine only: the user starts it on the others."""
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
    """On one node any free port of loopback; on several a place that all can name."""
    asked = order.settings.rdzv_endpoint
    if asked != "auto":
        return asked
    if order.crew.num_nodes == 1:
        return "localhost:0"
    with socket.create_server(("", 0)) as probe:
        return f"{_hosts(order)[0]}:{probe.getsockname()[1]}"


def _hosts(order: LaunchOrder) -> list[str]:
    """Agents get their ranks in the order they arrive: beyond this node they have no name yet."""
    count, hostfile = order.crew.num_nodes, order.settings.hostfile
    if hostfile != "none":
        named = [host.name for host in read_hostfile(hostfile)]
        return (named + [f"node{n}" for n in range(len(named), count)])[:count]
    return [order.env.host, *(f"node{n}" for n in range(1, count))]
