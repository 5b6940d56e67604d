"""Sharded training: optimizer state (zero1), and gradients and weights with it (zero2, zero3).

zero1 is DistributedDataParallel with an optimizer that deals its state out by whole parameters.
zero2 and zero3 are FSDP2; zero2 keeps the gathered weights from forward to backward. A hybrid
shards inside a node and replicates across nodes. `fsdp.py` builds what is planned here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Literal

from pydantic import Field

from paceline.config.schema import RunConfig, StrategyConfig
from paceline.config.section import Count, Positive
from paceline.config.training import OptimConfig
from paceline.records import Crew, Exchange, Finding, Plan, StateBytes
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
from paceline.strategies.ddp import Exchanging, Replicated
from paceline.strategies.optimizers import ema_bytes, optimizer_bytes, split_groups
from paceline.strategies.shape import ModelShape, ParameterShape, sum_bytes

REDUCE_BYTES = 4  # gradients are summed in fp32


class Offloading(StrategyConfig):
    offload: bool = Field(
        False,
        description="Keep state on the CPU: FSDP weights, gradients and optimizer; DeepSpeed its"
        " optimizer.",
    )


class Gathering(Offloading, Exchanging):
    """The keys that every use of FSDP2 reads, including a pipeline's stages."""

    reshard_after_forward: Literal["auto"] | bool = Field(
        "auto", description="Free gathered weights after forward. auto: zero3 does."
    )
    forward_prefetch: Literal["auto"] | Count = Field(
        "auto",
        description="Blocks to gather ahead in forward; 0: torch's own order. auto: 1 where the"
        " link that `paceline check` has measured is slow for that.",
    )
    backward_prefetch: Literal["auto"] | Count = Field(
        "auto", description="Blocks to gather ahead in backward; as forward_prefetch."
    )


class ShardedSettings(Gathering):
    accumulate: Literal["reduce", "defer"] = Field(
        "reduce",
        description="Exchange gradients after every microbatch, or keep whole ones until the last.",
    )


class HybridSettings(ShardedSettings):
    shard_size: Literal["auto"] | Positive = Field(
        "auto", description="Ranks that shard together. auto: those of one machine."
    )


