"""Every launcher: what it is, which keys of `launch` are its own. The one list of their names.

A new launcher is a file in `launch/` and a row here. How its ranks know who they are is another
matter: `topology.py` reads their variables, unless they are those of torchrun. Nothing here
imports torch or starts anything, so that config, planner and command line can ask.

`launch.slurm_args` comes from a YAML file as easily as from the command line, so none of its
options may start another program, change where python looks for code, or send output elsewhere.
The lists below name what is passed on, not what is refused: SLURM takes any unambiguous
beginning of an option's name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

from pydantic import Field, create_model, field_validator

from paceline.config.schema import CheckConfig, LaunchConfig

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


class LauncherConfig(LaunchConfig):
    """The base of sections of launchers that have keys of their own."""

    @classmethod
    def of(cls, launch: LaunchConfig) -> Self:
        """Return the section `launch` as this launcher's, which is a part of it."""
        assert isinstance(launch, cls), f"the schema of this config lacks {cls.__name__}"
        return launch


class HostfileConfig(LauncherConfig):
    hostfile: Literal["none"] | str = Field(
        "none", description="Machines for mpi, deepspeed and torchrun: lines of NAME slots=N."
    )


class TorchrunConfig(HostfileConfig):
    rdzv_endpoint: Literal["auto"] | str = Field(
        "auto", description="HOST:PORT where torchrun's agents meet. auto: this host, a free port."
    )
    torchrun_args: list[str] = Field([], description="More arguments for torchrun, as a list.")

    @field_validator("rdzv_endpoint")
    @classmethod
    def _endpoint_is_plain(cls, endpoint: str) -> str:
        if endpoint != "auto" and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.\-]*:\d{1,5}", endpoint):
            raise ValueError(f"{endpoint!r} is not HOST:PORT")
        return endpoint


class SlurmConfig(LauncherConfig):
    slurm_args: list[str] = Field(
        [],
        description="More options for srun and sbatch, as a list: [--gres=gpu:8,--time=1:00:00].",
    )

    @field_validator("slurm_args")
    @classmethod
    def _slurm_args_run_nothing(cls, arguments: list[str]) -> list[str]:
        refusals = [explain_refusal(argument) for argument in arguments]
        if any(refusals):
            raise ValueError("; ".join(refusal for refusal in refusals if refusal))
        return arguments


@dataclass(frozen=True)
class Allocation:
    """Machines that a scheduler has given to the job around us."""

    name: str
    variable: str  # how many nodes it has

    def num_nodes(self, variables: Mapping[str, str]) -> int:
        text = variables.get(self.variable, "1")
        return int(text) if text.isdigit() else 1


@dataclass(frozen=True)
class LauncherFacts:
    """What the planner must know of a launcher that it never runs."""

    code: str  # MODULE:CLASS in launch/, imported when it is used
    settings: type[LaunchConfig] = LaunchConfig  # beside the common keys, its own
    # Ranks are forked on this machine, from a process that has python and torch loaded. Otherwise
    # they are programs of their own, which may start on several machines.
    is_local: bool = False
    allocation: Allocation | None = None  # ranks start inside it: its machines need not be this one

    def allocated_nodes(self, variables: Mapping[str, str]) -> int:
        return self.allocation.num_nodes(variables) if self.allocation else 1


LAUNCHERS: dict[str, LauncherFacts] = {
    "local": LauncherFacts("paceline.launch.local:LocalLauncher", is_local=True),
    "torchrun": LauncherFacts("paceline.launch.torchrun:TorchrunLauncher", TorchrunConfig),
    "slurm": LauncherFacts(
        "paceline.launch.slurm:SlurmLauncher",
        SlurmConfig,
        allocation=Allocation("SLURM job", "SLURM_JOB_NUM_NODES"),
    ),
    "mpi": LauncherFacts("paceline.launch.mpi:MpiLauncher", HostfileConfig),
    "deepspeed": LauncherFacts("paceline.launch.deepspeed:DeepSpeedLauncher", HostfileConfig),
}
DEFAULT = "local"


def is_local(name: str) -> bool:
    """Tell whether Paceline itself forks the ranks. What started us need not be in the list."""
    return name in LAUNCHERS and LAUNCHERS[name].is_local


def is_allocated(name: str) -> bool:
    """Tell whether ranks start on machines that a scheduler gives: this one need not be theirs."""
    return name in LAUNCHERS and LAUNCHERS[name].allocation is not None


def wide_launchers() -> list[str]:
    """Return the names of those that can start ranks on several machines."""
    return [name for name, facts in LAUNCHERS.items() if not facts.is_local]


def any_wide_launcher() -> str:
    """Return their names as a hint has them: `torchrun, slurm, mpi or deepspeed`."""
    *most, last = wide_launchers()
    return f"{', '.join(most)} or {last}"


def foreign_keys(name: str) -> tuple[str, ...]:
    """Return the keys of `launch` that only launchers other than `name` read."""
    own = LAUNCHERS[name].settings if name in LAUNCHERS else LaunchConfig
    theirs = {key: None for facts in LAUNCHERS.values() for key in facts.settings.model_fields}
    return tuple(key for key in theirs if key not in own.model_fields)


def launch_section() -> type[LaunchConfig]:
    """Return the section `launch` of a run: the common keys and those of all launchers."""
    return _compose(tuple(LAUNCHERS.items()))


@cache
def _compose(launchers: tuple[tuple[str, LauncherFacts], ...]) -> type[LaunchConfig]:
    sections = list(dict.fromkeys(facts.settings for _, facts in launchers))
    # A section that another one extends comes with that one.
    last = [s for s in sections if not any(s is not t and issubclass(t, s) for t in sections)]
    names: Any = Literal[("auto", *(name for name, _ in launchers))]
    about = LaunchConfig.model_fields["launcher"].description
    fields: dict[str, Any] = {"launcher": (names, Field("auto", description=about))}
    return create_model("LaunchConfig", __base__=tuple(last), **fields)


def check_schema() -> type[CheckConfig]:
    """Return `CheckConfig` with the keys of all launchers."""
    section = launch_section()
    fields: dict[str, Any] = {
        "launch": (section, Field(default_factory=section, description="Where ranks run."))
    }
    return create_model("CheckConfig", __base__=CheckConfig, **fields)
