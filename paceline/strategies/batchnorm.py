"""BatchNorm on several ranks: statistics of all their samples in one pass, and equal buffers.

By itself a BatchNorm normalises by the samples that one rank has in one microbatch. So its losses
depend on how a batch is split; with `strategy.sync_batchnorm` no longer on how ranks split it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.config.schema import RunConfig
from paceline.records import BatchSplit, Finding
from paceline.strategies.base import Strategy
from paceline.strategies.shape import ModelShape
from paceline.strategies.waits import Waits
from paceline.workloads.base import Waiting

KEY = "strategy.sync_batchnorm"


def batchnorm_findings(
    config: RunConfig, strategy: Strategy, batch: BatchSplit, model: ModelShape
) -> Iterator[Finding]:
    """Yield findings on BatchNorm, if it does not compute what one would expect."""
    by_number = batch.counts == "samples"  # else a microbatch is filled by length
    own, shared = (f"{n} " if by_number else "" for n in (batch.micro, batch.micro * batch.dp))
    is_synced, layers = config.strategy.sync_batchnorm, model.num_batchnorms
    if is_synced and (layers == 0 or batch.dp == 1):
        because = "one rank has nobody to share with" if layers else "the model has no BatchNorm"
        yield Finding.warning(KEY, f"is set but has no effect: {because}")
    elif is_synced and not strategy.syncs_batchnorm:
        yield Finding.error(
            KEY,
            f"with {strategy.name} ranks work on different microbatches at a time, and cannot"
            " stop to exchange statistics",
            hint="set it to false, or choose another strategy.name",
        )
    elif layers and batch.dp > 1 and not is_synced:
        yield Finding.warning(
            KEY,
            f"{layers} BatchNorm layers normalise by the {own}samples that each of"
            f" {batch.dp} ranks has in a microbatch, and validation uses the running statistics of"
            " rank 0: losses are not those of another number of ranks",
            hint="set strategy.sync_batchnorm=true: statistics of the"
            f" {shared}samples of all ranks",
        )
    elif layers and batch.grad_accum > 1 and by_number:
        yield Finding.note(
            "train.micro_batch_size",
            f"BatchNorm sees {batch.micro * batch.dp} samples at a time, not the"
            f" {batch.global_size} of a step: runs compare where micro_batch_size x ranks is equal",
        )


def sync_batchnorm(model: nn.Module, device: torch.device) -> None:
    """Let every BatchNorm use the statistics of all ranks, in place: torch's way on a GPU, ours on
    a CPU, for which torch has none. A layer stays an instance of its own class, for code that
    checks it, such as a workload's `init_weights`."""
    way = _SyncedOnCpu if device.type == "cpu" else nn.SyncBatchNorm
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            kind = type(module)
            module.__class__ = type(f"Synced{kind.__name__}", (way, kind), {"process_group": None})


def count_exchange(model: nn.Module, waits: Waits) -> None:
    """Count the exchange of statistics as waiting for other ranks, from now on."""
    for layer in model.modules():
        if isinstance(layer, _SyncedOnCpu):
            layer.waiting = waits.counted
        elif isinstance(layer, nn.SyncBatchNorm):
            # The whole layer, whose own work is small beside what it waits; not its backward pass.
            waits.around_forward(layer)


class _SyncedOnCpu(_BatchNorm):
    """Normalises by the statistics of all ranks. It is not a SyncBatchNorm: DDP refuses those on a
    CPU."""

    waiting: Waiting = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or dist.get_world_size() == 1:
            return super().forward(x)
        self._check_input_dim(x)
        axes = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = x.float()  # as torch does: sums of many numbers
        # Mean first, then the squares around it: the difference of two large sums loses digits.
        count = torch.tensor([x.numel() / x.shape[1]], device=x.device)
        total = _SumOverRanks.apply(torch.cat([wide.sum(axes), count]), self.waiting)
        num_samples = total[-1].detach()
        mean = total[:-1] / num_samples
        centred = wide - mean.view(shape)
        squares = _SumOverRanks.apply(centred.square().sum(axes), self.waiting)
        variance = squares / num_samples
        self._track(mean.detach(), variance.detach() * num_samples / (num_samples - 1))
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the mean of all batches so far
            share = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


class _SumOverRanks(torch.autograd.Function):
    """Sums over ranks. Every rank's loss depends on the sum, so its gradient is the sum of
    theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, waiting: Waiting) -> Tensor:
        ctx.waiting, total = waiting, value.clone()
        with waiting():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        with ctx.waiting():
            dist.all_reduce(total)
        return total, None


@contextmanager
def untracked(module: nn.Module) -> Iterator[None]:
    """While inside, running statistics of `module` are copies, which are then thrown away."""
    layers = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    own = [dict(layer._buffers) for layer in layers]
    for layer, buffers in zip(layers, own, strict=True):
        layer._buffers.update({k: b.clone() for k, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for layer, buffers in zip(layers, own, strict=True):
            layer._buffers.update(buffers)


def has_statistics(module: nn.Module) -> bool:
    return any(isinstance(m, _NormBase) and m.track_running_stats for m in module.modules())


class SharedBuffers:
    """What a forward pass may change and a checkpoint keeps, such as running statistics. After each
    step all ranks get rank 0's, so that every rank evaluates alike, and any of them may write the
    checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        kept = module.state_dict(keep_vars=True).values()
        unique = {id(v): v for v in kept if not isinstance(v, nn.Parameter)}
        self.by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        if dist.get_world_size() > 1:
            for value in unique.values():
                self.by_type[value.dtype].append(value)

    @torch.no_grad()
    def agree(self) -> None:
        for values in self.by_type.values():
            _broadcast(values)


def _broadcast(values: Sequence[Tensor]) -> None:
    flat = _flatten_dense_tensors(values)
    dist.broadcast(flat, src=0)
    for value, told in zip(values, _unflatten_dense_tensors(flat, values), strict=True):
        value.copy_(told)
