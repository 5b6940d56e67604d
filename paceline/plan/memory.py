"""Does the state of all ranks fit into a machine? Refused before anything is started where it
cannot: what is too large at rest dies in its first step, hours into a queue."""

from collections.abc import Iterator

from paceline.config.schema import RunConfig
from paceline.machine.launchers import is_allocated
from paceline.plan.crew import count_ranks
from paceline.records import Env, Finding, Plan
from paceline.strategies import find_strategy
from paceline.strategies.base import Strategy

GIB = 2**30


def check_host_memory(
    config: RunConfig, env: Env, plan: Plan, held: int, sharded: tuple[Strategy, int]
) -> Iterator[Finding]:
    """For ranks on CPUs, which share their machine's memory. `held`: bytes of weights, gradients
    and optimizer of all ranks of one machine; `sharded`: the strategy that shards most, and what
    it would hold there."""
    if plan.on_gpu or held <= env.memory_bytes:
        return
    # A login node says nothing of the machines that a scheduler will give.
    is_here = not is_allocated(plan.crew.launcher.value)
    is_refused = is_here and not config.launch.overcommit
    yield Finding(
        severity="error" if is_refused else "warning",
        where="launch.nproc",
        what=f"{count_ranks(plan.crew.per_node)} on this machine would hold"
        f" {held / GIB:,.0f} GiB of weights, gradients and optimizer, and it has"
        f" {env.memory_bytes / GIB:,.0f} GiB",
        hint=_hint(plan, env, *sharded) + _way_on(is_refused),
        cause="cluster",
    )


def _hint(plan: Plan, env: Env, sharding: Strategy, if_sharded: int) -> str:
    """What helps; a smaller microbatch does not, for none of this grows with it."""
    size = f"{if_sharded / GIB:,.0f} GiB"
    if if_sharded <= env.memory_bytes:
        return f"strategy.name={sharding.name} would hold {size} here"
    machines = -(-if_sharded // env.memory_bytes) * (plan.world_size // plan.crew.per_node)
    if find_strategy(plan.strategy.value) is sharding:
        return f"take {machines} machines or more like this one, or a smaller model"
    return (
        f"strategy.name={sharding.name} would still hold {size} here: take it on {machines}"
        " machines or more like this one, or a smaller model"
    )


def _way_on(is_refused: bool) -> str:
    if not is_refused:
        return ""
    return "; launch.overcommit=true goes on all the same, and plans for a larger machine"