class Zero1(Replicated):
    """The state of each parameter lives on one rank, which updates it and sends it to all."""

    name = "zero1"
    summary = "DDP with the optimizer's state dealt out by whole parameters"
    aliases = ()
    alone = ""
    no_own_optimizer = "each rank builds the optimizer anew, for the parameters dealt to it"

    def zero_stage(self, config: RunConfig) -> int | None:
        return 1

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Estimate; whole parameters cannot be dealt out evenly: ranks differ by up to the largest
        one."""
        trainable = sum_bytes(model.trainable)
        hands = deal(model.trainable, share.size, config.optim)
        own = max(hands, key=sum_bytes) if share.index is None else hands[share.index]
        return StateBytes(
            parameters=trainable + sum_bytes(model.frozen),
            gradients=trainable,
            optimizer=optimizer_bytes(config, own) + ema_bytes(config, model.trainable),
        )

    def build(self, parts: EngineParts) -> Engine:
        from paceline.strategies.ddp_engine import build_zero1

        return build_zero1(parts)


def deal(
    parameters: Sequence[ParameterShape], num_ranks: int, optim: OptimConfig
) -> list[list[ParameterShape]]:
    """Deal the state out by the rule of torch's ZeroRedundancyOptimizer, so that the plan is right
    to the byte: group by group, the largest first, to the rank that has the least."""
    hands: list[list[ParameterShape]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for group in split_groups(parameters, optim):
        for parameter in sorted(group.members, key=lambda p: p.numel, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += parameter.numel
            hands[rank].append(parameter)
    return hands


class Sharded(Strategy):
    """FSDP2. Stage 3 frees a block's gathered weights after its forward pass, stage 2 does not."""

    Settings = ShardedSettings
    fuses = True

    def __init__(self, stage: Literal[2, 3], aliases: tuple[str, ...] = ()) -> None:
        self.stage, self.aliases = stage, aliases
        self.name = f"zero{stage}"
        when = "block by block" if stage == 3 else "once per step"
        self.summary = f"FSDP2: everything sharded, weights gathered {when}"

    def problems(self, config: RunConfig, crew: Crew, model: ModelShape) -> list[Finding]:
        found = shard_problems(self.name, model)
        if self.fuses and crew.world_size > 1:
            found += _fused_problems(config, crew.world_size, model)
        if config.train.compile_scope == "model":
            found.append(
                Finding.error(
                    "train.compile_scope",
                    f"{self.name} gathers weights block by block, which one graph of the"
                    " whole model leaves no room for",
                    hint="set train.compile_scope=blocks, or auto",
                )
            )
        return found

    def unread(self, config: RunConfig, plan: Plan) -> Iterator[Unread]:
        if plan.batch.grad_accum == 1:
            yield Unread(("accumulate",), "a step has one microbatch")
        if plan.device.value == "cpu":
            yield Unread(("offload",), "the ranks are on CPU already")

    def shards(self, config: RunConfig) -> bool:
        return True

    def zero_stage(self, config: RunConfig) -> int | None:
        return self.stage

    def device_bytes(self, config: RunConfig, state: StateBytes) -> int:
        return state.peak - (state.total if Offloading.of(config).offload else 0)

    def updates_on_host(self, config: RunConfig) -> bool:
        return Offloading.of(config).offload

    def collectives(self, config: RunConfig, plan: Plan) -> list[Collective]:
        return wire(plan)

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Estimate; weights and gradients are padded to equal pieces, the optimizer's state is
        not."""
        padded = sum(padded_numel(p, share.size) * p.itemsize for p in model.trainable)
        frozen = sum(padded_numel(p, share.size) * p.itemsize for p in model.frozen)
        own = [own_piece(p, share) for p in model.trainable]
        waits = _defers(config) and share.num_microbatches > 1
        return StateBytes(
            parameters=padded + frozen,
            gradients=padded,
            optimizer=optimizer_bytes(config, own) + ema_bytes(config, own),
            gathered=self._gathered(model, config, share),
            deferred=sum(p.numel for p in model.trainable) * REDUCE_BYTES if waits else 0,
        )

    def _gathered(self, model: ModelShape, config: RunConfig, share: Share) -> int:
        """Return the bytes gathered at once: always the rest of the model, and either all blocks or
        the current one and the next."""
        *blocks, rest = _gathered_numels(model, share)
        if self.reshards(config):
            settings = Gathering.of(config)
            asked = (settings.forward_prefetch, settings.backward_prefetch)
            ahead = max([1, *(number for number in asked if number != "auto")])
            blocks = sorted(blocks, reverse=True)[: 1 + ahead]
        return (rest + sum(blocks)) * share.compute_bytes

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        once = sum(padded_numel(p, share.size) * share.size for p in model.trainable) * REDUCE_BYTES
        if _defers(config) or share.num_microbatches == 1:
            return Exchange(plain=once, sent=once, because="scattered once per step, in fp32")
        total = once * share.num_microbatches
        because = f"scattered for each of {share.num_microbatches} microbatches, in fp32"
        return Exchange(plain=total, sent=total, because=because)

    def reshards(self, config: RunConfig) -> bool:
        asked = Gathering.of(config).reshard_after_forward
        return self.stage == 3 if asked == "auto" else asked

    def build(self, parts: EngineParts) -> Engine:
        from paceline.strategies.fsdp import build_sharded

        return build_sharded(parts, self.reshards(parts.config))


class Hybrid(Sharded):
    """Copies across nodes, shards inside each."""

    Settings = HybridSettings
    fuses = False

    def __init__(self, stage: Literal[2, 3]) -> None:
        super().__init__(stage)
        self.whole = self.name
        self.name = f"{self.whole}_hybrid"
        self.summary = f"{self.whole} inside a node, copies across nodes"

    def lay_out(self, config: RunConfig, crew: Crew, model: ModelShape) -> Layout:
        world, size = crew.world_size, HybridSettings.of(config).shard_size
        size = crew.per_node if size == "auto" else size
        if size > world or world % size or size in (1, world):
            problem = Finding.error(
                "strategy.shard_size",
                f"a hybrid of {world} ranks in groups of {size} is not a grid of copies and shards",
                hint=self._hint(world),
            )
            return Layout({"replicate": 1, "shard": world}, world, problems=(problem,))
        return Layout({"replicate": world // size, "shard": size}, world)

    def _hint(self, world: int) -> str:
        fitting = [size for size in range(world // 2, 1, -1) if world % size == 0]
        if not fitting:
            return f"use {self.whole}: {world} ranks are no grid"
        return f"set strategy.shard_size={fitting[0]}"

    def cases(self, config: RunConfig, world: int, micro: int) -> list[Case]:
        few = "" if world >= 4 and world % 2 == 0 else "a hybrid needs 4 ranks or more, even"
        halves = (f"strategy.shard_size={world // 2}",)
        return [Case(self.name, defaults=halves, skipped=few, hint="launch.nproc=4")]


def wire(plan: Plan) -> list[Collective]:
    """Return what FSDP sends: weights gathered to compute with, gradients summed in fp32. Nothing
    if the last axis of the mesh has one rank, which holds every piece, or if ranks read each
    other's memory."""
    if list(plan.mesh.values())[-1] == 1 or plan.exchange_by.value in ("symmetric", "fused"):
        return []
    gathered: str = plan.precision.value
    if plan.fp8 is not None:
        # Weights in fp8 travel as bytes, with the norms beside them; the rest of the model as bf16.
        gathered = "uint8 and bf16" if plan.fp8.gathers_fp8 else "bf16"
    return [
        Collective("FSDP gather", "c10d::_allgather_base_", gathered),
        Collective("FSDP reduce", "c10d::_reduce_scatter_base_", "fp32"),
    ]


