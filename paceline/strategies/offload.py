"""Activations on the host between forward and backward: each block's saved tensors go to pinned
memory while the next block computes, and come back while the one behind it does.

Copies run on two streams of their own. When backward asks for the first tensor of a block, those of
the block before it start to come back too, so that only the last block's are waited for. A tensor
that autograd saves twice is sent once. Weights and small tensors stay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.records import Proof
from paceline.records.words import size
from paceline.strategies.base import EngineParts

MIN_BYTES = 2**20
Strides = tuple[int, ...]
Shapes = set[tuple[int, ...]]
# Autograd's names for the operations through which a weight reaches a product.
AS_IT_COMES = ("AccumulateGrad", "TBackward0", "TransposeBackward0", "ToCopyBackward0")


def is_offloading(parts: EngineParts) -> bool:
    """Say whether activations leave the device: on a CPU they are on the host already."""
    return parts.config.train.activation_offload and parts.device.type != "cpu"


def offload_proofs(model: nn.Module) -> list[Proof]:
    """Show what blocks have really sent: a model without blocks, or whose tensors are all small,
    sends nothing."""
    wrapped = [part for part in model.modules() if hasattr(part, "offloader")]
    offloaders: set[Any] = {part.offloader for part in wrapped}  # a pipeline has one for each stage
    sent = sum(offloader.num_bytes for offloader in offloaders)
    return [
        Proof(
            what="activation offload",
            requested="what blocks save, on the host",
            effective=f"{sent:,} bytes of {len(wrapped)} blocks sent so far",
            proof=f"counted where tensors are sent, those of {size(MIN_BYTES)} or more",
            ok=sent > 0,
        )
    ]


class Parked:
    """A tensor on the host. `back` is its copy on the device once that was requested; the strides
    are those that it must have there."""

    def __init__(self, host: Tensor, strides: Strides, block: int) -> None:
        self.host, self.strides, self.block = host, strides, block
        self.sent: Any = None
        self.back: Tensor | None = None
        self.returned: Any = None


class Offloader:
    """Sends what blocks save. One for all blocks of a model, in the order of their forward."""

    def __init__(self, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self.device, self.min_bytes = device, min_bytes
        self.is_async = device.type == "cuda"
        self.out: Any = torch.cuda.Stream(device) if self.is_async else None
        self.into: Any = torch.cuda.Stream(device) if self.is_async else None
        self.parked: dict[int, list[Parked]] = {}
        self.num_bytes = 0  # sent so far, for the audit

    def wrap(self, block: nn.Module, number: int) -> None:
        """Make `block` save on the host, whether its forward is compiled or not."""
        block.offloader = self  # type: ignore[assignment]  # for the proof
        if block._compiled_call_impl is not None:
            # Outside of the graph: the compiler's own saved tensors pass through the hooks too.
            # They have no history: what looks like a weight is taken for a cast of one.
            shapes = {tuple(p.shape) for p in block.parameters()}
            weights = shapes | {shape[::-1] for shape in shapes}
            block._compiled_call_impl = self._saving(block._compiled_call_impl, number, weights)
        else:
            block.forward = self._saving(block.forward, number, None)

    def _saving(
        self, forward: Callable[..., Any], number: int, weights: Shapes | None
    ) -> Callable[..., Any]:
        """Return `forward` so that all it saves is sent to the host. `weights` are the shapes that
        count as weights in a graph; None: it is not a graph."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.parked[number] = []
            like_weights = weights and _without(weights, args, kwargs)
            # By the storage and not by its address: that is another's once the tensor is gone. A
            # weak reference keeps no memory, but no later storage can be equal to it.
            seen: dict[Any, Parked] = {}

            def pack(value: Tensor) -> Tensor | Parked:
                if self._stays(value, like_weights):
                    return value
                storage = StorageWeakRef(value.untyped_storage())
                view = (value.storage_offset(), value.shape, value.stride(), value.dtype)
                key = (storage, view, value._version)
                if key not in seen:
                    # A graph is compiled for the strides that it has seen; others ask for none.
                    strides = None if weights is None else value.stride()
                    seen[key] = self._send(value, strides, number)
                    self.parked[number].append(seen[key])
                return seen[key]

            # Where only parts of a block are compiled, the hook would be another of them.
            hook = pack if weights is None else torch.compiler.disable(pack)
            with saved_tensors_hooks(hook, self._unpack):
                return forward(*args, **kwargs)

        return run

    def _stays(self, value: Tensor, weights: Shapes | None) -> bool:
        if value.device.type != self.device.type or value.nbytes < self.min_bytes:
            return True
        sizes = zip(value.shape, value.stride(), strict=True)
        if any(stride == 0 and length > 1 for length, stride in sizes):
            return True  # expanded: it holds less than it seems to
        # A cast of a weight is made once for all microbatches: it is no activation.
        return _is_weight(value) or (weights is not None and tuple(value.shape) in weights)

    def _send(self, value: Tensor, strides: Strides | None, number: int) -> Parked:
        self.num_bytes += value.nbytes
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.is_async)
        kept = Parked(host, host.stride() if strides is None else strides, number)
        if not self.is_async:
            host.copy_(value)
            return kept
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            host.copy_(value, non_blocking=True)
        value.record_stream(self.out)  # its memory is free for others only after the copy
        kept.sent = self.out.record_event()
        return kept

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        self.parked.pop(kept.block, None)  # the last block's, which were not requested ahead
        # Those before it, while this block computes: backward goes from the last to the first.
        for earlier in self.parked.pop(kept.block - 1, ()):
            self._fetch(earlier)
        if self.is_async:
            torch.cuda.current_stream(self.device).wait_event(kept.returned)
            kept.back.record_stream(torch.cuda.current_stream(self.device))
        return kept.back

    def _fetch(self, kept: Parked) -> None:
        if kept.back is not None:
            return
        if not self.is_async:
            kept.back = self._room_for(kept).copy_(kept.host)
            return
        with torch.cuda.stream(self.into):
            self.into.wait_event(kept.sent)
            kept.back = self._room_for(kept).copy_(kept.host, non_blocking=True)
        kept.returned = self.into.record_event()

    def _room_for(self, kept: Parked) -> Tensor:
        host = kept.host
        return torch.empty_strided(host.shape, kept.strides, dtype=host.dtype, device=self.device)


def _without(weights: Shapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Leave out shapes that activations have too: there may be as many tokens as a weight has rows,
    or columns, as fp8 keeps them transposed. A weight that is sent needlessly costs time; an
    activation that stays costs the memory that offloading should save."""
    given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1)
    rows = {x.numel() // x.shape[-1] for x in given if x.numel()}
    return {shape for shape in weights if not rows & set(shape)}


def _is_weight(value: Tensor) -> bool:
    """Say whether it is a weight, transposed or cast: by where it comes from, not by its shape,
    which activations have too if there are as many tokens as the model is wide."""
    if isinstance(value, nn.Parameter):
        return True
    node = value.grad_fn
    while node is not None and node.name().split("::")[-1] in AS_IT_COMES:
        if not node.next_functions:
            return True
        node = node.next_functions[0][0]
    return False
