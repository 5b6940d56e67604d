"""Which of srun's and sbatch's options `launch.slurm_args` may hold.

They come from a YAML file as easily as from the command line, so nothing of them may start another
program, change where python looks for code, or send output elsewhere. That is a list of what is
passed on, not of what is refused: SLURM takes any unambiguous beginning of an option's name.
"""

import re

# Resources and placement: neither option reads or runs a file.
BOTH = frozenset(
    """
    account begin clusters comment constraint contiguous core-spec cores-per-socket cpu-freq
    cpus-per-gpu cpus-per-task deadline dependency distribution exclude exclusive extra-node-info
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint job-name
    licenses mem mem-bind mem-per-cpu mem-per-gpu network nice nodelist ntasks-per-core
    ntasks-per-gpu ntasks-per-socket overcommit oversubscribe partition power priority qos
    reservation sockets-per-node spread-job switches thread-spec threads-per-core time time-min tmp
    tres-bind tres-per-task use-min-nodes wckey
    """.split()
)
SRUN_ONLY = frozenset({"cpu-bind", "exact", "label", "overlap", "unbuffered"})
OURS = {
    "nodes": "launch.nnodes",
    "ntasks": "launch.nproc and launch.nnodes",
    "ntasks-per-node": "launch.nproc",
    "export": "launch.env.NAME=value",
    "export-file": "launch.env.NAME=value",
    "signal": "launch.grace_s",
}
PROGRAMS = frozenset(
    """
    bcast bell chdir container container-id epilog get-user-env mpi multi-prog open-mode
    preserve-env prolog propagate send-libs task-epilog task-prolog uid gid wrap x11
    """.split()
)
# No blank, quote, comment or shell sign: a value also stands in a line of a batch script.
WORD = re.compile(r"--([a-z][a-z0-9-]*)(?:=([A-Za-z0-9_.,:/@%+*=~^&|()\[\]-]+))?")


def option_of(argument: str) -> str:
    """Return the option's name: `gres` of `--gres=gpu:8`."""
    return argument.removeprefix("--").partition("=")[0]


def explain_refusal(argument: str) -> str:
    """Return why an argument is not passed on, or nothing where it is."""
    match = WORD.fullmatch(argument)
    if match is None:
        return (
            f"{argument!r} is not --option=value\nhint: for example [--partition=gpu,--gres=gpu:8]"
        )
    name = match[1]
    if name in BOTH | SRUN_ONLY:
        return ""
    if name in OURS:
        return f"--{name} is Paceline's to set\nhint: set {OURS[name]}"
    why = "is not a resource or a placement, and those alone are passed on"
    if any(known.startswith(name) for known in PROGRAMS):
        why = "can run a program, or change what is run, and a config file must not"
    return f"--{name} {why}\nhint: call srun yourself: srun {argument} paceline train ..."