def shard_problems(name: str, model: ModelShape) -> list[Finding]:
    """Return the reasons why strategy `name` cannot shard every weight."""
    found = []
    if not all(parameter.shape for parameter in model.parameters):
        found.append(
            Finding.error(
                "strategy.name",
                f"{name} cuts every parameter along its first axis, but"
                " the model has one without axes",
                hint="give it the shape (1,), or use strategy.name=zero1",
            )
        )
    if model.shares_across_units:
        found.append(
            Finding.error(
                "strategy.name",
                f"{name} gathers blocks one by one, and two of the"
                " model's blocks share a parameter",
                hint="share it from outside of the blocks, or use strategy.name=zero1",
            )
        )
    if model.num_units == 1:
        found.append(
            Finding.warning(
                "strategy.name",
                "the model has no blocks: all its weights are gathered at once",
                hint="put its repeated layers into an nn.ModuleList, and call each of them",
            )
        )
    return found


def _fused_problems(config: RunConfig, world: int, model: ModelShape) -> Iterator[Finding]:
    """Yield the settings that products in parts cannot be combined with."""
    asked = ShardedSettings.of(config)
    if asked.exchange != "fused":
        return
    if asked.accumulate == "defer":
        yield _no_fused("gradients leave with each microbatch", "set strategy.accumulate=reduce")
    if asked.offload:
        yield _no_fused(
            "weights move between GPUs, not from the host", "set strategy.offload=false"
        )
    if config.precision.mode == "fp8":
        yield _no_fused("layers in fp8 gather their own weights", "set precision.mode=bf16")
    if config.train.compile in ("reduce-overhead", "max-autotune"):
        yield _no_fused("no CUDA graph can hold what moves beside it", "set train.compile=default")
    matrices = [p for p in model.parameters if len(p.shape) == 2 and p.unit < model.num_units - 1]
    if not any(p.shape[0] % world == 0 for p in matrices):
        yield Finding.warning(
            "strategy.exchange",
            f"fused was asked for; no matrix of a block has rows that {world} ranks can share"
            " evenly: FSDP gathers them all",
        )


def _no_fused(what: str, hint: str) -> Finding:
    return Finding.error(
        "strategy.exchange",
        f"fused was asked for; {what}",
        hint=f"{hint}, or another strategy.exchange",
    )


def _defers(config: RunConfig) -> bool:
    return ShardedSettings.of(config).accumulate == "defer"


def padded_numel(parameter: ParameterShape, size: int) -> int:
    """Return the elements of one rank's piece: whole rows of the first axis, the same number on
    each rank."""
    rows, width = _rows_and_width(parameter)
    return -(-rows // size) * width


def own_piece(parameter: ParameterShape, share: Share) -> ParameterShape:
    """Return the piece without its padding: the last ranks may have fewer rows, or none."""
    rows, _ = _rows_and_width(parameter)
    each = -(-rows // share.size)
    before = 0 if share.index is None else share.index * each  # the first has most
    return replace(parameter, shape=(max(0, min(each, rows - before)), *parameter.shape[1:]))


def _rows_and_width(parameter: ParameterShape) -> tuple[int, int]:
    return (*parameter.shape, 1)[0], prod(parameter.shape[1:])


def _gathered_numels(model: ModelShape, share: Share) -> list[int]:
    numels = [0] * model.num_units
    for parameter in model.parameters:
        numels[parameter.unit] += padded_numel(parameter, share.size) * share.size
    return numels


ZERO1 = Zero1()
ZERO2 = Sharded(2)
ZERO3 = Sharded(3, aliases=("fsdp",))
ZERO2_HYBRID = Hybrid(2)
ZERO3_HYBRID = Hybrid(3)
