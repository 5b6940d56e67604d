"""DeepSpeed's launcher: `--include` on this machine, and on several its agent on each of them.

DeepSpeed's own runner reaches other machines by pdsh, which few have, and ends nothing there when
it is killed. So over a hostfile we start what it would start, one agent per machine, over ssh.
"""

import base64
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from paceline.errors import ClusterError, ConfigError
from paceline.launch.base import LaunchOrder, Task, device_names, draw_plan
from paceline.launch.command import require_program, run_command
from paceline.launch.each_host import NODE, each_host_argv
from paceline.launch.ending import Ending
from paceline.launch.ssh import require_hosts
from paceline.machine.hosts import first_hosts, free_port
from paceline.machine.launchers import HostfileConfig
from paceline.plan.crew import visible_devices
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir


class DeepSpeedLauncher:
    def require_ready(self, order: LaunchOrder) -> None:
        hint = "pip install deepspeed, or choose another launch.launcher"
        if not _has_hostfile(order):
            require_program("deepspeed", hint)
        elif find_spec("deepspeed") is None:
            raise ClusterError(f"deepspeed is not installed here\nhint: {hint}")
        require_hosts(_hosts(order), ["torch", "deepspeed"])

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        slots, hosts = _slots(order), _hosts(order)
        if not _has_hostfile(order):
            return self._without_visible(draw_plan(order, _here(order, slots), hosts))
        argv = each_host_argv(order, _agent(order, hosts, slots))
        return self._without_visible(draw_plan(order, argv, hosts))

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        return run_command(launch, run)

    @staticmethod
    def _without_visible(launch: LaunchPlan) -> LaunchPlan:
        """`--include` chooses the devices itself, and refuses to if the variable is set too."""
        env = {name: text for name, text in launch.env.items() if name != "CUDA_VISIBLE_DEVICES"}
        reasons = {name: why for name, why in launch.reasons.items() if name in env}
        return launch.model_copy(update={"env": env, "reasons": reasons})


def _has_hostfile(order: LaunchOrder) -> bool:
    return HostfileConfig.of(order.settings).hostfile != "none"


def _hosts(order: LaunchOrder) -> list[str]:
    count = order.crew.num_nodes
    if _has_hostfile(order):
        return first_hosts(HostfileConfig.of(order.settings).hostfile, count)
    if count > 1:
        raise ConfigError(
            f"deepspeed reaches {count} nodes through a hostfile, and there is none\n"
            "hint: set launch.hostfile=FILE with lines of NAME slots=N"
        )
    return [order.env.host]


def _slots(order: LaunchOrder) -> list[str]:
    """Return the devices of each machine by its own numbers: the agent drops the variable that
    would count them anew."""
    crew = order.crew
    numbers = device_names(visible_devices(order.settings) or range(crew.per_node))
    if crew.on_gpu and not all(number.isdigit() for number in numbers):
        raise ConfigError(
            f"deepspeed's --include takes numbers, and CUDA_VISIBLE_DEVICES has {numbers[0]}\n"
            "hint: name the GPUs by number there, or choose another launch.launcher"
        )
    return numbers if crew.on_gpu else [str(n) for n in range(crew.per_node)]


def _here(order: LaunchOrder, slots: Sequence[str]) -> list[str]:
    where = ["--include", f"localhost:{','.join(slots)}"]
    if not order.crew.on_gpu:  # it counts NUMA nodes there, and knows no other slots
        where = ["--num_gpus", str(order.crew.per_node)]
    return ["deepspeed", *where, *_member(order)]


def _agent(order: LaunchOrder, hosts: Sequence[str], slots: Sequence[str]) -> list[str]:
    """Return what DeepSpeed's runner starts on every machine of a hostfile."""
    world = {host: [int(slot) for slot in slots] for host in hosts}
    told = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        f"--world_info={told}",
        f"--node_rank={NODE}",
        *("--master_addr", hosts[0]),
        *_member(order),
    ]


def _member(order: LaunchOrder) -> list[str]:
    port = ["--master_port", str(free_port())]
    return [*port, "--no_local_rank", "--module", order.task.module, order.run_dir]
