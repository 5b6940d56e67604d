"""SLURM: srun inside an allocation, and a batch script for getting one."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ClusterError
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import member_argv, require_program, run_command
from paceline.launch.ending import Ending
from paceline.machine.launchers import SRUN_ONLY, SlurmConfig, option_of
from paceline.machine.topology import expand_nodes
from paceline.records import LaunchPlan
from paceline.records.rundir import RunDir

CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu")
SITE_OPTIONS = ("time", "partition", "account")
GPU_THREADS = 2
WARNING_S = 120  # how long before the end of the job SLURM sends SIGUSR2

BATCH = """\
#!/bin/bash
# Written by `paceline plan ... --sbatch`. Submit it with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node={per_node}
{options}#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGUSR2 to this script {warning_s} s before the time is up: ranks write a checkpoint and leave.
#SBATCH --signal=B:USR2@{warning_s}
{lacking}
cd {folder}
run="runs/{name}-$SLURM_JOB_ID"
if [ -f "$run/run.yaml" ]; then  # this job was here before: go on from the newest checkpoint
  {program} train --resume "$run" launch.launcher=slurm &
else
  {command} --out "$run" &
fi
process=$!
trap 'kill -USR2 $process' USR2
trap 'kill -TERM $process' TERM
while kill -0 $process 2>/dev/null; do wait $process; done  # a signal ends a wait early
wait $process
code=$?

# 75: stopped in time and can go on. Anything else is final.
if [ $code -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


class SlurmLauncher:
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        crew = order.crew
        argv = [
            "srun",
            *("--nodes", str(crew.num_nodes)),
            *("--ntasks", str(crew.world_size)),
            *("--ntasks-per-node", str(crew.per_node)),
            "--kill-on-bad-exit=1",  # one rank's end is the end of all
            "--mpi=none",  # ranks meet at our own store
            "--export=ALL",
            *_cpus(order, _allocated_cpus()),
            *_asked(order),
            # Inside a step (`srun --pty bash`) a second one would wait for the first to end.
            *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),
            *member_argv(order),
        ]
        return draw_plan(order, argv, _hosts(order))

    def require_ready(self, order: LaunchOrder) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            raise ClusterError(
                "launch.launcher=slurm starts ranks with srun inside a job, and this is none\n"
                "hint: salloc -N 2 first; or write a job: paceline plan RECIPE"
                " launch.launcher=slurm --sbatch job.sh"
            )
        require_program("srun", "run it where SLURM is installed")

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        # srun kills its tasks outright on TERM, and passes USR2 on.
        return run_command(launch, run, stop=signal.SIGUSR2)


def _hosts(order: LaunchOrder) -> list[str]:
    """Return the nodes of this job, or numbers where there is no job yet."""
    names = expand_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))
    count = order.crew.num_nodes
    return (names + [f"node{n}" for n in range(len(names), count)])[:count]


def _asked(order: LaunchOrder) -> list[str]:
    return SlurmConfig.of(order.settings).slurm_args


def _cpus(order: LaunchOrder, allocated: int | None) -> list[str]:
    """Return the cores for a task, to which srun gives only one by default. A rank on CPU computes
    on its threads; one on a GPU needs a thread to launch kernels and one for the backward pass.
    Loaders come on top."""
    if any(option_of(argument) in CPU_OPTIONS for argument in _asked(order)):
        return []
    asked = "OMP_NUM_THREADS" in order.env.variables | order.settings.env
    on_gpu = order.crew.on_gpu
    threads = GPU_THREADS if on_gpu and not asked else order.threads
    needed = threads + order.workers
    if allocated is not None:
        needed = min(needed, allocated // order.crew.per_node)
    return [f"--cpus-per-task={needed}"] if needed else []


def _allocated_cpus() -> int | None:
    """Return the CPUs of the job's smallest node: SLURM writes `56(x2),48`."""
    text = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    counts = [int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)]
    return min(counts, default=None)


def own_command() -> list[str]:
    """Return the program that was really called, for a script that calls it again."""
    called = Path(sys.argv[0])
    if called.name == "paceline" and called.is_file() and os.access(called, os.X_OK):
        return [str(called.absolute())]
    return [sys.executable, "-m", "paceline"]


def batch_script(name: str, file: str, order: LaunchOrder, asked: Sequence[str]) -> str:
    """Write a job for sbatch that runs the same `paceline train`, in a directory named by the job's
    number so that a requeued one finds it. `name` is a slug; every other word is quoted."""
    by_slurm = [] if "launch.launcher=slurm" in asked else ["launch.launcher=slurm"]
    program = own_command()
    options = _batch_options(order)
    given = {option_of(option) for option in options}
    lacking = [f"--{option}" for option in SITE_OPTIONS if option not in given]
    add = f"# Add what your site needs: {', '.join([*lacking, 'modules'])}.\n"
    return BATCH.format(
        file=file,
        name=name,
        num_nodes=order.crew.num_nodes,
        per_node=order.crew.per_node,
        options="".join(f"#SBATCH {option}\n" for option in options),
        lacking=add if lacking else "",
        warning_s=WARNING_S,
        folder=shlex.quote(os.getcwd()),
        program=shlex.join(program),
        command=shlex.join([*program, "train", *asked, *by_slurm]),
    )


def _batch_options(order: LaunchOrder) -> list[str]:
    """What the job asks SLURM for beside nodes and tasks; what the user asks for wins."""
    crew = order.crew
    asked = [a for a in _asked(order) if option_of(a) not in SRUN_ONLY]
    has_gpus = any(option_of(argument).startswith(("gpus", "gres")) for argument in asked)
    on_gpu = crew.on_gpu and not has_gpus
    gpus = [f"--gpus-per-node={crew.per_node}"] if on_gpu else []
    return [*gpus, *_cpus(order, None), *asked]
