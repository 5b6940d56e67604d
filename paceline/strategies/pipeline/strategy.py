"""`strategy.name=pipeline`: what it cannot do, what it holds, how it is built."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.config.schema import RunConfig
from paceline.records import Env, Exchange, Finding, PipelinePlan, StateBytes
from paceline.schedules.orders import draw_schedule
from paceline.schedules.requirements import SPLIT_BACKWARDS
from paceline.strategies.base import Engine, EngineParts, Share
from paceline.strategies.blocks import find_blocks
from paceline.strategies.compose import compose
from paceline.strategies.ddp import DDP
from paceline.strategies.engine import Wrapping
from paceline.strategies.mesh import build_mesh
from paceline.strategies.objective import Objective
from paceline.strategies.optim import build_optimizer
from paceline.strategies.pipeline.cut import cut_model, enter_at
from paceline.strategies.pipeline.dualpipe import LANES, Lane
from paceline.strategies.pipeline.engine import Line, PipelineEngine
from paceline.strategies.pipeline.ghosts import Region
from paceline.strategies.pipeline.holdings import Stages, gather_holdings
from paceline.strategies.pipeline.stage import Stage
from paceline.strategies.shape import ModelShape, sum_bytes
from paceline.strategies.zero import ZERO2, ZERO3, Sharded, reshard, shard_problems

INNER: dict[str, Sharded] = {"zero2": ZERO2, "zero3": ZERO3}


class Pipeline:
    def problems(self, config: RunConfig, env: Env, model: ModelShape) -> list[Finding]:
        return list(_problems(config, model))

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Of the blocks that a rank holds: `model` is only they."""
        if config.strategy.inner not in INNER:
            return DDP.estimate(model, config, share)
        # Until a pass has ended a rank has whole gradients of its stages, and, after the first
        # backward, whole weights.
        whole = _with_strategy(config, reshard_after_forward=False, accumulate="defer")
        share = replace(share, num_microbatches=max(2, share.num_microbatches))
        return INNER[config.strategy.inner].estimate(model, whole, share)

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        if config.strategy.inner in INNER:
            each_pass = _with_strategy(config, accumulate="reduce")
            return INNER[config.strategy.inner].exchange(model, each_pass, share)
        is_copied = config.strategy.schedule == "dualpipe"
        shared = sum_bytes(p for p in model.trainable if is_copied or len(p.places) > 1)
        among = sum_bytes(model.trainable) if share.size > 1 else 0
        reasons = [
            f"{shared:,} bytes of weights that several stages hold" if shared else "",
            f"{among:,} bytes among the {share.size} ranks with the same stages" if among else "",
        ]
        told = " and ".join(reason for reason in reasons if reason)
        because = f"summed once a step: {told}" if told else "no other rank has these stages"
        return Exchange(plain=shared + among, sent=shared + among, because=because)

    def build(self, parts: EngineParts) -> Engine:
        config, plan = parts.config, parts.plan.pipeline
        assert plan is not None, "the plan has a pipeline"
        timeout_s = config.launch.collective_timeout_s
        mesh = build_mesh(parts.plan, parts.device, timeout_s)
        schedule = draw_schedule(
            plan.schedule, plan.num_ranks, plan.num_microbatches, plan.stages_per_rank
        )
        here = mesh.get_local_rank("pp")
        inner = INNER.get(config.strategy.inner)
        stages = Stages()
        for homes in schedule.homes:
            for index in [number for number, home in enumerate(homes) if home == here]:
                stages.append(_build_stage(parts, plan, index, mesh["dp"]))
        if inner is None:
            stages.tie()
        optimizer = build_optimizer(
            stages.parameters(), config.optim, parts.plan.fused_optimizer.value
        )
        timeout = timedelta(seconds=timeout_s)
        line = Line(
            schedule,
            stages,
            mesh,
            gather_holdings(stages, mesh, timeout),
            _make_lanes(mesh, timeout) if schedule.num_copies > 1 else {},
            is_sharded=inner is not None,
        )
        wrapping = Wrapping(stages, settle=(lambda: reshard(stages)) if inner else lambda: None)
        return PipelineEngine(parts, optimizer, line, wrapping)


