"""The last decisions of a plan, which need the others: fp8, the memory budget and prefetching;
and the findings about them."""

from collections.abc import Iterator

from paceline.config.schema import RunConfig
from paceline.plan.fp8 import check_fp8, plan_fp8
from paceline.plan.kernels import check_kernels
from paceline.plan.memory import as_recompute, check_memory, check_offload, plan_memory
from paceline.plan.overlap import choose_prefetch
from paceline.plan.policy import effective_config
from paceline.records import Env, Finding, Plan
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape
from paceline.workloads.base import Workload


def add_limits(
    plan: Plan, config: RunConfig, env: Env, workload: Workload, model: ModelShape, by: Strategy
) -> Plan:
    """Return the plan with its layers in fp8, what each block recomputes and gathers ahead."""
    if plan.precision.value == "fp8":
        fp8 = plan_fp8(config, plan, workload, model, by)
        plan = plan.model_copy(update={"fp8": fp8})
    built_from = effective_config(config, plan.attention.value)
    if memory := plan_memory(config, env, plan, workload, built_from):
        plan = plan.model_copy(update={"memory": memory, "recompute": as_recompute(memory)})
    prefetch = choose_prefetch(config, env, plan, model, by)
    return plan.model_copy(update={"prefetch": prefetch})


def check_limits(
    config: RunConfig, env: Env, plan: Plan, workload: Workload, by: Strategy
) -> Iterator[Finding]:
    """Yield what cannot be had here, and what the rest will bring."""
    yield from check_fp8(config, env, plan, workload, by)
    yield from check_kernels(plan)
    yield from check_memory(config, plan)
    yield from check_offload(config, plan)
