"""What is wrong with a plan, or has no effect in it: each is a finding, never silence. State
that does not fit is refused before anything is started: it would die in its first step, hours
into a queue."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import RunConfig
from paceline.config.section import Section
from paceline.config.training import OptimConfig
from paceline.machine.launchers import foreign_keys, is_local
from paceline.plan.crew import OVERCOMMIT, RANK_BYTES, count_ranks, is_refused_here
from paceline.records import Env, Finding, Plan
from paceline.records.profiled import AUDITED_STEP, parse_profile
from paceline.records.words import size
from paceline.strategies import find_strategy, most_sharding
from paceline.strategies.base import Strategy
from paceline.strategies.optimizers import KINDS
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
        yield Finding(
            severity="warning",
            where="optim.fused",
            what=f"on was asked for, but off is used: {plan.fused_optimizer.because}",
        )
    if plan.on_gpu and not plan.fused_optimizer.value:
        yield Finding(
            severity="note",
            where="optim.fused",
            what="without the fused kernel the host waits for the device before each update, to"
            " know whether the gradient is finite",
        )


def _exchange_problems(plan: Plan) -> Iterator[Finding]:
    by = plan.exchange_by
    if by.requested != by.value:
        what = f"{by.requested} was asked for, but {by.value} is used: {by.because}"
        yield Finding(severity="warning", where="strategy.exchange", what=what)


def _class_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Refuse a workload that is a class of this program under a launcher that cannot pass it on."""
    if is_given(config.workload) and not is_local(plan.crew.launcher.value):
        yield Finding(
            severity="error",
            where="launch.launcher",
            what=f"{config.workload} is a class of this program, and {plan.crew.launcher.value}"
            " cannot pass it to the ranks that it starts",
            hint="put the class into a file: FILE.py:Class",
        )


def _observe_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what is asked to be observed and cannot be."""
    observe, steps = config.observe, parse_profile(config.observe.profile)
    if steps is not None and steps[0] <= AUDITED_STEP < plan.steps:
        yield Finding(
            severity="error",
            where="observe.profile",
            what=f"step {AUDITED_STEP} is profiled for the audit, and {observe.profile} begins"
            " before it is over",
            hint=f"begin at step {AUDITED_STEP + 1}, or later: the first steps are slow anyway",
        )
    if steps is not None and steps[-1] > plan.steps > 0:
        yield Finding(
            severity="warning",
            where="observe.profile",
            what=f"{observe.profile} goes beyond the {plan.steps} steps of the run",
        )
    if observe.memory == "snapshot" and not plan.on_gpu:
        yield Finding(
            severity="warning",
            where="observe.memory",
            what="only CUDA's allocator records a history: on a CPU, snapshot is the same as dumps",
        )


def _length_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what cannot work where batches differ in shape from step to step."""
    if config.data.num_buckets is None:
        return
    by_length = config.data.batch_by == "length"
    where = "data.batch_by" if by_length else "data.buckets"
    if plan.pipeline is not None:
        yield Finding(
            severity="error",
            where=where,
            what=f"a pipeline cuts each batch into {plan.pipeline.num_microbatches} equal parts,"
            " but these batches differ in their number of samples",
            hint="use data.batch_by=samples with data.buckets=off, or another strategy",
        )
    graphs = plan.compile.value in ("reduce-overhead", "max-autotune")
    if plan.compile.value != "off" and (config.train.compile_dynamic == "off" or graphs):
        each = "a graph is recorded" if graphs else "the model is compiled"
        hint = "train.compile_dynamic=on compiles once for all shapes"
        yield Finding(
            severity="error",
            where="train.compile" if graphs else "train.compile_dynamic",
            what=f"{each} for each shape of a batch, and with {where} shapes differ from step to"
            " step",
            hint=f"train.compile=default with {hint}" if graphs else hint,
        )


