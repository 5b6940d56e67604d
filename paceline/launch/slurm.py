"""SLURM: srun inside an allocation, and a batch script for those who have none yet."""

import os
import shlex
import shutil
import signal
from collections.abc import Sequence

from paceline.errors import ClusterError, ConfigError
from paceline.launch.base import LaunchOrder, Task, draw_plan
from paceline.launch.command import member_argv, require_program, run_command
from paceline.launch.ending import Ending
from paceline.machine.topology import expand_nodes
from paceline.records import Crew, LaunchPlan
from paceline.records.rundir import RunDir

WARNING_S = 120  # how long before the end of the job SLURM sends SIGUSR2

BATCH = """\
#!/bin/bash
# Written by `paceline plan ... --sbatch`. Submit it with: sbatch {file}
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node={per_node}
{gpus}#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# SIGUSR2 to this script {warning_s} s before the time is up: ranks write a checkpoint and leave.
#SBATCH --signal=B:USR2@{warning_s}
# Add what your site needs: --time, --partition, --account, modules.

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
            # Inside a step (`srun --pty bash`) a second one would wait for the first to end.
            *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),
            *member_argv(order),
        ]
        return draw_plan(order, argv, _hosts(order))

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        if "SLURM_JOB_ID" not in os.environ:
            raise ClusterError(
                "launch.launcher=slurm starts ranks with srun inside a job, and this is none\n"
                "hint: salloc -N 2 first; or write a job: paceline plan RECIPE"
                " launch.launcher=slurm --sbatch job.sh"
            )
        require_program("srun", "run it where SLURM is installed")
        # srun kills its tasks outright on TERM, and passes USR2 on.
        return run_command(launch, run, stop=signal.SIGUSR2)


def _hosts(order: LaunchOrder) -> list[str]:
    """Return the nodes of this job, or numbers where there is no job yet."""
    names = expand_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))
    count = order.crew.num_nodes
    return (names + [f"node{n}" for n in range(len(names), count)])[:count]


def batch_script(name: str, file: str, crew: Crew, asked: Sequence[str]) -> str:
    """Return a job for sbatch that runs the same `paceline train`, in a directory named by the
    job's number so that a requeued one finds it. `name` is a slug; every other word is quoted."""
    program = shutil.which("paceline")
    if program is None:
        raise ConfigError("`paceline` is not on PATH, and the batch script must call it")
    by_slurm = [] if "launch.launcher=slurm" in asked else ["launch.launcher=slurm"]
    words = [program, "train", *asked, *by_slurm]
    on_gpu = crew.device.value == "cuda"
    return BATCH.format(
        file=file,
        name=name,
        num_nodes=crew.num_nodes,
        per_node=crew.per_node,
        gpus=f"#SBATCH --gpus-per-node={crew.per_node}\n" if on_gpu else "",
        warning_s=WARNING_S,
        folder=shlex.quote(os.getcwd()),
        program=shlex.quote(program),
        command=shlex.join(words),
    )
