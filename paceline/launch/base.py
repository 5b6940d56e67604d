"""The seams: a verb hands down a `Task`, a `Launcher` plans and runs ranks that do it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.config.schema import LaunchConfig
from paceline.launch.ending import Ending
from paceline.machine.fabric import choose_fabric
from paceline.machine.group import StoreAddress
from paceline.machine.topology import RankId
from paceline.plan.crew import visible_devices
from paceline.records import Crew, Env, Finding, LaunchPlan, Limits, RankPlace
from paceline.records.rundir import RunDir
from paceline.train.control import Requests
from paceline.train.verdict import Tell
from paceline.workloads.job_file import absolute_name

RUN_DIR = "RUN_DIR"  # in the place of a directory, in a plan that nobody runs


@dataclass(frozen=True)
class RankContext:
    """What a rank is given: who it is, where ranks meet, where its files go, what is asked of it
    while it runs."""

    run: RunDir
    place: RankId
    store: StoreAddress
    requests: Requests
    workload: str  # typed by the user, or trusted: ranks take no name of code from a file
    tell: Tell = lambda word: None  # the supervisor, whatever the disk does


@dataclass(frozen=True)
class Task:
    """What ranks do. Each verb that starts ranks has one and hands it down; `name` is written to
    launch.json only so that a process which takes part can see that it runs the same verb."""

    name: str
    work: Callable[[RankContext], None]  # a function of a module: it travels to ranks by its name
    module: str  # `python -m MODULE RUN_DIR` takes part with one rank (member.take_part)
    # The work looks at its requests: signals only note them. Without, a rank dies on a signal.
    polls_requests: bool = False
    # A failed attempt leaves something to go on from, so launch.max_restarts counts.
    is_restartable: bool = False


@dataclass(frozen=True)
class LaunchOrder:
    """What is to be started, whichever verb asked for it."""

    settings: LaunchConfig
    crew: Crew
    env: Env
    threads: int
    task: Task
    workload: str = ""
    run_dir: str = RUN_DIR
    workers: int = 0  # loader processes that each rank wants
    # What the plan needs in the ranks' environment: the value, and why.
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class Launcher(Protocol):
    def require_ready(self, order: LaunchOrder) -> None:
        """Raise what keeps it from starting ranks: programs and machines that are not there. Asked
        before anything is written or started."""
        ...

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        """Decide which process runs where, with which environment. Touches nothing."""
        ...

    def run(self, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
        """Start the ranks, wait for all of them, leave none behind; say how it ended."""
        ...


def draw_plan(order: LaunchOrder, argv: Sequence[str], hosts: Sequence[str]) -> LaunchPlan:
    """Return the launch plan: launchers differ only in the command and in the host of each node."""
    crew, settings = order.crew, order.settings
    fabric = choose_fabric(settings.fabric, order.env, crew, Path(order.run_dir).name)
    env, reasons = _environment(order, fabric.variables)
    return LaunchPlan(
        launcher=crew.launcher.value,
        argv=list(argv),
        task=order.task.name,
        workload=absolute_name(order.workload),
        crew=crew,
        threads=order.threads,
        fabric=fabric.choice,
        env=env,
        reasons=reasons,
        ranks=_places(crew, settings, hosts),
        limits=limits_of(settings),
        max_restarts=settings.max_restarts if order.task.is_restartable else 0,
        findings=[*fabric.findings, *_overruled(order, fabric.variables)],
    )


def with_short_limits(
    launch: LaunchPlan, total_s: float, collective_s: float | None = None
) -> LaunchPlan:
    """Return the plan with the limits of a task that takes no steps: only the whole is timed."""
    limits = {
        "start_s": None,
        "progress_s": None,
        "total_s": total_s,
        "collective_s": min(launch.limits.collective_s, collective_s or float("inf")),
    }
    return launch.model_copy(update={"limits": launch.limits.model_copy(update=limits)})


def limits_of(settings: LaunchConfig) -> Limits:
    return Limits(
        start_s=settings.start_s,
        progress_s=settings.progress_s,
        total_s=None if settings.total_s == "off" else settings.total_s,
        grace_s=settings.grace_s,
        collective_s=settings.collective_timeout_s,
    )


def rank_device(crew: Crew, local_rank: int) -> str:
    """Return `cuda:1`, counted among the GPUs that the ranks see."""
    if crew.device.value == "cpu":
        return "cpu"
    indices = crew.device_indices
    return f"cuda:{indices[local_rank] if local_rank < len(indices) else local_rank}"


def rank_gpu(settings: LaunchConfig, local_rank: int) -> int | None:
    """Return the GPU as `launch.devices` counts it, where that differs from torch's count."""
    if settings.devices == "auto" or local_rank >= len(settings.devices):
        return None
    return settings.devices[local_rank]


def _places(crew: Crew, settings: LaunchConfig, hosts: Sequence[str]) -> list[RankPlace]:
    return [
        RankPlace(
            rank=rank,
            local_rank=rank % crew.per_node,
            host=hosts[rank // crew.per_node],
            device=rank_device(crew, rank % crew.per_node),
            gpu=rank_gpu(settings, rank % crew.per_node),
        )
        for rank in range(crew.world_size)
    ]


def _environment(
    order: LaunchOrder, fabric: dict[str, tuple[str, str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that ranks get in addition to our own environment, with reasons. What
    the user has set is left alone."""
    asked = order.settings.env
    chosen = {"OMP_NUM_THREADS": (str(order.threads), "the plan's threads a rank")}
    wanted = fabric | dict(order.variables)
    chosen |= {name: pair for name, pair in wanted.items() if name not in order.env.variables}
    if visible := visible_devices(order.settings):
        chosen["CUDA_VISIBLE_DEVICES"] = (",".join(device_names(visible)), "launch.devices")
    env = {name: value for name, (value, _) in chosen.items()} | asked
    reasons = {name: why for name, (_, why) in chosen.items() if name not in asked}
    return env, reasons | dict.fromkeys(asked, "launch.env")


def device_names(devices: Iterable[int]) -> list[str]:
    """Return the machine's own numbers or UUIDs of these devices: `launch.devices` counts among the
    GPUs that are visible now."""
    now = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in now.split(",")] if now else []
    return [names[n] if n < len(names) else str(n) for n in devices]


def _overruled(order: LaunchOrder, fabric: dict[str, tuple[str, str]]) -> list[Finding]:
    own = order.env.variables | order.settings.env
    return [
        Finding.note(name, f"stays {own[name]}, as you set it; the fabric preset would say {value}")
        for name, (value, _) in fabric.items()
        if own.get(name, value) != value
    ]
