"""zero2 and zero3 whose products do not wait for whole weights: `strategy.exchange=fused`.

FSDP gathers all weights of a block and then computes with them. Here a matrix of a block is sent in
the parts that ranks hold, beside the products that need them:

    forward    y[:, p] = x @ W[p].T     for each part p as it arrives, this rank's own first
    backward   dW[p] = g[:, p].T @ x    for each part, which leaves for its owner at once, while
                                        the parts of W arrive for dx = g @ W

The data is the same that FSDP moves: weights in the compute type, gradients summed in fp32. Parts
move through symmetric memory if NVLink joins the ranks, on a stream of their own, so that copy
engines work beside the products; otherwise as one broadcast and one reduction for each part.
Norms, biases and everything outside of blocks stay with FSDP.

Shape letters: N rows, F columns of the result and rows of the weight, D columns of both.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.records import Proof
from paceline.strategies.blocks import find_blocks


class Mover(Protocol):
    """How the parts of a matrix reach the other ranks. All ranks call it in the same order."""

    rank: int
    world: int
    num_bytes: int  # that it has moved, for the audit

    def gather(self, mine_fD: Tensor) -> "Arriving":
        """Begin to gather a matrix of which each rank has so many rows."""
        ...

    def scatter(self, part: Callable[[int], Tensor]) -> "Leaving":
        """Compute each rank's part of a gradient and send it there."""
        ...

    def arrive(self, mark: Any) -> None:
        """Wait for one part, or for one sum: where this rank waits for others."""
        ...


class Arriving:
    """A matrix being gathered. `marks` has what to wait for, by the rank that a part comes from."""

    def __init__(self, mover: Mover, parts_WfD: Tensor, marks: dict[int, Any]) -> None:
        self.mover, self.parts, self.marks = mover, parts_WfD, marks

    def iter_parts(self) -> Iterator[int]:
        """Yield the numbers of parts as they can be used, this rank's own first."""
        yield self.mover.rank
        for number, mark in self.marks.items():
            self.mover.arrive(mark)
            yield number

    def whole(self) -> Tensor:
        """Wait for what is still on its way."""
        for _ in self.iter_parts():
            pass
        return self.parts.flatten(0, 1)


class Leaving:
    """A matrix of gradients on its way to its owners; `collect` waits for this rank's sum."""

    def __init__(self, mover: Mover, mark: Any, collect: Callable[[], Tensor]) -> None:
        self.mover, self.mark, self._collect = mover, mark, collect

    def collect(self) -> Tensor:
        self.mover.arrive(self.mark)
        return self._collect()


