"""What is wrong with a plan: each problem is a finding, never silence. State that does not fit is
refused before anything is started: it would die in its first step, hours into a queue."""

from collections.abc import Iterator

from paceline.config.schema import RunConfig
from paceline.machine.launchers import is_local
from paceline.plan.crew import OVERCOMMIT, RANK_BYTES, count_ranks, is_refused_here
from paceline.plan.idle import check_idle_settings
from paceline.records import Env, Finding, Plan
from paceline.records.profiled import AUDITED_STEP, parse_profile
from paceline.records.words import size
from paceline.strategies import find_strategy, most_sharding
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape
from paceline.track.sinks import check_installed
from paceline.workloads.base import Workload
from paceline.workloads.given import is_given


def check(config: RunConfig, env: Env, plan: Plan) -> Iterator[Finding]:
    """Yield everything that is wrong with, or idle in, what was asked for here."""
    yield from _memory_problems(config, plan, env)
    yield from _schedule_problems(config, plan)
    yield from _fused_problems(config, plan)
    yield from _exchange_problems(plan)
    yield from _length_problems(config, plan)
    yield from check_installed(config.observe.trackers)
    yield from _observe_problems(config, plan)
    yield from _class_problems(config, plan)
    yield from check_idle_settings(config, plan)


def _fused_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Say why the update is not by one kernel, and what that costs on a GPU."""
    if config.optim.fused == "on" and not plan.fused_optimizer.value:
        yield Finding.warning(
            "optim.fused", f"on was asked for, but off is used: {plan.fused_optimizer.because}"
        )
    if plan.on_gpu and not plan.fused_optimizer.value:
        yield Finding.note(
            "optim.fused",
            "without the fused kernel the host waits for the device before each update, to"
            " know whether the gradient is finite",
        )


def _exchange_problems(plan: Plan) -> Iterator[Finding]:
    by = plan.exchange_by
    if by.requested != by.value:
        what = f"{by.requested} was asked for, but {by.value} is used: {by.because}"
        yield Finding.warning("strategy.exchange", what)


def _class_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Refuse a workload that is a class of this program under a launcher that cannot pass it on."""
    if is_given(config.workload) and not is_local(plan.crew.launcher.value):
        yield Finding.error(
            "launch.launcher",
            f"{config.workload} is a class of this program, and {plan.crew.launcher.value}"
            " cannot pass it to the ranks that it starts",
            hint="put the class into a file: FILE.py:Class",
        )


def _observe_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what is asked to be observed and cannot be."""
    observe, steps = config.observe, parse_profile(config.observe.profile)
    if steps is not None and steps[0] <= AUDITED_STEP < plan.steps:
        yield Finding.error(
            "observe.profile",
            f"step {AUDITED_STEP} is profiled for the audit, and {observe.profile} begins"
            " before it is over",
            hint=f"begin at step {AUDITED_STEP + 1}, or later: the first steps are slow anyway",
        )
    if steps is not None and steps[-1] > plan.steps > 0:
        yield Finding.warning(
            "observe.profile", f"{observe.profile} goes beyond the {plan.steps} steps of the run"
        )
    if observe.memory == "snapshot" and not plan.on_gpu:
        yield Finding.warning(
            "observe.memory",
            "only CUDA's allocator records a history: on a CPU, snapshot is the same as dumps",
        )


def _length_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what cannot work where batches differ in shape from step to step."""
    if config.data.num_buckets is None:
        return
    by_length = config.data.batch_by == "length"
    where = "data.batch_by" if by_length else "data.buckets"
    if plan.pipeline is not None:
        yield Finding.error(
            where,
            f"a pipeline cuts each batch into {plan.pipeline.num_microbatches} equal parts,"
            " but these batches differ in their number of samples",
            hint="use data.batch_by=samples with data.buckets=off, or another strategy",
        )
    graphs = plan.compile.value in ("reduce-overhead", "max-autotune")
    if plan.compile.value != "off" and (config.train.compile_dynamic == "off" or graphs):
        each = "a graph is recorded" if graphs else "the model is compiled"
        hint = "train.compile_dynamic=on compiles once for all shapes"
        yield Finding.error(
            "train.compile" if graphs else "train.compile_dynamic",
            f"{each} for each shape of a batch, and with {where} shapes differ from step to step",
            hint=f"train.compile=default with {hint}" if graphs else hint,
        )


def _schedule_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    schedule, steps = config.optim.schedule, plan.steps  # 0: the data's length will decide
    warmup, total = schedule.warmup_steps, schedule.total_steps
    if warmup > steps > 0:
        yield Finding.warning(
            "optim.schedule.warmup_steps",
            f"{warmup} steps of warm-up in a run of {steps}: the learning rate never reaches"
            f" {config.optim.lr:g}",
        )
    if total != "auto" and total <= warmup:
        yield Finding.error(
            "optim.schedule.total_steps",
            f"the schedule ends at step {total}, and its warm-up at {warmup}",
            hint="set it to more than optim.schedule.warmup_steps",
        )
    elif total != "auto" and total > steps > 0 and schedule.name != "constant":
        yield Finding.note(
            "optim.schedule.total_steps",
            f"the schedule ends at step {total}, and the run at {steps}: the learning rate"
            " does not reach its end",
        )


