"""Gradients summed and weights gathered through symmetric memory: every rank maps the others'
buffers and reads them itself, over NVLink, instead of calling a collective of NCCL.

A collective starts, agrees and copies through buffers of its own; for small gradients that is most
of its time. Here a rank writes its part into its buffer, meets the others at a barrier on the
device, and reads theirs. One shot, for small tensors: every rank reads everything. Two shots:
every rank sums its share and the shares are gathered: each number crosses the links twice, whatever
the number of ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule

ONE_SHOT_BYTES = 2**18  # under it the latency of a second shot costs more than reading all twice
ALIGNMENT = 128  # bytes that the two-shot kernel takes at a time, for each rank


class Exchange:
    """Buffers that all ranks of a group can read, one for each number type; they grow when more
    numbers are needed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name: Any = group.group_name
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = 0  # that went through it, for the audit
        self._buffers: dict[torch.dtype, tuple[Any, Tensor]] = {}

    def open(self, like: Tensor, numel: int) -> tuple[Any, Tensor]:
        """Return the handle, and this rank's buffer of `numel` numbers. A collective if the buffer
        has to grow, so all ranks must request the same sizes in the same order."""
        if like.dtype not in self._buffers or len(self._buffers[like.dtype][1]) < numel:
            whole = symm_mem.empty(numel, dtype=like.dtype, device=like.device)
            # The buffer and its signals are zeroed on the stream, before a peer may write to them.
            torch.cuda.synchronize(like.device)
            self._buffers[like.dtype] = symm_mem.rendezvous(whole, group=self.name), whole
        handle, whole = self._buffers[like.dtype]
        return handle, whole[:numel]

    def all_reduce(self, values: Tensor) -> None:
        """Sum `values` over the ranks, in place."""
        unit = ALIGNMENT * self.world // values.element_size()
        padded = -(-values.numel() // unit) * unit
        self.num_bytes += values.nbytes
        handle, mine = self.open(values, padded)
        mine[: values.numel()].copy_(values.view(-1))
        mine[values.numel() :].zero_()
        if values.nbytes <= ONE_SHOT_BYTES:
            total = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", self.name)
        else:
            total = torch.ops.symm_mem.two_shot_all_reduce_(mine, "sum", self.name)
        values.view(-1).copy_(total[: values.numel()])
        handle.barrier(channel=0)  # nobody writes the next one while another still reads

    def all_gather(self, output: Tensor, mine: Tensor) -> None:
        """Fill `output` with every rank's part, in their order."""
        self.num_bytes += mine.nbytes
        handle, buffer = self.open(mine, mine.numel())
        buffer.copy_(mine.view(-1))
        handle.barrier(channel=0)
        parts = output.view(self.world, -1)
        for shift in range(self.world):  # each begins with another: no two read one rank at once
            peer = (self.rank + shift) % self.world
            parts[peer].copy_(handle.get_buffer(peer, (mine.numel(),), mine.dtype))
        handle.barrier(channel=1)

    def reduce_scatter(self, output: Tensor, values: Tensor, divides: bool) -> None:
        """Sum this rank's share of all ranks' `values` into `output`, in the order of the ranks, so
        that the sum is the same wherever it is computed."""
        self.num_bytes += values.nbytes
        handle, buffer = self.open(values, values.numel())
        buffer.copy_(values.view(-1))
        handle.barrier(channel=0)
        each = output.numel()
        for peer in range(self.world):
            first = self.rank * each
            theirs = handle.get_buffer(peer, (each,), values.dtype, storage_offset=first)
            output.view(-1).copy_(theirs) if peer == 0 else output.view(-1).add_(theirs)
        if divides:
            output.div_(self.world)
        handle.barrier(channel=1)


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """How FSDP gathers weights, in the order of its own stream."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self.exchange.all_gather(output_tensor, input_tensor)


class Scatter(_Allocates):
    """How FSDP sums gradients."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.exchange.reduce_scatter(output_tensor, input_tensor, op == dist.ReduceOp.AVG)


def use_in_fsdp(module: nn.Module, group: dist.ProcessGroup) -> Exchange:
    """Make every unit below `module` exchange through symmetric memory. Gathers and sums run at the
    same time, on streams of their own, so each has buffers and barriers of its own."""
    gathers, sums = Exchange(group), Exchange(group)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(Gather(gathers))  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(Scatter(sums))  # type: ignore[arg-type]
    return gathers


def ddp_hook(exchange: Exchange, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of DDP's, and divide it."""
    gradients = bucket.buffer()
    exchange.all_reduce(gradients.div_(exchange.world))
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[gradients.device])
    done.set_result(gradients)
    return done
