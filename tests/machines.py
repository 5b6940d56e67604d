"""Machines that are not there, and what is planned for them."""

from paceline.job import load_job
from paceline.launch import find_launcher
from paceline.launch.base import LaunchOrder
from paceline.plan.planner import make_plan
from paceline.records import Env, Gpu, LaunchPlan, Link, Plan
from paceline.run.flow import order_for

GIB = 2**30


def machine(num_gpus: int = 0, capability: str = "9.0", name: str = "NVIDIA H200") -> Env:
    gpus = [
        Gpu(
            index=i, name=name, uuid=f"GPU-{i}", compute_capability=capability,
            memory_bytes=141 * GIB,
        )
        for i in range(num_gpus)
    ]  # fmt: skip
    return Env(
        host="box", os="Linux", cpu="a CPU", cores=16, memory_bytes=64 * GIB, gpus=gpus, links=[],
        driver="580", python="3.11", torch="2.13", cuda="13.0" if num_gpus else None, nccl=None,
        packages={}, git=None, variables={},
    )  # fmt: skip


MACHINE = machine()


def plan(*overrides: str, source: str = "lm_tiny", machine: Env | None = None) -> Plan:
    return make_plan(load_job(source, list(overrides)), machine or MACHINE)


def box(num_gpus: int, kind: str = "nvswitch", **more: object) -> Env:
    """A machine of H100s whose every pair is joined by `kind`."""
    gpus = [
        Gpu(index=n, name="NVIDIA H100 80GB HBM3", uuid=f"GPU-{n}", compute_capability="9.0",
            memory_bytes=80 << 30)
        for n in range(num_gpus)
    ]  # fmt: skip
    nvlinks = 18 if kind.startswith("nv") else 0
    pairs = [(a, b) for a in range(num_gpus) for b in range(a + 1, num_gpus)]
    links = [Link(a=a, b=b, kind=kind, nvlinks=nvlinks) for a, b in pairs]
    update = {"gpus": gpus, "links": links, "cuda": "13.0", "cores": 64} | more
    return MACHINE.model_copy(update=update)


def order_of(*overrides: str) -> LaunchOrder:
    """What SLURM is asked to start."""
    job = load_job("lm_tiny", ["launch.launcher=slurm", *overrides])
    return order_for(job, MACHINE, make_plan(job, MACHINE))


def draw(*overrides: str, env: Env | None = None, by: str = "local") -> LaunchPlan:
    """The launch plan of lm_tiny by a launcher."""
    job = load_job("lm_tiny", [f"launch.launcher={by}", *overrides])
    env = env or MACHINE
    return find_launcher(by).plan(order_for(job, env, make_plan(job, env)))
