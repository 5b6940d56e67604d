"""The launcher seam: a plan that can be printed and tested, and a run of it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from paceline.config.schema import LaunchConfig
from paceline.machine.fabric import choose_fabric
from paceline.plan.crew import visible_devices
from paceline.records import Crew, Env, Finding, LaunchPlan, Limits, RankEnd, RankPlace
from paceline.records.rundir import RunDir

RUN_DIR = "RUN_DIR"  # stands in a plan that nobody runs
MEMBER = ("-m", "paceline.launch.member")  # what an external launcher starts on every rank


@dataclass(frozen=True)
class LaunchOrder:
    """What is to be started, whoever asked for it."""

    settings: LaunchConfig
    crew: Crew
    env: Env
    threads: int
    task: Literal["train", "check", "verify"]
    workload: str = ""
    run_dir: str = RUN_DIR


@dataclass
class LaunchEnd:
    """What the launcher saw. Whether the run went well is for the ranks' verdicts to say."""

    ends: dict[int, RankEnd] = field(default_factory=dict)
    signal: int | None = None
    refusal: str = ""  # why a command could not start the ranks
    stall: str = ""  # the deadline by which it should have

    @property
    def exit_codes(self) -> dict[int, int]:
        return {rank: end.exit_code for rank, end in self.ends.items()}


class Launcher(Protocol):
    def plan(self, order: LaunchOrder) -> LaunchPlan:
        """Which process runs where, with which environment. Touches nothing."""
        ...

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        """Start the ranks, wait for all of them, leave none behind."""
        ...


def draw_plan(order: LaunchOrder, argv: Sequence[str], hosts: Sequence[str]) -> LaunchPlan:
    """The plan of any launcher: it differs in its command and in its hosts, one name a node."""
    crew, settings = order.crew, order.settings
    fabric = choose_fabric(settings.fabric, order.env, crew, f"{order.run_dir}/miopen")
    env, reasons = _environment(order, fabric.variables)
    return LaunchPlan(
        launcher=crew.launcher.value,
        argv=list(argv),
        task=order.task,
        workload=_absolute(order.workload),
        crew=crew,
        threads=order.threads,
        fabric=fabric.choice,
        env=env,
        reasons=reasons,
        ranks=_places(crew, settings, hosts),
        limits=limits_of(settings),
        # Whatever else ranks do is short, and starts from nothing each time.
        max_restarts=settings.max_restarts if order.task == "train" else 0,
        findings=[*fabric.findings, *_overruled(order, fabric.variables)],
    )


def limits_of(settings: LaunchConfig) -> Limits:
    return Limits(
        start_s=settings.start_s,
        progress_s=settings.progress_s,
        total_s=None if settings.total_s == "off" else settings.total_s,
        grace_s=settings.grace_s,
        collective_s=settings.collective_timeout_s,
    )


def rank_device(crew: Crew, local_rank: int) -> str:
    """`cuda:1`, counted among the GPUs that the ranks see."""
    if crew.device.value == "cpu":
        return "cpu"
    indices = crew.device_indices
    return f"cuda:{indices[local_rank] if local_rank < len(indices) else local_rank}"


def rank_gpu(settings: LaunchConfig, local_rank: int) -> int | None:
    """The GPU as `launch.devices` counts it, where that differs from torch's count."""
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
    """What ranks get beside our own environment. What the user has set is never replaced."""
    asked = order.settings.env
    chosen = {"OMP_NUM_THREADS": (str(order.threads), "the plan's threads a rank")}
    chosen |= {name: pair for name, pair in fabric.items() if name not in order.env.variables}
    if visible := visible_devices(order.settings):
        chosen["CUDA_VISIBLE_DEVICES"] = (",".join(device_names(visible)), "launch.devices")
    env = {name: value for name, (value, _) in chosen.items()} | asked
    reasons = {name: why for name, (_, why) in chosen.items() if name not in asked}
    return env, reasons | dict.fromkeys(asked, "launch.env")


def device_names(devices: Iterable[int]) -> list[str]:
    """`launch.devices` counts the GPUs that are visible now, which may be some of the machine's:
    their numbers there, or their UUIDs."""
    now = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in now.split(",")] if now else []
    return [names[n] if n < len(names) else str(n) for n in devices]


def _overruled(order: LaunchOrder, fabric: dict[str, tuple[str, str]]) -> list[Finding]:
    own = order.env.variables | order.settings.env
    return [
        Finding(
            severity="note",
            where=name,
            what=f"stays {own[name]}, as you set it; the fabric preset would say {value}",
        )
        for name, (value, _) in fabric.items()
        if own.get(name, value) != value
    ]


def _absolute(workload: str) -> str:
    """FILE.py:Class with a full path: a rank must find it whatever its working directory."""
    if ".py:" not in workload:
        return workload
    file, _, name = workload.rpartition(":")
    return f"{Path(file).resolve()}:{name}"
