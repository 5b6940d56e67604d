"""Sharded training: optimizer state (zero1), and gradients and weights with it (zero2, zero3).

zero1 is DistributedDataParallel with an optimizer that deals its state out by whole parameters.
zero2 and zero3 are FSDP2; zero2 keeps the gathered weights from forward to backward. A hybrid
shards inside a node and replicates across nodes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from paceline.config.schema import RunConfig
from paceline.records import Env, Exchange, Finding, Proof, StateBytes
from paceline.strategies.base import Engine, EngineParts, Share
from paceline.strategies.blocks import find_blocks
from paceline.strategies.compose import compose
from paceline.strategies.ddp import ddp_problems, optimizer_bytes, wrap_ddp
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.hooks import plan_exchange
from paceline.strategies.mesh import build_mesh
from paceline.strategies.optim import build_optimizer, optimizer_kind, parameter_groups
from paceline.strategies.precision import COMPUTE_TYPES
from paceline.strategies.shape import ModelShape, ParameterShape, sum_bytes

REDUCE_BYTES = 4  # gradients are summed in fp32


class Zero1:
    """The state of each parameter lives on one rank, which updates it and sends it to all."""

    def problems(self, config: RunConfig, env: Env, model: ModelShape) -> list[Finding]:
        return ddp_problems(config, model)

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Whole parameters cannot be dealt out evenly: ranks differ by up to the largest one."""
        trainable = sum_bytes(model.trainable)
        hands = deal(model.trainable, share.size)
        own = max(hands, key=sum_bytes) if share.index is None else hands[share.index]
        return StateBytes(
            parameters=trainable + sum_bytes(model.frozen),
            gradients=trainable,
            optimizer=optimizer_bytes(config, sum_bytes(own), len(own)),
        )

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        return plan_exchange(model.trainable, config.strategy)

    def build(self, parts: EngineParts) -> Engine:
        objective = compose(parts)
        module = objective.model
        wrapping = wrap_ddp(parts, objective)
        optim = parts.config.optim
        kind, settings = optimizer_kind(optim, parts.plan.fused_optimizer.value)
        optimizer = ZeroRedundancyOptimizer(
            parameter_groups(module.parameters(), optim), optimizer_class=kind, **settings
        )
        return ModuleEngine(parts, module, optimizer, wrapping)


