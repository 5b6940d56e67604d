"""Activation checkpointing: blocks whose activations are computed again in backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from paceline.strategies.batchnorm import has_statistics, untracked

# What `selective` keeps: the products that cost most to repeat. All else is cheap to redo.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


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
    """Recomputed, BatchNorm would count each microbatch twice. A compiled graph writes a buffer
    once as it is, and has no room for a context of ours."""
    contexts = partial(_contexts, block, options.get("context_fn", noop_context_fn))
    compiled = _checkpointed(block.forward, options)
    eager = _checkpointed(block.forward, options | {"context_fn": contexts})

    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if is_compiling() else eager(*args, **kwargs)

    return run


def _contexts(block: nn.Module, inner: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of the forward pass and of the one that repeats it."""
    first, again = inner()

    @contextmanager
    def repeated() -> Iterator[None]:
        with untracked(block), again:  # its copies are no part of what is repeated
            yield

    return first, repeated()


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