def _build_stage(parts: EngineParts, plan: PipelinePlan, index: int, mesh: DeviceMesh) -> Stage:
    held = range(plan.stages[index].first_block, plan.stages[index].end_block)
    inner = INNER.get(parts.config.strategy.inner)
    region = Region()
    made: list[Stage] = []

    def cut(model: nn.Module) -> None:
        cut_model(model, held, region, parts.device)
        made.append(Stage(parts, model, region, index, len(plan.stages)))

    def shard(objective: Objective) -> None:
        if inner is None:
            return
        if parts.config.strategy.schedule in SPLIT_BACKWARDS:
            # The backward of the weights looks for those that the forward has used: once freed,
            # their pieces stand in their place, and get no gradient.
            kept = _with_strategy(parts.config, reshard_after_forward=False)
            inner.shard(made[0], replace(parts, config=kept), mesh)
        else:
            inner.shard(made[0], parts, mesh)

    model = compose(parts, shard, cut=cut).model
    if held.start > 0:
        enter_at(find_blocks(model)[0], region)
    return made[0]


def _with_strategy(config: RunConfig, **changes: object) -> RunConfig:
    strategy = config.strategy.model_copy(update=changes)
    return config.model_copy(update={"strategy": strategy})


def _make_lanes(mesh: DeviceMesh, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """All ranks make the groups of all pipelines, in one order; each keeps its own."""
    own = {}
    for lane in LANES:
        for dp_rank in range(mesh.size(1)):
            members = mesh.mesh[:, dp_rank].tolist()
            group = dist.new_group(members, timeout=timeout)
            if dp_rank == mesh.get_local_rank("dp"):
                own[lane] = group
    return own


def _problems(config: RunConfig, model: ModelShape) -> Iterator[Finding]:
    strategy = config.strategy
    is_compiled = config.train.compile != "off"
    if is_compiled and strategy.schedule in SPLIT_BACKWARDS:
        yield _error(
            "train.compile",
            f"{strategy.schedule} runs the two halves of a backward apart, and a compiled"
            " block has only one",
            "set train.compile=off, or strategy.schedule=1f1b",
        )
    is_selective = config.train.activation_checkpointing == "selective"
    if is_selective and strategy.schedule in SPLIT_BACKWARDS:
        yield _error(
            "train.activation_checkpointing",
            f"{strategy.schedule} runs the two halves of a backward apart, and torch hands out"
            " what selective has kept only once",
            "set train.activation_checkpointing=full, or strategy.schedule=1f1b",
        )
    if is_compiled and config.train.compile_scope == "model":
        yield _error(
            "train.compile_scope",
            "a stage leaves the model's forward in its middle, which one graph cannot",
            "set train.compile_scope=blocks, or auto",
        )
    if any(len(p.places) > 1 and p.unit < model.num_blocks for p in model.parameters):
        yield _error(
            "strategy.name",
            "a weight inside a block is used outside of it too, and a stage takes or leaves a"
            " block as a whole",
            "share it from outside of the blocks, or use strategy.name=ddp",
        )
    elif any(len(p.places) > 1 for p in model.parameters):
        yield from _tied_findings(config)
    if strategy.schedule == "dualpipe":
        yield Finding(
            severity="note",
            where="strategy.schedule",
            what="dualpipe holds every parameter twice: rank r has stage r and stage P - 1 - r",
        )
    if strategy.inner in INNER:
        yield from shard_problems(strategy.inner, model)
        yield from _sharded_findings(config)


def _sharded_findings(config: RunConfig) -> Iterator[Finding]:
    strategy = config.strategy
    if strategy.offload:
        yield _error(
            "strategy.offload",
            "the stages of a pipeline are not offloaded",
            "set strategy.offload=false, or use more stages",
        )
    if strategy.schedule in SPLIT_BACKWARDS and strategy.reshard_after_forward is True:
        yield _error(
            "strategy.reshard_after_forward",
            f"{strategy.schedule} runs the two halves of a backward apart, and both need the"
            " weights that the forward has gathered",
            "set it to auto, or strategy.schedule=1f1b",
        )


def _tied_findings(config: RunConfig) -> Iterator[Finding]:
    if config.strategy.inner in INNER:
        yield _error(
            "strategy.inner",
            "the model's first and last stage read the same weights, and sharded stages cannot"
            " share them",
            "set strategy.inner=ddp, or untie them (model.tied=false)",
        )
    else:
        yield Finding(
            severity="note",
            where="strategy.name",
            what="tied weights are held by each stage that reads them, and their gradients summed",
        )


def _error(where: str, what: str, hint: str) -> Finding:
    return Finding(severity="error", where=where, what=what, hint=hint)


PIPELINE = Pipeline()
