"""DeepSpeed's launcher: `--include` on this machine, `--hostfile` on several."""

from paceline.errors import ConfigError
from paceline.launch.base import LaunchOrder, Task, device_names, draw_plan
from paceline.launch.command import require_program, run_command
from paceline.launch.ending import Ending
from paceline.machine.hosts import free_port, read_hostfile
from paceline.machine.launchers import HostfileConfig
from paceline.plan.crew import visible_devices
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir


class DeepSpeedLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        crew, hostfile = order.crew, HostfileConfig.of(order.settings).hostfile
        # The runner drops CUDA_VISIBLE_DEVICES beside --include: name the machine's own numbers.
        numbers = device_names(visible_devices(order.settings) or range(crew.per_node))
        if crew.on_gpu and not all(number.isdigit() for number in numbers):
            raise ConfigError(
                f"deepspeed's --include takes numbers, and CUDA_VISIBLE_DEVICES has {numbers[0]}\n"
                "hint: name the GPUs by number there, or choose another launch.launcher"
            )
        slots = ",".join(numbers)
        hosts = [order.env.host]
        where = ["--include", f"localhost:{slots}"]
        if not crew.on_gpu:  # it counts NUMA nodes there, and knows no other slots
            where = ["--num_gpus", str(crew.per_node)]
        if hostfile != "none":
            hosts = [host.name for host in read_hostfile(hostfile)][: crew.num_nodes]
            include = "@".join(f"{host}:{slots}" for host in hosts)
            where = ["--hostfile", hostfile, "--include", include, "--master_addr", hosts[0]]
        elif crew.num_nodes > 1:
            raise ConfigError(
                f"deepspeed reaches {crew.num_nodes} nodes through a hostfile, and there is none\n"
                "hint: set launch.hostfile=FILE with lines of NAME slots=N"
            )
        argv = [
            "deepspeed",
            *where,
            *("--master_port", str(free_port())),
            "--no_local_rank",
            "--module",
            order.task.module,
            order.run_dir,
        ]
        return self._without_visible(draw_plan(order, argv, hosts))

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        require_program("deepspeed", "pip install deepspeed, or choose another launch.launcher")
        return run_command(launch, run)

    @staticmethod
    def _without_visible(launch: LaunchPlan) -> LaunchPlan:
        """`--include` chooses the devices itself, and refuses to if the variable is set too."""
        env = {name: text for name, text in launch.env.items() if name != "CUDA_VISIBLE_DEVICES"}
        reasons = {name: why for name, why in launch.reasons.items() if name in env}
        return launch.model_copy(update={"env": env, "reasons": reasons})
