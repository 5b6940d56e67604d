"""`strategy.name=pipeline`: what it cannot do, what it holds, how it is proven."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.config.schema import RunConfig
from paceline.records import Crew, Exchange, Finding, Plan, StateBytes
from paceline.schedules.orders import NAMES
from paceline.schedules.requirements import SPLIT_BACKWARDS
from paceline.strategies.base import (
    Case,
    Collective,
    Engine,
    EngineParts,
    Layout,
    Share,
    Strategy,
    Unread,
)
from paceline.strategies.ddp import DDP
from paceline.strategies.pipeline.plan import (
    PipelineSettings,
    choose_pipeline,
    ranks_of_pipeline,
)
from paceline.strategies.shape import ModelShape, sum_bytes
from paceline.strategies.zero import ZERO2, ZERO3, Gathering, Sharded, shard_problems, wire

INNER: dict[str, Sharded] = {"zero2": ZERO2, "zero3": ZERO3}


class Pipeline(Strategy):
    name = "pipeline"
    summary = "one process a stage of the model, microbatches sent from stage to stage"
    Settings = PipelineSettings
    syncs_batchnorm = False
    no_symmetric = "the stages of a pipeline are gathered by collectives"

    def problems(self, config: RunConfig, crew: Crew, model: ModelShape) -> list[Finding]:
        return list(_problems(config, model))

    def lay_out(self, config: RunConfig, crew: Crew, model: ModelShape) -> Layout:
        """Lay stages across, and ranks with the same stages inside, because they exchange more."""
        world = crew.world_size
        pipeline, problems = choose_pipeline(config, world, model)
        if pipeline is None:
            return Layout({"dp": world}, world, problems=tuple(problems))
        dp = world // pipeline.num_ranks
        return Layout({"pp": pipeline.num_ranks, "dp": dp}, dp, pipeline)

    def unread(self, config: RunConfig, plan: Plan) -> Iterator[Unread]:
        if plan.batch.dp == 1:
            yield Unread(("inner",), "one pipeline has all ranks")
        if self.shards(config):
            yield Unread(("bucket_mb",), f"strategy.inner is {_inner(config)}")
        else:
            keys = tuple(set(Gathering.model_fields) - {"name"})
            yield Unread(keys, f"strategy.inner is {_inner(config)}")

    def shards(self, config: RunConfig) -> bool:
        return _inner(config) in INNER

    def updates_on_host(self, config: RunConfig) -> bool:
        return self.shards(config) and Gathering.of(config).offload

    def collectives(self, config: RunConfig, plan: Plan) -> list[Collective]:
        return wire(plan) if self.shards(config) else []

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Estimate one rank; `model` has only the blocks of this rank."""
        if not self.shards(config):
            return DDP.estimate(model, config, share)
        # Until a pass has ended a rank has whole gradients of its stages, and, after the first
        # backward, whole weights.
        whole = with_settings(config, reshard_after_forward=False, accumulate="defer")
        share = replace(share, num_microbatches=max(2, share.num_microbatches))
        return INNER[_inner(config)].estimate(model, whole, share)

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        if self.shards(config):
            each_pass = with_settings(config, accumulate="reduce")
            return INNER[_inner(config)].exchange(model, each_pass, share)
        is_copied = PipelineSettings.of(config).schedule == "dualpipe"
        shared = sum_bytes(p for p in model.trainable if is_copied or len(p.places) > 1)
        among = sum_bytes(model.trainable) if share.size > 1 else 0
        reasons = [
            f"{shared:,} bytes of weights that several stages hold" if shared else "",
            f"{among:,} bytes among the {share.size} ranks with the same stages" if among else "",
        ]
        told = " and ".join(reason for reason in reasons if reason)
        because = f"summed once per step: {told}" if told else "no other rank has these stages"
        return Exchange(plain=shared + among, sent=shared + among, because=because)

    def cases(self, config: RunConfig, world: int, micro: int) -> list[Case]:
        """Return one case for each schedule, on a model that can be cut into two stages per rank,
        unevenly."""
        found = []
        for schedule in NAMES:
            asked = with_settings(config, schedule=schedule)
            # One pass takes what as many ranks with replicas take in one; sample by sample, which
            # is at least twice as many microbatches as ranks.
            size = micro * ranks_of_pipeline(asked, world)
            batch = (f"train.micro_batch_size={size}", f"strategy.microbatches={size}")
            chosen = {"strategy.schedule": schedule}
            found.append(Case(f"{self.name}_{schedule}", chosen, batch, num_blocks=2 * world + 1))
        return found

    def build(self, parts: EngineParts) -> Engine:
        from paceline.strategies.pipeline.build import build_pipeline

        return build_pipeline(parts, INNER.get(_inner(parts.config)))


