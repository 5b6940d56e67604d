"""What is wrong with a plan, or has no effect in it: each is a finding, never silence."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import RunConfig, Section
from paceline.machine.launchers import foreign_keys
from paceline.records import Env, Finding, Plan


def check(config: RunConfig, env: Env, plan: Plan) -> Iterator[Finding]:
    """Everything wrong with, or idle in, what was asked for here."""
    yield from _memory_problems(config, plan, env)
    if plan.strategy.value == "single" and plan.world_size > 1:
        yield Finding(
            severity="error",
            where="strategy.name",
            what=f"single trains on one rank, and {plan.world_size} were asked for",
            hint="set strategy.name=ddp, or launch.nproc=1",
        )
    if config.optim.schedule.warmup_steps > config.train.steps:
        yield Finding(
            severity="warning",
            where="optim.schedule.warmup_steps",
            what=f"{config.optim.schedule.warmup_steps} steps of warm-up in a run of"
            f" {config.train.steps}: the learning rate never reaches {config.optim.lr:g}",
        )
    if config.optim.fused == "on" and not plan.fused_optimizer.value:
        yield Finding(
            severity="warning",
            where="optim.fused",
            what=f"on was asked, off is used: {plan.fused_optimizer.because}",
        )
    if plan.device.value == "cuda" and not plan.fused_optimizer.value:
        yield Finding(
            severity="note",
            where="optim.fused",
            what="without the fused kernel the host waits for the device before each update, to"
            " know whether the gradient is finite",
        )
    if config.observe.warmup_steps >= config.train.steps:
        yield Finding(
            severity="note",
            where="observe.warmup_steps",
            what=f"all {config.train.steps} steps count as warm-up: no throughput is reported",
        )
    if plan.compile_scope.value == "model" and plan.strategy.value.startswith(("zero2", "zero3")):
        yield Finding(
            severity="error",
            where="train.compile_scope",
            what=f"{plan.strategy.value} gathers weights block by block, which one graph of the"
            " whole model leaves no room for",
            hint="set train.compile_scope=blocks, or auto",
        )
    yield from check_idle_settings(config, plan)


def _memory_problems(config: RunConfig, plan: Plan, env: Env) -> Iterator[Finding]:
    if plan.device.value == "cuda":
        yield from _gpu_memory_problems(config, plan, env)
        return
    needed = plan.state_bytes.peak * plan.crew.per_node
    if needed > env.memory_bytes:
        yield Finding(
            severity="warning",
            where="launch.nproc",
            what=f"{plan.crew.per_node} ranks hold {needed / 2**30:.0f} GiB of state; this machine"
            f" has {env.memory_bytes / 2**30:.0f} GiB",
            cause="cluster",
        )


def _gpu_memory_problems(config: RunConfig, plan: Plan, env: Env) -> Iterator[Finding]:
    smallest = min((gpu.memory_bytes for gpu in env.gpus), default=0)
    state = plan.state_bytes
    needed = state.peak
    if config.strategy.offload and plan.strategy.value == "deepspeed":
        needed -= state.optimizer
    elif config.strategy.offload and plan.strategy.value.startswith(("zero2", "zero3")):
        needed -= state.total
    if smallest and needed > smallest:
        yield Finding(
            severity="error",
            where="strategy.name",
            what=f"{plan.strategy.value} holds {needed / 2**30:.1f} GiB of state on every rank;"
            f" the smallest GPU has {smallest / 2**30:.1f} GiB",
            hint="use a smaller model, strategy.name=zero3 on more ranks, or strategy.offload=true",
            cause="cluster",
        )


@dataclass(frozen=True)
class Idle:
    """`keys` have no effect while `holds`; said only when the user changed one of them."""

    section: str
    keys: tuple[str, ...]
    holds: bool
    because: str


def check_idle_settings(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """One warning for every changed setting that this plan never reads."""
    said: set[tuple[str, str]] = set()
    for rule in _rules(config, plan):
        if not rule.holds:
            continue
        section = _section(config, rule.section)
        for key in rule.keys:
            is_changed = getattr(section, key) != type(section).model_fields[key].get_default()
            if is_changed and (rule.section, key) not in said:
                said.add((rule.section, key))
                yield Finding(
                    severity="warning",
                    where=f"{rule.section}.{key}",
                    what=f"is set but has no effect: {rule.because}",
                )


def _rules(config: RunConfig, plan: Plan) -> tuple[Idle, ...]:
    optim, train = config.optim, config.train
    no_workers = plan.loader_workers.value == 0
    not_fp16 = plan.precision.value != "fp16"
    return (
        *_strategy_rules(config, plan),
        *_launch_rules(plan),
        Idle("data", ("prefetch", "timeout_s"), no_workers, plan.loader_workers.because),
        Idle("precision", ("loss_scale",), not_fp16, f"precision is {plan.precision.value}"),
        Idle(
            "train",
            ("compile_dynamic", "compile_scope"),
            train.compile == "off",
            "train.compile is off",
        ),
        Idle("train", ("eval_samples",), train.eval_every == "off", "train.eval_every is off"),
        Idle("optim", ("momentum",), optim.name == "adamw", "adamw has betas instead"),
        Idle("optim", ("beta1", "beta2"), optim.name == "sgd", "sgd has momentum instead"),
        Idle(
            "optim.schedule",
            ("floor",),
            optim.schedule.name == "constant",
            "a constant schedule never falls",
        ),
    )


def _strategy_rules(config: RunConfig, plan: Plan) -> tuple[Idle, ...]:
    name, strategy = plan.strategy.value, config.strategy
    why = plan.strategy.because if name == "single" else f"strategy.name is {name}"
    is_pipeline, is_deepspeed = name == "pipeline", name == "deepspeed"
    is_sharded = name.startswith(("zero2", "zero3"))
    has_sharded_stages = is_pipeline and strategy.inner != "ddp"
    has_buckets = name in ("ddp", "zero1") or (is_pipeline and strategy.inner == "ddp")
    pipeline_keys = ("schedule", "stages", "stages_per_rank", "microbatches", "split", "inner")
    ddp_keys = ("static_graph", "find_unused_parameters", "comm_hook")
    fsdp_keys = ("reshard_after_forward", "forward_prefetch", "backward_prefetch")
    no_power = strategy.comm_hook != "powersgd"
    alone = plan.batch.grad_accum == 1
    return (
        Idle("strategy", ddp_keys, name not in ("ddp", "zero1"), why),
        Idle("strategy", ("bucket_mb",), not has_buckets, why),
        Idle("strategy", pipeline_keys, not is_pipeline, why),
        Idle("strategy", ("inner",), is_pipeline and plan.batch.dp == 1, "one pipeline has all"),
        Idle("strategy", fsdp_keys, not (is_sharded or has_sharded_stages), why),
        Idle("strategy", ("accumulate",), not is_sharded, why),
        Idle("strategy", ("accumulate",), is_sharded and alone, "a step has one microbatch"),
        Idle("strategy", ("shard_size",), not name.endswith("_hybrid"), why),
        Idle(
            "strategy",
            ("offload",),
            not (is_sharded or is_deepspeed or has_sharded_stages),
            why,
        ),
        Idle("strategy", ("offload",), plan.device.value == "cpu", "the ranks are on CPU already"),
        Idle("strategy", ("stage", "deepspeed_config"), not is_deepspeed, why),
        Idle("strategy", ("powersgd_rank", "powersgd_start"), no_power, "comm_hook is another"),
    )


def _launch_rules(plan: Plan) -> tuple[Idle, ...]:
    by = plan.crew.launcher.value
    return (
        Idle("launch", ("devices",), plan.device.value == "cpu", "the ranks are on CPU"),
        Idle("launch", foreign_keys(by), True, f"{by} starts the ranks"),
    )


def _section(config: RunConfig, path: str) -> Section:
    section: Section = config
    for part in path.split("."):
        section = getattr(section, part)
    return section