def _memory_problems(config: RunConfig, plan: Plan, env: Env) -> Iterator[Finding]:
    if not plan.on_gpu:
        return  # check_host_memory: ranks on CPUs share their machine's memory
    smallest = min((gpu.memory_bytes for gpu in env.gpus), default=0)
    needed = find_strategy(plan.strategy.value).device_bytes(config, plan.state_bytes)
    if smallest and needed > smallest:
        yield Finding(
            severity="warning" if config.launch.overcommit else "error",
            where="strategy.name",
            what=f"{plan.strategy.value} holds {size(needed)} of state on every rank;"
            f" the smallest GPU has {size(smallest)}",
            hint=f"use a smaller model, strategy.name={most_sharding(config).name} on more ranks,"
            " or strategy.offload=true; a smaller microbatch does not help",
            cause="cluster",
        )


def check_pipeline(workload: Workload, is_pipeline: bool) -> Iterator[Finding]:
    """Refuse a pipeline of a workload that says why it cannot be one."""
    if is_pipeline and workload.no_pipeline:
        yield Finding.error(
            "strategy.name",
            f"{type(workload).__name__} cannot be a pipeline: {workload.no_pipeline}",
            hint="use ddp, or zero1 to zero3 where memory is short",
        )


def check_frozen(
    config: RunConfig, workload: Workload, sharing: Strategy, model: ModelShape
) -> Iterator[Finding]:
    """Refuse what cannot be done with weights that are not trained."""
    name, is_library = config.strategy.name, sharing.updates_itself
    if model.no_sharding and (sharing.shards(config) or is_library):
        yield Finding.error(
            "strategy.name",
            f"{name} cuts weights into pieces, and here it cannot: {model.no_sharding}",
            hint="use ddp, or zero1: only what is trained is exchanged",
        )
    if config.checkpoint.weights == "all":
        return
    whys = []
    if not workload.knows_base:
        whys.append(f"{type(workload).__name__} does not say which weights it began with")
    if is_library:
        whys.append(f"{name} keeps all weights in one state of its own")
    for why in whys:
        yield Finding.error(
            "checkpoint.weights",
            f"trained: {why}, so nothing else could be loaded beside it",
            hint="set checkpoint.weights=all",
        )


def check_samples(config: RunConfig, workload: Workload, is_pipeline: bool) -> Iterator[Finding]:
    """Refuse `train.sample_prompts` where nobody can continue them."""
    train, where = config.train, "train.sample_prompts"
    if not train.sample_prompts:
        if train.sample_tokens != type(train).model_fields["sample_tokens"].default:
            what = "is set but has no effect: there is no train.sample_prompts"
            yield Finding.warning("train.sample_tokens", what)
        return
    if type(workload).generate is Workload.generate:
        yield Finding.error(
            where,
            f"{type(workload).__name__} generates no text",
            hint="remove it; lm, causal_lm and workloads with a method generate can write text",
        )
    elif is_pipeline:
        yield Finding.error(
            where,
            "a pipeline runs a batch through the model once, but text takes many passes",
            hint="remove it, and use paceline generate on the run's checkpoints",
        )
    elif train.eval_every == "off":
        what = "is set but has no effect: train.eval_every is off"
        yield Finding.warning(where, what)


def check_host_memory(
    config: RunConfig, env: Env, plan: Plan, held: int, sharded: tuple[Strategy, int]
) -> Iterator[Finding]:
    """Refuse ranks on CPUs whose state does not fit into the memory that they share, beside what
    each process holds anyway. `held`: bytes of weights, gradients and optimizer of all ranks of one
    machine; `sharded`: the strategy that shards most, and what it would hold there."""
    room = env.memory_bytes - plan.crew.per_node * RANK_BYTES
    if plan.on_gpu or held <= room or room < 0:  # not even processes fit: check_crew has said so
        return
    is_refused = is_refused_here(config.launch, plan.crew)
    beside = "" if held > env.memory_bytes else f", {size(env.memory_bytes - room)} of processes"
    yield Finding(
        severity="error" if is_refused else "warning",
        where="launch.nproc",
        what=f"{count_ranks(plan.crew.per_node)} on this machine would hold"
        f" {size(held)} of weights, gradients and optimizer{beside}, and it has"
        f" {size(env.memory_bytes)}",
        hint=_hint(plan, room, *sharded) + (OVERCOMMIT if is_refused else ""),
        cause="cluster",
    )


def _hint(plan: Plan, room: int, sharding: Strategy, if_sharded: int) -> str:
    """Say what helps; a smaller microbatch does not, for none of this grows with it."""
    needed = size(if_sharded)
    if if_sharded <= room:
        return f"strategy.name={sharding.name} would hold {needed} here"
    machines = -(-if_sharded // max(1, room)) * (plan.world_size // plan.crew.per_node)
    if find_strategy(plan.strategy.value) is sharding:
        return f"take {machines} machines or more like this one, or a smaller model"
    return (
        f"strategy.name={sharding.name} would still hold {needed} here: take it on {machines}"
        " machines or more like this one, or a smaller model"
    )