def deal(parameters: Sequence[ParameterShape], num_ranks: int) -> list[list[ParameterShape]]:
    """Who keeps the state of what, by the rule of torch's ZeroRedundancyOptimizer, so that the
    plan is right to the byte: group by group, the largest first, to the rank that has least."""
    hands: list[list[ParameterShape]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    matrices = [p for p in parameters if len(p.shape) >= 2]
    vectors = [p for p in parameters if len(p.shape) < 2]
    for group in (matrices, vectors):  # the groups of train/optim.py, in its order
        for parameter in sorted(group, key=lambda p: p.numel, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += parameter.numel
            hands[rank].append(parameter)
    return hands


@dataclass(frozen=True)
class Sharded:
    """FSDP2. `reshard`: free a block's gathered weights after its forward pass (zero3)."""

    reshard: bool

    def problems(self, config: RunConfig, env: Env, model: ModelShape) -> list[Finding]:
        return shard_problems(config.strategy.name, model)

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Weights and gradients are padded to equal pieces; the optimizer's state is not."""
        padded = sum(padded_numel(p, share.size) * p.itemsize for p in model.trainable)
        frozen = sum(padded_numel(p, share.size) * p.itemsize for p in model.frozen)
        own = sum(own_numel(p, share) * p.itemsize for p in model.trainable)
        waits = config.strategy.accumulate == "defer" and share.num_microbatches > 1
        return StateBytes(
            parameters=padded + frozen,
            gradients=padded,
            optimizer=optimizer_bytes(config, own, len(model.trainable)),
            gathered=self._gathered(model, config, share),
            deferred=sum(p.numel for p in model.trainable) * REDUCE_BYTES if waits else 0,
        )

    def _gathered(self, model: ModelShape, config: RunConfig, share: Share) -> int:
        """The rest of the model all the time; of the blocks all, or this one and the next."""
        *blocks, rest = _gathered_numels(model, share)
        if self._reshards(config):
            ahead = max(1, config.strategy.forward_prefetch, config.strategy.backward_prefetch)
            blocks = sorted(blocks, reverse=True)[: 1 + ahead]
        return (rest + sum(blocks)) * share.compute_bytes

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        once = sum(padded_numel(p, share.size) * share.size for p in model.trainable) * REDUCE_BYTES
        if config.strategy.accumulate == "defer" or share.num_microbatches == 1:
            return Exchange(plain=once, sent=once, because="scattered once a step, in fp32")
        total = once * share.num_microbatches
        because = f"scattered for each of {share.num_microbatches} microbatches, in fp32"
        return Exchange(plain=total, sent=total, because=because)

    def build(self, parts: EngineParts) -> Engine:
        timeout_s = parts.config.launch.collective_timeout_s
        mesh = build_mesh(parts.plan, parts.device, timeout_s)
        rest = torch.device("cpu") if _offloads(parts) else None
        objective = compose(parts, lambda root: self.shard(root, parts, mesh), rest)
        module = objective.model
        # Optimizer last: fully_shard replaces every parameter, an earlier one would step orphans.
        fused = parts.plan.fused_optimizer.value
        optimizer = build_optimizer(module.parameters(), parts.config.optim, fused)
        defers = parts.config.strategy.accumulate == "defer"
        wrapping = Wrapping(
            objective,
            unsynced=(lambda: _deferred(objective)) if defers else nullcontext,
            proofs=lambda: _proofs(objective),
            settle=lambda: reshard(objective),
            shards=mesh.get_group(mesh.ndim - 1),
        )
        return ModuleEngine(parts, module, optimizer, wrapping)

    def _reshards(self, config: RunConfig) -> bool:
        asked = config.strategy.reshard_after_forward
        return self.reshard if asked == "auto" else asked

    def shard(self, root: nn.Module, parts: EngineParts, mesh: DeviceMesh) -> None:
        """Cut up the weights below `root`, whose forward pass begins and ends a microbatch's."""
        strategy = parts.config.strategy
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._reshards(parts.config),
            "mp_policy": _precision_policy(parts.plan.precision.value),
        }
        if _offloads(parts):
            settings["offload_policy"] = CPUOffloadPolicy()
        # Blocks before the root: what is left over, embeddings and head, is the root's own.
        blocks = find_blocks(root)
        for block in blocks:
            fully_shard(block, **settings)
        # The root's weights are needed first in backward: freeing them would gather them again. It
        # is given the batch: what of it meets no weight, such as targets, must not be rounded.
        policy = replace(settings["mp_policy"], cast_forward_inputs=False)
        own = {"reshard_after_forward": False, "mp_policy": policy}
        fully_shard(root, **(settings | own))
        _prefetch(blocks, strategy.forward_prefetch, strategy.backward_prefetch)


def shard_problems(name: str, model: ModelShape) -> list[Finding]:
    """What stands against cutting up every weight, for strategy `name`."""
    found = []
    if not all(parameter.shape for parameter in model.parameters):
        found.append(
            Finding(
                severity="error",
                where="strategy.name",
                what=f"{name} cuts every parameter along its first axis, and"
                " the model has one without any",
                hint="give it the shape (1,), or use strategy.name=zero1",
            )
        )
    if model.shares_across_units:
        found.append(
            Finding(
                severity="error",
                where="strategy.name",
                what=f"{name} gathers blocks one by one, and two of the"
                " model's blocks share a parameter",
                hint="share it from outside of the blocks, or use strategy.name=zero1",
            )
        )
    if model.num_units == 1:
        found.append(
            Finding(
                severity="warning",
                where="strategy.name",
                what="the model has no blocks: all its weights are gathered at once",
                hint="put its repeated layers into an nn.ModuleList, and call each of them",
            )
        )
    return found


def _offloads(parts: EngineParts) -> bool:
    return parts.config.strategy.offload and parts.device.type != "cpu"


def padded_numel(parameter: ParameterShape, size: int) -> int:
    """Elements of one rank's piece: whole rows of the first axis, the same number on each rank."""
    rows, width = _rows_and_width(parameter)
    return -(-rows // size) * width


def own_numel(parameter: ParameterShape, share: Share) -> int:
    """The piece without its padding: the last ranks may have fewer rows, or none."""
    rows, width = _rows_and_width(parameter)
    each = -(-rows // share.size)
    before = 0 if share.index is None else share.index * each  # the first has most
    return max(0, min(each, rows - before)) * width


def _rows_and_width(parameter: ParameterShape) -> tuple[int, int]:
    return (*parameter.shape, 1)[0], prod(parameter.shape[1:])


def _gathered_numels(model: ModelShape, share: Share) -> list[int]:
    numels = [0] * model.num_units
    for parameter in model.parameters:
        numels[parameter.unit] += padded_numel(parameter, share.size) * share.size
    return numels


def _precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Weights are gathered in the compute type; gradients are summed in fp32."""
    compute = None if precision == "fp32" else COMPUTE_TYPES[precision]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _prefetch(blocks: Sequence[nn.Module], num_forward: int, num_backward: int) -> None:
    """Gather the next blocks while this one computes, in each direction."""
    for number, block in enumerate(blocks):
        assert isinstance(block, FSDPModule), "fully_shard has been applied"
        if num_forward:
            block.set_modules_to_forward_prefetch(_fsdp(blocks[number + 1 :][:num_forward]))
        if num_backward:
            block.set_modules_to_backward_prefetch(_fsdp(blocks[:number][::-1][:num_backward]))


def _fsdp(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


@contextmanager
def _deferred(module: nn.Module) -> Iterator[None]:
    """Whole gradients stay here until the last microbatch; without it each one's are scattered."""
    assert isinstance(module, FSDPModule), "fully_shard has been applied"
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def reshard(module: nn.Module) -> None:
    """Backward would have done it."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _proofs(module: nn.Module) -> list[Proof]:
    """How many units FSDP really made: one a block, and the rest of the model."""
    made = sum(isinstance(part, FSDPModule) for part in module.modules())
    blocks = len(find_blocks(module))
    return [
        Proof(
            what="FSDP units",
            requested=f"{blocks} blocks and the rest",
            effective=f"{made} units",
            proof="modules that fully_shard changed",
            ok=made == blocks + 1,
        )
    ]


ZERO1 = Zero1()
ZERO2 = Sharded(reshard=False)
ZERO3 = Sharded(reshard=True)
