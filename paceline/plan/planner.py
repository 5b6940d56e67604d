"""Config and env in, plan out: every choice with its reason, every problem at once.

Needs no GPU and no process group: `paceline plan lm_tiny launch.nproc=64` runs on a laptop.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from paceline.config.schema import RunConfig
from paceline.errors import ConfigError, PacelineError
from paceline.job import Job
from paceline.machine.datasheets import choose_arithmetic, choose_peak
from paceline.machine.topology import Topology
from paceline.plan.batch import count_steps, split_batch
from paceline.plan.constraints import (
    check,
    check_frozen,
    check_host_memory,
    check_pipeline,
    check_samples,
)
from paceline.plan.crew import check_crew, choose_crew, choose_threads, count_ranks
from paceline.plan.exchange import choose_exchange
from paceline.plan.kernels import choose_kernels
from paceline.plan.limits import add_limits, check_limits
from paceline.plan.overlap import choose_bucket
from paceline.plan.policy import (
    check_policy,
    choose_attention,
    choose_matmul,
    choose_precision,
    effective_config,
)
from paceline.records import (
    BatchSplit,
    Choice,
    CompileScope,
    Crew,
    Env,
    Finding,
    PipelinePlan,
    Plan,
    Precision,
    StateBytes,
)
from paceline.strategies import find_strategy, most_sharding
from paceline.strategies.base import Share, Strategy
from paceline.strategies.batchnorm import batchnorm_findings
from paceline.strategies.blocks import measure_shape
from paceline.strategies.optim import freeze
from paceline.strategies.optimizers import check_optimizer, choose_fused, choose_optimizer
from paceline.strategies.shape import ModelShape
from paceline.workloads.base import Workload
from paceline.workloads.meta import on_meta
from paceline.workloads.methods import check_methods
from paceline.workloads.returns import (
    model_failed,
    read_model,
    read_problems,
    require_answers,
)

MAX_LOADER_WORKERS = 4


def make_plan(job: Job, env: Env, topology: Topology | None = None) -> Plan:
    """Decide everything that can be decided before a device is held. Problems are findings."""
    config, workload, topology = job.config, job.workload, topology or Topology()
    recompute = config.train.activation_checkpointing
    require_answers(workload, config)
    crew = choose_crew(config.launch, env, topology)
    device, world = crew.device, crew.world_size
    strategy = _choose_strategy(config, world)
    precision = choose_precision(config, env, device)
    attention = choose_attention(config, env, crew, precision.value, workload)
    sharing = find_strategy(strategy.value)
    kernels = choose_kernels(config, env, device, precision.value, workload, sharing)
    matmul = choose_matmul(config, env, device)
    arithmetic = choose_arithmetic(env, device.value, precision.value, matmul.value)
    workers = _choose_workers(config, env, crew)
    model = measure_model(workload, effective_config(config, attention.value))
    layout = sharing.lay_out(config, crew, model)
    batch, batch_problems = split_batch(config, layout.dp)
    share = _share(layout.mesh, precision.value, batch)
    held = fullest(sharing, model, config, share, layout.pipeline)
    plan = Plan(
        name=config.name,
        workload=config.workload,
        unit=workload.unit,
        world_size=world,
        mesh=layout.mesh,
        batch=batch,
        units_per_sample=workload.units_per_sample(config),
        steps=config.train.num_steps or 0,
        epochs=None if config.train.epochs == "off" else config.train.epochs,
        crew=crew,
        device=device,
        backend=crew.backend,
        strategy=strategy,
        precision=precision,
        matmul=matmul,
        attention=attention,
        kernels=kernels,
        compile=Choice.as_asked(config.train.compile),
        compile_scope=_choose_scope(config, sharing, crew.on_gpu),
        recompute=Choice.as_asked(recompute, matters=recompute != "none"),
        optimizer=choose_optimizer(config, workload),
        fused_optimizer=choose_fused(config, sharing, workload),
        deterministic=config.train.deterministic,
        threads=choose_threads(config.launch, env, crew, workers.value),
        loader_workers=workers,
        model=model.size(),
        state_bytes=sharing.estimate(held, config, share),
        exchange=sharing.exchange(held, config, share),
        exchange_by=choose_exchange(config, env, crew, sharing),
        bucket_mb=choose_bucket(config, env, crew, model, sharing),
        pipeline=layout.pipeline,
        flops_per_sample=_choose_flops(workload, effective_config(config, attention.value)),
        peak_flops=choose_peak(config.observe.peak_flops, env, device.value, arithmetic),
        findings=[],
    )
    is_open = config.data.batch_length == "auto"  # found when the data is there
    if plan.epochs is not None and not is_open and (workload.prepared or not _prepares(workload)):
        plan = count_steps(job, plan)
    plan = add_limits(plan, config, env, workload, model, sharing)
    plan = plan.model_copy(update={"engine_config": sharing.engine_config(config, plan)})
    findings = [
        *check_crew(config.launch, env, crew, topology),
        *layout.problems,
        *batch_problems,
        *check_methods(type(workload)),
        *check_pipeline(workload, layout.pipeline is not None),
        *check_samples(config, workload, layout.pipeline is not None),
        *check_frozen(config, workload, sharing, model),
        *read_problems(workload, workload.problems(_computed_in(config, precision.value))),
        *check_policy(config, env, plan, workload),
        *check_limits(config, env, plan, workload, sharing),
        *sharing.problems(config, crew, model),
        *check_optimizer(config, sharing, workload, model),
        *_recompute_problems(config, model),
        *batchnorm_findings(config, sharing, batch, model),
        *_host_memory_problems(config, env, plan, model),
        *check(config, env, plan),
    ]
    return plan.model_copy(update={"findings": findings})


def _computed_in(config: RunConfig, precision: Precision) -> RunConfig:
    """Return the config with what is computed in, in the place of auto."""
    section = config.precision.model_copy(update={"mode": precision})
    return config.model_copy(update={"precision": section})


def _prepares(workload: Workload) -> bool:
    """Say whether there is work on the data before it can be opened."""
    return type(workload).prepare is not Workload.prepare


def _recompute_problems(config: RunConfig, model: ModelShape) -> Iterator[Finding]:
    if config.train.activation_checkpointing != "none" and model.num_units == 1:
        yield Finding.warning(
            "train.activation_checkpointing",
            "the model has no blocks: it is recomputed as a whole, which saves no memory",
            hint="put its repeated layers into an nn.ModuleList, and call each of them",
        )


def _host_memory_problems(
    config: RunConfig, env: Env, plan: Plan, model: ModelShape
) -> Iterator[Finding]:
    if plan.on_gpu:
        return
    per_node = plan.crew.per_node
    ranks = [estimate_rank(plan, config, model, rank).peak for rank in range(plan.world_size)]
    held = max(sum(ranks[n : n + per_node]) for n in range(0, plan.world_size, per_node))
    whole = _share({"dp": plan.world_size}, plan.precision.value, plan.batch)
    sharding = most_sharding(config)
    sharded = sharding.estimate(model, config, whole).peak * per_node
    yield from check_host_memory(config, env, plan, held, (sharding, sharded))


def estimate_rank(plan: Plan, config: RunConfig, model: ModelShape, rank: int) -> StateBytes:
    """Return the bytes that `rank` will hold."""
    share = _share(plan.mesh, plan.precision.value, plan.batch, rank)
    if plan.pipeline is not None:
        model = model.of_blocks(plan.pipeline.blocks_of(rank // plan.batch.dp))
    return find_strategy(plan.strategy.value).estimate(model, config, share)


def fullest(
    strategy: Strategy,
    model: ModelShape,
    config: RunConfig,
    share: Share,
    pipeline: PipelinePlan | None,
) -> ModelShape:
    """Return the model, or the part of it with which a rank of the pipeline holds most."""
    if pipeline is None:
        return model
    parts = [model.of_blocks(pipeline.blocks_of(rank)) for rank in range(pipeline.num_ranks)]
    return max(parts, key=lambda part: strategy.estimate(part, config, share).peak)


def _share(
    mesh: dict[str, int], precision: str, batch: BatchSplit, rank: int | None = None
) -> Share:
    size = list(mesh.values())[-1]  # the ranks of the last axis hold one state together
    compute_bytes = 4 if precision == "fp32" else 2
    return Share(size, None if rank is None else rank % size, compute_bytes, batch.grad_accum)


def sketch_model(workload: Workload, config: RunConfig) -> torch.nn.Module:
    """Build the model on meta: no memory, any size."""
    try:
        with on_meta():
            return read_model(workload, workload.build_model(config))
    except PacelineError:
        raise
    except Exception as error:
        if "overflow" in str(error):  # sizes whose product torch cannot count
            name = f"{type(workload).__name__}.build_model"
            raise ConfigError(
                f"{name}: a tensor of it is too large for any memory ({error})\n"
                "hint: look at the sizes in model and data"
            ) from error
        # It reads a value while it is built, which meta tensors do not have: build it for real.
        return _build_for_real(workload, config)


def measure_model(workload: Workload, config: RunConfig) -> ModelShape:
    """Return the shape of the model; tied parameters count once."""
    sketch = sketch_model(workload, config)
    freeze(sketch, config.optim)
    shape = measure_shape(sketch)
    shape = replace(shape, positions=workload.block_positions(config))
    if not shape.trainable and config.optim.groups:
        raise ConfigError("optim.groups freezes all that there is to train")
    if not shape.trainable:
        raise ConfigError(f"{type(workload).__name__}.build_model gave nothing to train")
    return shape


def _build_for_real(workload: Workload, config: RunConfig) -> torch.nn.Module:
    try:
        return read_model(workload, workload.build_model(config))
    except PacelineError:
        raise
    except Exception as error:
        raise model_failed(workload, error) from error


def _choose_strategy(config: RunConfig, world: int) -> Choice[str]:
    asked = config.strategy.name
    meant = find_strategy(asked)
    if world == 1 and meant.alone:
        because = "one rank has nobody to reduce with"
        return Choice(requested=asked, value=meant.alone, because=because)
    because = "as asked" if meant.name == asked else f"{asked} is another name for it"
    if world == 1 and meant.zero_stage(config):
        because += ", though one rank has nobody to share with"
    return Choice(requested=asked, value=meant.name, because=because)


def _choose_scope(config: RunConfig, strategy: Strategy, on_gpu: bool) -> Choice[CompileScope]:
    asked, compiles = config.train.compile_scope, config.train.compile != "off"
    value, because = asked, "as asked"
    if asked == "auto" and config.train.activation_offload and on_gpu:
        value, because = "blocks", "train.activation_offload takes what each block saves"
    elif asked == "auto" and strategy.compiles_whole:
        value, because = "model", "nothing is exchanged inside it"
    elif asked == "auto":
        value, because = "blocks", f"{strategy.name} works between the blocks"
    return Choice(requested=asked, value=value, because=because, matters=compiles)


def _choose_workers(config: RunConfig, env: Env, crew: Crew) -> Choice[int]:
    asked = config.data.num_workers
    if asked != "auto":
        return Choice.as_asked(asked)
    # A GPU rank needs one core to launch kernels; a CPU rank computes on its cores.
    share, on_gpu = env.cores // crew.per_node, crew.on_gpu
    value = min(MAX_LOADER_WORKERS, share - 1 if on_gpu else share // 4)
    why = f"{env.cores} cores over {count_ranks(crew.per_node)}"
    return Choice(requested=asked, value=max(0, value), because=why)


def wanted_workers(plan: Plan) -> int:
    """Return the loader processes that a rank would have if it could ask for cores: on GPUs the
    number that was chosen may only say how few cores the machine has that makes the plan."""
    asked = plan.loader_workers
    is_free = asked.requested == "auto" and plan.on_gpu
    return MAX_LOADER_WORKERS if is_free else int(asked.value)


def _choose_flops(workload: Workload, config: RunConfig) -> Choice[float | None]:
    # What a workload counts has a gradient for every weight.
    has_frozen = any(group.frozen for group in config.optim.groups)
    counted = None if has_frozen else workload.flops(config)
    if counted is None:
        because = "counted on the first batch by torch.utils.flop_counter"
        return Choice(requested="auto", value=None, because=because)
    counts = {"causal": ", causal attention counted half", "full": ", attention counted in full"}
    how = counts.get(workload.attention, "")
    if config.attention.impl == "nsa" and "nsa" in workload.own_attention:  # else refused
        how = workload.sparse_counted(config)  # type: ignore[attr-defined]
    because = f"counted by the workload: forward and backward{how}"
    return Choice(requested="auto", value=counted, because=because)