def _inner(config: RunConfig) -> str:
    return PipelineSettings.of(config).inner


def with_settings(config: RunConfig, **changes: object) -> RunConfig:
    """Return `config` with other keys of `strategy`."""
    strategy = config.strategy.model_copy(update=changes)
    return config.model_copy(update={"strategy": strategy})


def _problems(config: RunConfig, model: ModelShape) -> Iterator[Finding]:
    settings = PipelineSettings.of(config)
    is_compiled = config.train.compile != "off"
    if is_compiled and settings.schedule in SPLIT_BACKWARDS:
        yield Finding.error(
            "train.compile",
            f"{settings.schedule} runs the two halves of a backward apart, and a compiled"
            " block has only one",
            "set train.compile=off, or strategy.schedule=1f1b",
        )
    is_selective = config.train.activation_checkpointing == "selective"
    if is_selective and settings.schedule in SPLIT_BACKWARDS:
        yield Finding.error(
            "train.activation_checkpointing",
            f"{settings.schedule} runs the two halves of a backward apart, and torch hands out"
            " what selective has kept only once",
            "set train.activation_checkpointing=full, or strategy.schedule=1f1b",
        )
    if is_compiled and config.train.compile_scope == "model":
        yield Finding.error(
            "train.compile_scope",
            "a stage leaves the model's forward in its middle, which one graph cannot",
            "set train.compile_scope=blocks, or auto",
        )
    if any(len(p.places) > 1 and p.unit < model.num_blocks for p in model.parameters):
        yield Finding.error(
            "strategy.name",
            "a weight inside a block is used outside of it too, and a stage takes or leaves a"
            " block as a whole",
            "share it from outside of the blocks, or use strategy.name=ddp",
        )
    elif any(len(p.places) > 1 for p in model.parameters):
        yield from _tied_findings(config)
    if settings.schedule == "dualpipe":
        yield Finding.note(
            "strategy.schedule",
            "dualpipe holds every parameter twice: rank r has stage r and stage P - 1 - r",
        )
    if settings.inner in INNER:
        yield from shard_problems(settings.inner, model)
        yield from _sharded_findings(config)


def _sharded_findings(config: RunConfig) -> Iterator[Finding]:
    settings = PipelineSettings.of(config)
    if settings.offload:
        yield Finding.error(
            "strategy.offload",
            "the stages of a pipeline are not offloaded",
            "set strategy.offload=false, or use more stages",
        )
    if settings.schedule in SPLIT_BACKWARDS and settings.reshard_after_forward is True:
        yield Finding.error(
            "strategy.reshard_after_forward",
            f"{settings.schedule} runs the two halves of a backward apart, and both need the"
            " weights that the forward has gathered",
            "set it to auto, or strategy.schedule=1f1b",
        )


def _tied_findings(config: RunConfig) -> Iterator[Finding]:
    if PipelineSettings.of(config).inner in INNER:
        yield Finding.error(
            "strategy.inner",
            "the model's first and last stage read the same weights, and sharded stages cannot"
            " share them",
            "set strategy.inner=ddp, or untie them (model.tied=false)",
        )
    else:
        yield Finding.note(
            "strategy.name",
            "tied weights are held by each stage that reads them, and their gradients summed",
        )


PIPELINE = Pipeline()
