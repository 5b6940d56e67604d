"""Which ranks hold which weights, gathered once, and the gradients that holders sum."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from paceline.checkpoint.pieces import named_tensors
from paceline.strategies.gather import locals_of
from paceline.strategies.pipeline.stage import Sent, Stage

MIB = 2**20


class Stages(nn.ModuleList):
    """The stages of one rank as one module, every weight under the model's own name. A weight that
    two of them read, because it is tied, is one object."""

    def models(self) -> list[nn.Module]:
        return [stage.model for stage in self if isinstance(stage, Stage)]

    def tie(self) -> None:
        """Make one object of a weight that several stages have."""
        first: dict[str, nn.Parameter] = {}
        for model in self.models():
            for name, parameter in list(model.named_parameters(remove_duplicate=False)):
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._parameters[leaf] = first.setdefault(name, parameter)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for model in self.models():
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        merged: dict[str, Any] = {}
        for model in self.models():
            merged |= {k: v for k, v in model.state_dict(**kwargs).items() if k not in merged}
        return merged

    def spread_buffers(self) -> None:
        """Copy buffers from the first stage that has one to the others: a checkpoint fills the
        first only."""
        first: dict[str, Tensor] = {}
        for model in self.models():
            for name, buffer in model.named_buffers():
                if first.setdefault(name, buffer) is not buffer:
                    buffer.copy_(first[name])


@dataclass(frozen=True)
class Holdings:
    """`tensors`: every one of the model. `kept`: tied ones by one of their names, as in a
    checkpoint. `holders[name]`: the ranks of the pipeline that have it. `sums`: the parameters that
    this rank has in common with others, by the group they sum in; `buffers` likewise."""

    here: int
    tensors: dict[str, Sent]
    kept: dict[str, tuple[int, ...]]
    holders: dict[str, tuple[int, ...]]
    sums: dict[dist.ProcessGroup, list[nn.Parameter]]
    counted: list[nn.Parameter]
    buffers: list[tuple[dist.ProcessGroup, Tensor]]

    def sum_copies(self) -> None:
        """Sum gradients over holders: each has seen some of the microbatches, or uses the weight
        elsewhere in the model."""
        for group, parameters in self.sums.items():
            all_reduce_gradients(parameters, group, bucket_mb=64.0)

    def spread_buffers(self) -> None:
        """Broadcast what a forward pass changes, such as BatchNorm's statistics: all get the first
        holder's, as in DistributedDataParallel."""
        for group, buffer in self.buffers:
            dist.broadcast(buffer, group_src=0, group=group)


def gather_holdings(stages: Stages, mesh: DeviceMesh, timeout: Any) -> Holdings:
    """Gather who holds what, and make the groups of holders. A collective."""
    group, dp_size = mesh.get_group("pp"), mesh.size(1)
    own = {name: Sent(value.shape, value.dtype) for name, value in stages.state_dict().items()}
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (own, [name for name, _ in named_tensors(stages)]), group=group)
    tensors = {name: sent for part, _ in told for name, sent in part.items()}
    kept = {name: tuple(tensors[name].shape) for _, names in told for name in names}
    holders = {
        name: tuple(rank for rank, (part, _) in enumerate(told) if name in part) for name in tensors
    }
    here, at = dist.get_rank(group), mesh.get_local_rank("dp")
    groups = {}
    for ranks in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
        for dp_rank in range(dp_size):
            members = [rank * dp_size + dp_rank for rank in ranks]
            made = dist.new_group(members, timeout=timeout)
            if dp_rank == at and here in ranks:
                groups[ranks] = made
    sums: dict[dist.ProcessGroup, list[nn.Parameter]] = defaultdict(list)
    counted = []
    # By name: holders sum in one order, whatever else they hold.
    for name, parameter in sorted(stages.named_parameters(), key=lambda item: item[0]):
        if not parameter.requires_grad:
            continue
        if len(holders[name]) > 1:
            sums[groups[holders[name]]].append(parameter)
        if holders[name][0] == here:
            counted.append(parameter)
    buffers = [
        (group, value)
        for name, value in sorted(stages.state_dict(keep_vars=True).items())
        if not isinstance(value, nn.Parameter)
        for group in (groups.get(holders[name]), mesh.get_group("dp") if dp_size > 1 else None)
        if group is not None
    ]
    return Holdings(here, tensors, kept, holders, dict(sums), counted, buffers)


def all_reduce_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_mb: float, divisor: int = 1
) -> None:
    """Sum over the group, and divide, bucket by bucket. A parameter that got no gradient here may
    have one elsewhere: it counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets(locals_of(p.grad for p in parameters if p.grad is not None), bucket_mb):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        if divisor > 1:
            flat /= divisor
        torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def _buckets(tensors: Sequence[Tensor], bucket_mb: float) -> Iterator[list[Tensor]]:
    """Yield buckets of one type each: they are laid into one tensor."""
    filling: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        filling[tensor.dtype].append(tensor)
        sizes[tensor.dtype] += tensor.numel() * tensor.element_size()
        if sizes.get(tensor.dtype, 0) >= bucket_mb * MIB:
            yield filling.pop(tensor.dtype)
            del sizes[tensor.dtype]
    yield from filling.values()
