"""Chooses whether layers and AdamW run on our Triton kernels: only where they were measured to be
faster and equal."""

from collections.abc import Iterator
from importlib.util import find_spec

from paceline.config.schema import RunConfig
from paceline.plan.policy import capability_of, where_measured
from paceline.records import Choice, Device, Env, Finding, Kernels, Plan
from paceline.strategies.base import Strategy
from paceline.strategies.optimizers import has_kernel
from paceline.workloads.base import Workload

# What was measured: benchmarks/results/gpu_kernels_h200.txt. Chosen on all chips of its capability,
# though their memory and clocks differ.
MEASURED = (9, 0)


def choose_kernels(
    config: RunConfig,
    env: Env,
    device: Choice[Device],
    precision: str,
    workload: Workload,
    strategy: Strategy,
) -> Choice[Kernels]:
    """Choose where every rank computes the same: by the weakest GPU."""
    asked = config.train.kernels
    what = _served(config, workload, strategy)
    if asked != "auto":
        return Choice.as_asked(asked, matters=asked != "torch")
    value: Kernels = "torch"
    capability = capability_of(env)
    if device.value == "cpu":
        because = "there is no GPU"
    elif not what:
        because = f"there is none for this workload, nor for {_update(config, strategy)}"
    elif capability != MEASURED:
        because = "not measured on this GPU"
    elif precision not in ("bf16", "fp8"):
        because = f"not measured in {precision}"
    elif find_spec("triton") is None:
        because = "triton is not installed"
    else:
        value, because = "triton", f"{what}: faster and equal on {where_measured(env)}"
    return Choice(requested=asked, value=value, because=because, matters=value == "triton")


def check_kernels(plan: Plan) -> Iterator[Finding]:
    """Yield why kernels that were asked for cannot run here."""
    if plan.kernels.value != "triton" or plan.kernels.requested == "auto":
        return
    if not plan.on_gpu:
        yield Finding.error(
            "train.kernels",
            "triton was asked for, and the ranks are on CPU",
            hint="set train.kernels=auto",
        )
    elif find_spec("triton") is None:
        yield Finding.error(
            "train.kernels",
            "triton cannot be imported; torch's builds for CUDA bring it",
            hint="pip install triton, or set train.kernels=torch",
            cause="cluster",
        )


def _served(config: RunConfig, workload: Workload, strategy: Strategy) -> str:
    """Return what there are kernels for in this job, in words."""
    adamw = "AdamW" if has_kernel(config, strategy, workload) else ""
    return " and ".join(filter(None, (workload.own_kernels, adamw)))


def _update(config: RunConfig, strategy: Strategy) -> str:
    """Return in words what updates the weights, where no kernel of ours does."""
    if strategy.updates_on_host(config):
        return "updates on the host"
    return f"{config.optim.name}{' that is not fused' if config.optim.fused == 'off' else ''}"
