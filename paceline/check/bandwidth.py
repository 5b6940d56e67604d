"""Measures collectives: the latency of small ones, algorithm and bus bandwidth of large ones.

`measure_collectives(device)` needs an initialised default process group; every rank calls it.
Sizes and factors are those of nccl-tests, so that figures compare:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.check.answers import ALL_GATHER, REDUCE_SCATTER, exchange
from paceline.check.collectives import why_no_send_recv
from paceline.check.rates import plan_batches, synchronise, time_batch
from paceline.machine.measures import Speed

SIZES = (8, 2**10, 2**20, 2**22, 2**24)
BUDGET_S = 3.0
TRIALS = 2
LARGE, LARGE_WEIGHT = 2**20, 4  # a large operation takes longer: more of the budget


@dataclass(frozen=True)
class Load:
    """An operation ready to run again and again, and its size as nccl-tests counts it."""

    run: Callable[[], object]
    num_bytes: int


def load_all_reduce(size: int, device: torch.device) -> Load:
    data = _floats(max(size // 4, 1), device)
    return Load(lambda: dist.all_reduce(data), data.nbytes)


def load_all_gather(size: int, device: torch.device) -> Load:
    own, whole = _chunk_and_whole(size, device)
    gather = getattr(dist, ALL_GATHER)
    return Load(lambda: gather(whole, own), whole.nbytes)


def load_reduce_scatter(size: int, device: torch.device) -> Load:
    own, whole = _chunk_and_whole(size, device)
    scatter = getattr(dist, REDUCE_SCATTER)
    return Load(lambda: scatter(own, whole), whole.nbytes)


def load_broadcast(size: int, device: torch.device) -> Load:
    data = _floats(max(size // 4, 1), device)
    return Load(lambda: dist.broadcast(data, 0), data.nbytes)


def load_all_to_all(size: int, device: torch.device) -> Load:
    outgoing, incoming = _chunk_and_whole(size, device)[1], _chunk_and_whole(size, device)[1]
    return Load(lambda: dist.all_to_all_single(incoming, outgoing), incoming.nbytes)


def load_send_recv(size: int, device: torch.device) -> Load:
    """Let every rank send to the next while it receives from the one before."""
    outgoing, incoming = _floats(max(size // 4, 1), device), _floats(max(size // 4, 1), device)
    return Load(lambda: exchange(outgoing, incoming), incoming.nbytes)


def _chunk_and_whole(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return one rank's piece and all ranks' pieces together, `size` bytes rounded to whole
    pieces."""
    numel = max(size // 4 // dist.get_world_size(), 1)
    return _floats(numel, device), _floats(numel * dist.get_world_size(), device)


def _floats(numel: int, device: torch.device) -> Tensor:
    # Zeros stay zeros however often they are summed. Written, not taken from calloc: its untouched
    # pages are all one page, which would be read from cache.
    return torch.empty(numel, dtype=torch.float32, device=device).fill_(0)


LOADS: dict[str, Callable[[int, torch.device], Load]] = {
    "all_reduce": load_all_reduce,
    "all_gather": load_all_gather,
    "reduce_scatter": load_reduce_scatter,
    "broadcast": load_broadcast,
    "all_to_all": load_all_to_all,
    "send_recv": load_send_recv,
}


def bus_factor(op: str, world_size: int) -> float:
    """Return bus over algorithm bandwidth: what each link carries, whatever the world size."""
    share = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}
    return factors.get(op, share)


def measure_collectives(
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    ops: Sequence[str] = tuple(LOADS),
    budget_s: float = BUDGET_S,
) -> list[Speed]:
    """Time each op at each size in bytes, the same list on every rank; about `budget_s` in all.

    An op that the backend lacks is left out: `verify_collectives` says which and why. A backend so
    slow that one run outlasts its share of the budget is still timed, by that run.
    """
    usable = [op for op in ops if op != "send_recv" or why_no_send_recv(device) is None]
    weights = [LARGE_WEIGHT if size >= LARGE else 1 for size in sizes]
    share_s = budget_s / max(len(usable) * sum(weights), 1)
    return [
        _measure(op, size, device, weight * share_s)
        for op in usable
        for size, weight in zip(sizes, weights, strict=True)
    ]


def _measure(op: str, size: int, device: torch.device, share_s: float) -> Speed:
    load = LOADS[op](size, device)
    load.run()  # warm: pages touched, connections made
    trials_s = [_time_batch(load, 1, device) for _ in range(TRIALS)]
    batches = plan_batches(min(trials_s), share_s - sum(trials_s))
    times_s = trials_s if batches.size == 1 else []
    # By the time spent, too: trials that were lucky must not make the rest overrun its share.
    while not times_s or (len(times_s) < batches.num and sum(times_s) * batches.size < share_s):
        times_s.append(_time_batch(load, batches.size, device))
    median_s = statistics.median(times_s)
    algbw = load.num_bytes / median_s / 1e9
    return Speed(
        op=op,
        num_bytes=load.num_bytes,
        median_s=median_s,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(op, dist.get_world_size()),
        iterations=len(times_s) * batches.size,
    )


def _time_batch(load: Load, size: int, device: torch.device) -> float:
    """Return the seconds of one run on the slowest rank.

    It is the same number on every rank, so that all decide alike how many more batches to time:
    a rank that counted otherwise would wait for ever.
    """
    line_up(device)
    own_s = time_batch(load.run, size, device)
    slowest_s = torch.tensor(own_s, dtype=torch.float64, device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return slowest_s.item()


def line_up(device: torch.device) -> None:
    """Wait until every rank is here, so that a batch does not time a rank's late arrival."""
    dist.all_reduce(torch.zeros(1, device=device))
    synchronise(device)
