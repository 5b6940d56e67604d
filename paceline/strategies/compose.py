"""The order in which a model is put together, written once, each line with its reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from paceline.strategies.base import EngineParts
from paceline.strategies.batchnorm import has_statistics, sync_batchnorm, untracked
from paceline.strategies.blocks import KEPT_OPS, find_blocks, find_tail
from paceline.strategies.fp8 import convert_layers
from paceline.strategies.objective import Objective
from paceline.strategies.offload import Offloader, is_offloading
from paceline.strategies.optim import freeze
from paceline.strategies.weights import fill_weights
from paceline.workloads.meta import on_meta

# By name: they are there once their modules have been imported.
KEPT_OF_OURS = ("paceline.nsa.default", "paceline.fused_linear.default")


def compose(
    parts: EngineParts,
    shard: Callable[[Objective], None] | None = None,
    rest: torch.device | None = None,
    cut: Callable[[nn.Module], None] | None = None,
) -> Objective:
    """Return the workload's loss with its model on the device, the same on every rank. `cut`
    reduces the model to a stage, `shard` every weight to this rank's piece, both in place; `rest`
    is where pieces lie between steps, if not on the device."""
    model = build_model(parts)
    # Cut before all else: what another stage holds is not recomputed, compiled or filled here.
    if cut is not None:
        cut(model)
    # Then what the layers are, before anything takes hold of their forward.
    if parts.config.strategy.sync_batchnorm:
        sync_batchnorm(model, parts.device)
    if parts.plan.fp8 is not None:
        convert_layers(model, parts.plan, parts.device)
    blocks = find_blocks(model)
    # Recomputation first: compiled or sharded, a block's forward must already be the one that
    # forgets, so that the graph sees it, and weights are gathered once more for it.
    for number, block in enumerate(blocks or [model]):
        if (kind := parts.plan.recompute_of(number)) != "none":
            recompute_block(block, kind)
    # Then compile, before any wrapper: no hook is in a graph. Equal blocks share one.
    if parts.plan.compile.value != "off":
        by_blocks = parts.plan.compile_scope.value == "blocks" and bool(blocks)
        for part in [*blocks, *find_tail(model)] if by_blocks else [model]:
            compile_in_place(part, parts)
    # Around what is compiled: what a graph saves goes to the host by hooks that it must not see.
    if is_offloading(parts):
        offloader = Offloader(parts.device)
        for number, block in enumerate(blocks):
            offloader.wrap(block, number)
    # Then shard, while the weights have no memory yet: a rank never holds the whole model.
    objective = Objective(parts.workload, model)
    if shard is not None:
        shard(objective)
    # Values last, into what is left of them on this rank. Replicas start equal by their seed.
    if parts.workload.meta_init:
        initialise = partial(parts.workload.init_weights, model)
        fill_weights(model, initialise, parts.config.train.seed, parts.device, rest)
    return objective


def build_model(parts: EngineParts) -> nn.Module:
    """Build the model: on the meta device if the workload can fill it later; else with its values,
    equal on every rank."""
    torch.manual_seed(parts.config.train.seed)
    if parts.workload.meta_init:
        with on_meta():
            model = parts.workload.build_model(parts.config)
        freeze(model, parts.config.optim)
        return model
    with parts.device:
        model = parts.workload.build_model(parts.config).to(parts.device)
    freeze(model, parts.config.optim)
    # The seed makes replicas equal, unless the user's code draws from elsewhere: rank 0 decides.
    if dist.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
    return model


def compile_in_place(module: nn.Module, parts: EngineParts) -> None:
    mode = parts.plan.compile.value
    dynamic = {"auto": None, "off": False, "on": True}[parts.config.train.compile_dynamic]
    module.compile(mode=None if mode == "default" else mode, dynamic=dynamic)


def recompute_block(block: nn.Module, kind: str) -> None:
    """Make `block` forget its activations after forward. Its weights keep their names."""
    assert kind in ("full", "selective"), kind
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if has_statistics(block):
        block.forward = _tracking_once(block, options)
    else:
        block.forward = _checkpointed(block.forward, options)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _tracking_once(block: nn.Module, options: dict[str, Any]) -> Callable[..., Any]:
    """Let running statistics change once: recomputed, BatchNorm would count each microbatch twice.
    A compiled graph writes a buffer once as it is, and has no room for a context of ours."""
    contexts = partial(_contexts, block, options.get("context_fn", noop_context_fn))
    compiled = _checkpointed(block.forward, options)
    eager = _checkpointed(block.forward, options | {"context_fn": contexts})

    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if is_compiling() else eager(*args, **kwargs)

    return run


def _contexts(block: nn.Module, inner: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of the one that repeats it."""
    first, again = inner()

    @contextmanager
    def repeated() -> Iterator[None]:
        with untracked(block), again:  # its copies are no part of what is repeated
            yield

    return first, repeated()


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in KEPT_OPS or str(op) in KEPT_OF_OURS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