def _schedule_problems(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    schedule, steps = config.optim.schedule, plan.steps  # 0: the data's length will decide
    warmup, total = schedule.warmup_steps, schedule.total_steps
    if warmup > steps > 0:
        yield Finding(
            severity="warning",
            where="optim.schedule.warmup_steps",
            what=f"{warmup} steps of warm-up in a run of {steps}: the learning rate never reaches"
            f" {config.optim.lr:g}",
        )
    if total != "auto" and total <= warmup:
        yield Finding(
            severity="error",
            where="optim.schedule.total_steps",
            what=f"the schedule ends at step {total}, and its warm-up at {warmup}",
            hint="set it to more than optim.schedule.warmup_steps",
        )
    elif total != "auto" and total > steps > 0 and schedule.name != "constant":
        yield Finding(
            severity="note",
            where="optim.schedule.total_steps",
            what=f"the schedule ends at step {total}, and the run at {steps}: the learning rate"
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


@dataclass(frozen=True)
class Idle:
    """A rule: `keys` have no effect while `holds`; reported only when the user changed one of
    them."""

    section: str
    keys: tuple[str, ...]
    holds: bool
    because: str


def check_idle_settings(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield one warning for every changed setting that this plan never reads."""
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
    not_fp16, not_fp8 = plan.precision.value != "fp16", plan.precision.value != "fp8"
    return (
        *_strategy_rules(config, plan),
        *_launch_rules(plan),
        Idle("data", ("prefetch",), no_workers, plan.loader_workers.because),
        *_batch_rules(config),
        Idle(
            "attention",
            ("nsa",),
            plan.attention.value != "nsa",
            f"attention.impl is {plan.attention.value}",
        ),
        Idle("precision", ("loss_scale",), not_fp16, f"precision is {plan.precision.value}"),
        Idle(
            "precision",
            ("fp8_recipe", "fp8_layers", "fp8_all_gather"),
            not_fp8,
            f"precision is {plan.precision.value}",
        ),
        Idle(
            "train",
            ("compile_dynamic", "compile_scope"),
            train.compile == "off",
            "train.compile is off",
        ),
        Idle("train", ("activation_offload",), not plan.on_gpu, "the ranks are on CPU already"),
        Idle(
            "train",
            ("eval_samples", "eval_ema", "best", "stop_after"),
            train.eval_every == "off",
            "train.eval_every is off",
        ),
        Idle("train", ("eval_ema",), optim.ema == "off", "optim.ema is off"),
        Idle("observe", ("nvtx",), not plan.on_gpu, "the ranks are on CPU"),
        Idle("observe", ("memory_every",), config.observe.memory == "off", "observe.memory is off"),
        *_optimizer_rules(optim, plan),
        *_curve_rules(optim.schedule.name),
    )


def _curve_rules(name: str) -> tuple[Idle, ...]:
    where, low = "optim.schedule", "optim.schedule.name is onecycle, which ends at lr / 250,000"
    never = "a constant schedule never falls"
    return (
        Idle(where, ("floor", "total_steps"), name == "constant", never),
        Idle(where, ("floor",), name == "onecycle", low),
        Idle(where, ("decay",), name != "wsd", f"optim.schedule.name is {name}"),
    )


def _batch_rules(config: RunConfig) -> tuple[Idle, ...]:
    by_length = config.data.batch_by == "length"
    return (
        Idle("data", ("batch_length",), not by_length, "data.batch_by is samples"),
        Idle("train", ("micro_batch_size",), by_length, "data.batch_length fills a microbatch"),
    )


def _optimizer_rules(optim: OptimConfig, plan: Plan) -> Iterator[Idle]:
    """Yield keys of other optimizers. The workload's own may read any."""
    if plan.optimizer.value in KINDS:
        keys = {key for kind in KINDS.values() for key in kind.reads}
        unread = tuple(sorted(keys - set(KINDS[optim.name].reads)))
        yield Idle("optim", unread, True, f"{optim.name} does not read it")


def _strategy_rules(config: RunConfig, plan: Plan) -> Iterator[Idle]:
    """Yield keys of other strategies, by their sections, and its own keys that it does not read."""
    used, asked = find_strategy(plan.strategy.value), find_strategy(config.strategy.name)
    for key, readers in type(config.strategy).readers.items():
        if key in used.Settings.model_fields:
            continue
        if key in asked.Settings.model_fields:  # one rank: another takes its place
            because = plan.strategy.because
        else:
            verb = "reads" if len(readers) == 1 else "read"
            because = f"{', '.join(readers)} {verb} it, and strategy.name is {asked.name}"
        yield Idle("strategy", (key,), True, because)
    for keys, because in used.unread(config, plan):
        yield Idle("strategy", keys, True, because)


def _launch_rules(plan: Plan) -> tuple[Idle, ...]:
    by = plan.crew.launcher.value
    return (
        Idle("launch", ("devices",), not plan.on_gpu, "the ranks are on CPU"),
        Idle("launch", foreign_keys(by), True, f"{by} starts the ranks"),
    )


def _section(config: RunConfig, path: str) -> Section:
    section: Section = config
    for part in path.split("."):
        section = getattr(section, part)
    return section


def check_pipeline(workload: Workload, is_pipeline: bool) -> Iterator[Finding]:
    """Refuse a pipeline of a workload that says why it cannot be one."""
    if is_pipeline and workload.no_pipeline:
        yield Finding(
            severity="error",
            where="strategy.name",
            what=f"{type(workload).__name__} cannot be a pipeline: {workload.no_pipeline}",
            hint="use ddp, or zero1 to zero3 where memory is short",
        )


def check_frozen(
    config: RunConfig, workload: Workload, sharing: Strategy, model: ModelShape
) -> Iterator[Finding]:
    """Refuse what cannot be done with weights that are not trained."""
    name, is_library = config.strategy.name, sharing.updates_itself
    if model.no_sharding and (sharing.shards(config) or is_library):
        yield Finding(
            severity="error",
            where="strategy.name",
            what=f"{name} cuts weights into pieces, and here it cannot: {model.no_sharding}",
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
        yield Finding(
            severity="error",
            where="checkpoint.weights",
            what=f"trained: {why}, so nothing else could be loaded beside it",
            hint="set checkpoint.weights=all",
        )


def check_samples(config: RunConfig, workload: Workload, is_pipeline: bool) -> Iterator[Finding]:
    """Refuse `train.sample_prompts` where nobody can continue them."""
    train, where = config.train, "train.sample_prompts"
    if not train.sample_prompts:
        if train.sample_tokens != type(train).model_fields["sample_tokens"].default:
            what = "is set but has no effect: there is no train.sample_prompts"
            yield Finding(severity="warning", where="train.sample_tokens", what=what)
        return
    if type(workload).generate is Workload.generate:
        yield Finding(
            severity="error",
            where=where,
            what=f"{type(workload).__name__} generates no text",
            hint="remove it; lm, causal_lm and workloads with a method generate can write text",
        )
    elif is_pipeline:
        yield Finding(
            severity="error",
            where=where,
            what="a pipeline runs a batch through the model once, but text takes many passes",
            hint="remove it, and use paceline generate on the run's checkpoints",
        )
    elif train.eval_every == "off":
        what = "is set but has no effect: train.eval_every is off"
        yield Finding(severity="warning", where=where, what=what)


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