class ByCollectives:
    """A broadcast for each part of a weight, a reduction for each part of its gradient."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.num_bytes = group, 0
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, mine_fD: Tensor) -> Arriving:
        parts = mine_fD.new_empty((self.world, *mine_fD.shape))
        parts[self.rank].copy_(mine_fD)
        self.num_bytes += mine_fD.nbytes
        works = {
            number: dist.broadcast(parts[number], group=self.group, group_src=number, async_op=True)
            for number in range(self.world)
        }
        # The own part can be used at once; that it has been sent is waited for last.
        works[self.rank] = works.pop(self.rank)
        return Arriving(self, parts, works)

    def scatter(self, part: Callable[[int], Tensor]) -> Leaving:
        parts, works = [], []
        for number in range(self.world):
            parts.append(part(number))
            self.num_bytes += parts[-1].nbytes
            works.append(dist.reduce(parts[-1], group=self.group, group_dst=number, async_op=True))

        return Leaving(self, works, lambda: parts[self.rank])

    def arrive(self, mark: Any) -> None:
        for work in mark if isinstance(mark, list) else [mark]:
            work.wait()


class BySymmetricMemory:
    """Each rank reads the others' parts of a weight, and writes its parts of a gradient to them,
    on a stream of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        from paceline.strategies.symmetric import Exchange

        self.gathers, self.sums = Exchange(group), Exchange(group)
        self.rank, self.world, self.num_bytes = self.gathers.rank, self.gathers.world, 0
        self.stream: Any = torch.cuda.Stream()

    def gather(self, mine_fD: Tensor) -> Arriving:
        size = mine_fD.numel()
        self.num_bytes += mine_fD.nbytes
        handle, buffer = self.gathers.open(mine_fD, size)
        parts = mine_fD.new_empty((self.world, *mine_fD.shape))
        parts[self.rank].copy_(mine_fD)
        marks = {}
        with self._beside(parts, mine_fD):
            buffer.copy_(mine_fD.reshape(-1))
            handle.barrier(channel=0)
            for shift in range(1, self.world):  # each begins with another
                peer = (self.rank + shift) % self.world
                parts[peer].view(-1).copy_(handle.get_buffer(peer, (size,), mine_fD.dtype))
                marks[peer] = self.stream.record_event()
            handle.barrier(channel=1)  # nobody writes the next one while another still reads
        return Arriving(self, parts, marks)

    def scatter(self, part: Callable[[int], Tensor]) -> Leaving:
        for shift in range(1, self.world + 1):  # the own last: it has no way to go
            peer = (self.rank + shift) % self.world
            mine = part(peer)
            size, at = mine.numel(), self.rank * mine.numel()
            handle, slots = self.sums.open(mine, self.world * size)
            self.num_bytes += mine.nbytes
            with self._beside(mine):
                there = handle.get_buffer(peer, (size,), mine.dtype, storage_offset=at)
                there.copy_(mine.reshape(-1))
        total = torch.empty_like(mine)
        with self._beside(total):
            handle.barrier(channel=0)
            torch.sum(slots.view(self.world, *mine.shape), dim=0, out=total)
            handle.barrier(channel=1)  # nobody writes the next one while another still sums
            mark = self.stream.record_event()
        return Leaving(self, mark, lambda: total)

    def arrive(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def _beside(self, *used: Tensor) -> Any:
        """Return the context of our own stream, after the work queued on the current one so far."""
        self.stream.wait_stream(torch.cuda.current_stream())
        for tensor in used:
            tensor.record_stream(self.stream)
        return torch.cuda.stream(self.stream)


# By the name of their group, as an operation of a compiled graph can hold no object. Their layers
# own them.
MOVERS: WeakValueDictionary[str, Any] = WeakValueDictionary()


@torch.library.custom_op("paceline::fused_linear", mutates_args=())
def fused_linear(x_ND: Tensor, shard_fD: Tensor, group: str, keeps: bool) -> tuple[Tensor, Tensor]:
    """Return x @ W.T, and W itself in the type of `x` if `keeps` is set."""
    mover = MOVERS[group]
    arriving = mover.gather(shard_fD.to(x_ND.dtype))
    each = len(shard_fD)
    y_NF = x_ND.new_empty((len(x_ND), each * mover.world))
    for number in arriving.iter_parts():
        columns = y_NF[:, number * each : (number + 1) * each]
        torch.mm(x_ND, arriving.parts[number].t(), out=columns)
    return y_NF, arriving.parts.flatten(0, 1) if keeps else x_ND.new_empty(0)


@fused_linear.register_fake
def _(x_ND: Tensor, shard_fD: Tensor, group: str, keeps: bool) -> tuple[Tensor, Tensor]:
    rows, width = shard_fD.shape
    whole = (rows * MOVERS[group].world, width)
    return x_ND.new_empty((x_ND.shape[0], whole[0])), x_ND.new_empty(whole if keeps else 0)


@torch.library.custom_op("paceline::fused_linear_back", mutates_args=())
def fused_linear_back(
    g_NF: Tensor, x_ND: Tensor, shard_fD: Tensor, kept_FD: Tensor, group: str, is_frozen: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the shard, the mean over ranks, in the shard's type; a
    frozen weight has none."""
    mover, each = MOVERS[group], len(shard_fD)
    arriving = None if kept_FD.numel() else mover.gather(shard_fD.to(g_NF.dtype))

    def part(number: int) -> Tensor:
        columns = g_NF[:, number * each : (number + 1) * each]
        return _outer(columns, x_ND, shard_fD.dtype)

    leaving = None if is_frozen else mover.scatter(part)
    dx_ND = g_NF @ (kept_FD if arriving is None else arriving.whole())
    if leaving is None:
        return dx_ND, shard_fD.new_empty(0)
    return dx_ND, leaving.collect() / mover.world


@fused_linear_back.register_fake
def _(
    g_NF: Tensor, x_ND: Tensor, shard_fD: Tensor, kept_FD: Tensor, group: str, is_frozen: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ND), shard_fD.new_empty(0 if is_frozen else shard_fD.shape)


def _outer(g_Nf: Tensor, x_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """Return g.T @ x in the weight's own type: it is summed in fp32 anyway."""
    if dtype == x_ND.dtype:
        return g_Nf.t() @ x_ND
    if g_Nf.is_cuda:
        return torch.mm(g_Nf.t(), x_ND, out_dtype=dtype)
    return g_Nf.t().to(dtype) @ x_ND.to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_ND, shard_fD, ctx.group, _ = inputs
    ctx.set_materialize_grads(False)  # what is kept of the weight has no gradient
    ctx.save_for_backward(x_ND, shard_fD, output[1])


def _back(ctx: Any, g_NF: Tensor, _: Any) -> tuple[Any, ...]:
    is_frozen = not ctx.needs_input_grad[1]
    dx_ND, d_shard = fused_linear_back(g_NF.contiguous(), *ctx.saved_tensors, ctx.group, is_frozen)
    return dx_ND, None if is_frozen else d_shard, None, None


fused_linear.register_autograd(_back, setup_context=_save)


class FusedLinear(nn.Linear):
    """A linear layer; this rank holds some rows of its weight. `keeps`: what forward has gathered
    stays for backward (zero2); `compute` is the type of the products."""

    takes_parts = True  # for models with kernels of their own
    group: str
    keeps: bool
    compute: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.compute)
        weight: Any = self.weight
        keeps = self.keeps and torch.is_grad_enabled()
        rows = x.reshape(-1, x.shape[-1])
        y_NF, _ = fused_linear(rows, weight.to_local(), self.group, keeps)
        y = y_NF.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class FusedLayers:
    """The layers of a model that compute this way, and how their parts are moved: `fused` through
    symmetric memory, `pipelined` by collectives."""

    def __init__(self, mesh: DeviceMesh, by: str) -> None:
        group = mesh.get_group(0)
        self.mesh, self.by, self.group = mesh, by, group.group_name
        self.mover: Mover = BySymmetricMemory(group) if by == "fused" else ByCollectives(group)
        MOVERS[self.group] = self.mover
        self.found: list[nn.Linear] = []
        self.layers: list[nn.Linear] = []

    def convert(self, root: nn.Module, keeps: bool, compute: torch.dtype) -> set[nn.Parameter]:
        """Shard the matrices of blocks over the ranks, in place, if that gives equal parts; return
        them, so that FSDP leaves them alone."""
        self.found = list(_iter_matrices(root))
        self.layers = [each for each in self.found if each.out_features % self.mover.world == 0]
        for layer in self.layers:
            layer.weight = nn.Parameter(self._cut(layer.weight), layer.weight.requires_grad)
            layer.__class__ = FusedLinear
            layer.group, layer.keeps, layer.compute = self.group, keeps, compute  # type: ignore[assignment]
        return {layer.get_parameter("weight") for layer in self.layers}

    def _cut(self, weight_FD: Tensor) -> DTensor:
        each = len(weight_FD) // self.mover.world
        rows = weight_FD.detach()[self.mover.rank * each :][:each].clone()
        return DTensor.from_local(
            rows, self.mesh, [Shard(0)],
            run_check=False, shape=weight_FD.shape, stride=weight_FD.stride(),
        )  # fmt: skip

    def proofs(self) -> list[Proof]:
        moved = self.mover.num_bytes
        return [
            Proof(
                what="fused products",
                requested=f"{self.by}, {len(self.layers)} of {len(self.found)} matrices of blocks",
                effective=f"{moved:,} bytes moved in parts so far",
                proof="counted where parts are sent",
                ok=moved > 0 or not self.layers,
            )
        ]


def _iter_matrices(root: nn.Module) -> Iterator[nn.Linear]:
    """Yield the plain linear layers of blocks that share their weight with no other module and are
    really called: torch's encoder layer reads its layers' weights itself."""
    names: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    for block in find_blocks(root):
        readers = [part for part in block.modules() if isinstance(part, nn.TransformerEncoderLayer)]
        read = {id(layer) for part in readers for layer in part.modules()}
        for layer in block.modules():
            if type(layer) is not nn.Linear or "forward" in vars(layer) or id(layer) in read:
                continue
            if names.get(id(layer.weight)) == 1:
                yield layer
