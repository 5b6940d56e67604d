"""Whole values from the pieces that ranks hold, by plain collectives.

DTensor's own `full_tensor` runs on functional collectives, which crash over gloo with CUDA tensors
(torch 2.11), and its norm of many tensors costs a dispatch for each of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import get_total_norm


def plain(value: Tensor) -> Tensor:
    """Return the plain tensor inside a weight that torchao gathers in fp8; others as they are."""
    inner = getattr(value, "_tensor", None)
    return inner if isinstance(inner, Tensor) else value


def whole(value: Any) -> Any:
    """Return the whole of a sharded tensor, on every rank; anything else as it is. A collective."""
    if not isinstance(value, DTensor):
        return value
    axis = next(number for number, at in enumerate(value.placements) if isinstance(at, Shard))
    group = value.device_mesh.get_group(axis)
    rows = -(-value.shape[0] // dist.get_world_size(group))
    part = plain(value.to_local()).detach()
    padded = part.new_zeros((rows, *value.shape[1:]), device=value.device_mesh.device_type)
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: value.shape[0]].to(part.device)


def first_row(value: Tensor) -> int:
    """Return where this rank's part begins in the whole tensor."""
    if not isinstance(value, DTensor) or not value.shape:
        return 0
    _, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return int(offset[0])


def cut_like(value: Tensor, rows: Tensor) -> Tensor:
    """Return a tensor that is sharded like `value`, of which this rank has `rows`."""
    if not isinstance(value, DTensor):
        return rows
    return DTensor.from_local(
        rows, value.device_mesh, value.placements,
        run_check=False, shape=value.shape, stride=value.stride(),
    )  # fmt: skip


def cut_rows_like(value: Tensor, rows: Tensor) -> Tensor:
    """Return a tensor with as many rows as `value`, sharded over ranks like those, of which this
    rank has `rows`; they may have another width."""
    if not isinstance(value, DTensor):
        return rows
    shape = torch.Size((value.shape[0], *rows.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
    )


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's pieces of tensors, sharded or not."""
    return [plain(t.to_local() if isinstance(t, DTensor) else t) for t in tensors]


def global_norm(
    gradients: Sequence[Tensor], device: torch.device, shards: dist.ProcessGroup | None
) -> Tensor:
    """Return the norm over all parameters, on `device`; `shards` are the ranks with the other
    pieces."""
    norm = get_total_norm(locals_of(gradients), foreach=True).to(device)
    if shards is None:
        return norm
    square = norm.double().square()  # in fp32 the square of a large norm is inf
    dist.all_reduce(square, group=shards)
    return square.sqrt().float()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory behind the tensors, padding included, each piece once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in locals_of(tensors)}
    return sum(storage.nbytes() for storage in storages.values())
