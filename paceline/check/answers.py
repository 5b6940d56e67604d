"""Each collective with a question and its exact answer, worked out without any communication.

The data are small integers, exact in every dtype and for any number of ranks, so that "equal"
means equal: a sum has at most `WINDOW` terms that are not zero, whichever order it is added in.
`paceline.check.collectives` asks them over dtypes and sizes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

WINDOW = 8  # ranks that add something at one element
MODULUS = 251  # every integer up to 256 is exact in bfloat16; a prime, so shifted data shows
BLANK = 253  # what result buffers hold before: no right answer has it
# torch 2.13 renamed these two and warns at every call of the old names.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@dataclass(frozen=True)
class Case:
    """Where one rank is in an op of `numel` elements; `chunk` of them belong to each rank."""

    rank: int
    world_size: int
    device: torch.device
    numel: int

    @property
    def chunk(self) -> int:
        return math.ceil(self.numel / self.world_size)

    @property
    def whole(self) -> int:
        return self.chunk * self.world_size

    def indices(self, numel: int) -> Tensor:
        return torch.arange(numel, dtype=torch.int32, device=self.device)

    def term(self, rank: int | Tensor, index: Tensor) -> Tensor:
        """Return what `rank` adds to the sum at `index`: 1 to 5 near its own place, 0 elsewhere."""
        near = (index - rank) % self.world_size < WINDOW
        return near * (1 + (rank + 3 * index) % 5)

    def terms(self, index: Tensor) -> Tensor:
        """Return the terms at `index` that are not zero, one per row."""
        rows = range(min(WINDOW, self.world_size))
        return torch.stack([self.term((index - row) % self.world_size, index) for row in rows])


def message(sender: int | Tensor, index: Tensor) -> Tensor:
    """Return what `sender` says at `index`: it differs from sender to sender, and within a
    message."""
    again = sender // MODULUS
    return (sender + 31 * index + again * (1 + index % 250)) % MODULUS


class Question(NamedTuple):
    """What this rank puts in and what it must get out, as integers (an average as float64)."""

    given: Tensor
    expected: Tensor


def ask_sum(case: Case) -> Question:
    index = case.indices(case.numel)
    return Question(case.term(case.rank, index), case.terms(index).sum(0))


def ask_avg(case: Case) -> Question:
    given, total = ask_sum(case)
    return Question(given, total.double() / case.world_size)


def ask_max(case: Case) -> Question:
    index = case.indices(case.numel)
    return Question(case.term(case.rank, index), case.terms(index).amax(0))


def ask_min(case: Case) -> Question:
    given, largest = ask_max(case)
    return Question(6 - given, 6 - largest)


def ask_all_gather(case: Case) -> Question:
    index = case.indices(case.whole)
    own = message(case.rank, case.indices(case.chunk))
    return Question(own, message(index // case.chunk, index % case.chunk))


def ask_reduce_scatter(case: Case) -> Question:
    own_piece = case.indices(case.chunk) + case.rank * case.chunk
    return Question(case.term(case.rank, case.indices(case.whole)), case.terms(own_piece).sum(0))


def ask_broadcast(case: Case, root: int) -> Question:
    said = message(root % case.world_size, case.indices(case.numel))
    is_root = case.rank == root % case.world_size
    return Question(said if is_root else torch.full_like(said, BLANK), said)


def ask_all_to_all(case: Case) -> Question:
    index = case.indices(case.whole)
    place_at_sender = index % case.chunk + case.rank * case.chunk
    return Question(message(case.rank, index), message(index // case.chunk, place_at_sender))


def ask_send_recv(case: Case) -> Question:
    index = case.indices(case.numel)
    before = (case.rank - 1) % case.world_size
    return Question(message(case.rank, index), message(before, index))


# Each of these runs its op on `given` (which it may overwrite) and fills or returns `result`.


def run_all_reduce(given: Tensor, result: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    dist.all_reduce(given, op=op)
    return given


def run_all_gather(given: Tensor, result: Tensor) -> Tensor:
    getattr(dist, ALL_GATHER)(result, given)
    return result


def run_reduce_scatter(given: Tensor, result: Tensor) -> Tensor:
    getattr(dist, REDUCE_SCATTER)(result, given)
    return result


def run_broadcast(given: Tensor, result: Tensor, root: int) -> Tensor:
    dist.broadcast(given, root % dist.get_world_size())
    return given


def run_all_to_all(given: Tensor, result: Tensor) -> Tensor:
    dist.all_to_all_single(result, given)
    return result


def run_send_recv(given: Tensor, result: Tensor) -> Tensor:
    exchange(given, result)
    return result


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the next rank and receive from the one before, both under way at once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    works: Sequence[dist.Work | None]
    if outgoing.is_cuda:
        # NCCL must be handed both together, or each waits for the other.
        send = dist.P2POp(dist.isend, outgoing, after)
        works = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, incoming, before)])
    else:  # Where a batch only costs time: 30 us, a twentieth of what gloo takes for 1 MiB.
        works = [dist.isend(outgoing, after), dist.irecv(incoming, before)]
    for work in works:
        if work is not None:  # None is for ranks outside a group
            work.wait()


@dataclass(frozen=True)
class Check:
    """One op to check; `api` is the function of torch.distributed that is called."""

    api: str
    ask: Callable[[Case], Question]
    run: Callable[[Tensor, Tensor], Tensor]


def _all_reduce(ask: Callable[[Case], Question], op: dist.ReduceOp.RedOpType) -> Check:
    return Check("all_reduce", ask, partial(run_all_reduce, op=op))


def _broadcast(root: int) -> Check:
    return Check("broadcast", partial(ask_broadcast, root=root), partial(run_broadcast, root=root))


CHECKS: dict[str, Check] = {
    "all_reduce sum": _all_reduce(ask_sum, dist.ReduceOp.SUM),
    "all_reduce max": _all_reduce(ask_max, dist.ReduceOp.MAX),
    "all_reduce min": _all_reduce(ask_min, dist.ReduceOp.MIN),
    "all_reduce avg": _all_reduce(ask_avg, dist.ReduceOp.AVG),
    "all_gather": Check(ALL_GATHER, ask_all_gather, run_all_gather),
    "reduce_scatter": Check(REDUCE_SCATTER, ask_reduce_scatter, run_reduce_scatter),
    "broadcast from first": _broadcast(0),
    "broadcast from last": _broadcast(-1),
    "all_to_all": Check("all_to_all_single", ask_all_to_all, run_all_to_all),
    "send_recv": Check("isend, irecv", ask_send_recv, run_send_recv),
}
