"""Measures ranks pair by pair: the bandwidth of each link, and how far each rank's clock is off.

Both need an initialised default process group; every rank calls them.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from paceline.check.bandwidth import line_up
from paceline.check.collectives import gather_texts, why_no_send_recv
from paceline.check.rates import Batches, plan_batches, time_batch
from paceline.machine.measures import ClockOffset, PairSpeed

Pair = tuple[int, int]
EVERY_PAIR_UP_TO = 16
SIZE = 2**22
BUDGET_S, ROUND_S = 2.0, 0.4  # in all, and at most in one round
SPEEDS = TypeAdapter(list[PairSpeed])


def plan_pairs(world_size: int) -> list[Pair]:
    """Return every pair of at most 16 ranks; of more, each rank with those at distances 1, 2, 4,
    ..."""
    if world_size <= EVERY_PAIR_UP_TO:
        return [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    distances = [2**power for power in range(world_size.bit_length()) if 2**power < world_size]
    around = ((rank, (rank + far) % world_size) for far in distances for rank in range(world_size))
    return sorted({(min(pair), max(pair)) for pair in around})


def plan_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Return the pairs as a tournament: in each round every rank meets at most one other.

    Each pair goes into the first round where both are free. For all pairs in order that is round
    `a xor b`: with 8 ranks per host, a round is either inside hosts or between them, and links
    of one kind are measured under the same load.
    """
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        place = next((n for n, taken in enumerate(busy) if taken.isdisjoint(pair)), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(pair)
        busy[place].update(pair)
    return rounds


def measure_pairs(
    device: torch.device, size: int = SIZE, budget_s: float = BUDGET_S
) -> list[PairSpeed]:
    """Measure the link of each pair of ranks by ping-pong, all on rank 0; elsewhere an empty
    list.

    Ping-pong, because one clock then times both directions and a link bad in either shows. The
    fastest batch counts: other work only ever slows a link down, a bad one is slow every time.
    """
    rank, rounds = dist.get_rank(), plan_rounds(plan_pairs(dist.get_world_size()))
    buffer = torch.ones(max(size // 4, 1), dtype=torch.float32, device=_wire(device))
    share_s = min(budget_s / max(len(rounds), 1), ROUND_S)
    own = []
    for pairs in rounds:
        line_up(device)
        for a, b in pairs:
            if rank in (a, b):
                one_way_s = _ping_pong_s(buffer, b if rank == a else a, share_s)
                bandwidth = buffer.nbytes / one_way_s / 1e9
                speed = PairSpeed(
                    a=a, b=b, num_bytes=buffer.nbytes, one_way_s=one_way_s, gb_per_s=bandwidth
                )
                own += [speed] if rank == a else []
    texts = gather_texts(SPEEDS.dump_json(own).decode())
    return sorted(
        (speed for text in texts for speed in SPEEDS.validate_json(text)),
        key=lambda speed: (speed.a, speed.b),
    )


def measure_clock_offsets(device: torch.device, tries: int = 8) -> list[ClockOffset]:
    """Measure each rank's wall clock against rank 0's, on rank 0; elsewhere an empty list.

    Rank 0 asks each rank in turn; of `tries` answers the one with the shortest round trip
    counts, because its middle is the best guess of when the other rank read its clock.
    """
    rank, note = dist.get_rank(), torch.zeros(1, dtype=torch.float64, device=_wire(device))
    line_up(device)
    if rank != 0:
        for _ in range(tries):
            _receive(note, 0)
            note.item()  # the question is here, not only on its way
            note.fill_(time.time())
            _send(note, 0)
        return []
    offsets = [ClockOffset(rank=0, offset_s=0.0, round_trip_s=0.0)]
    for peer in range(1, dist.get_world_size()):
        answers = [_ask_clock(note, peer) for _ in range(tries)]
        offsets.append(min(answers, key=lambda answer: answer.round_trip_s))
    return offsets


def _ask_clock(note: Tensor, peer: int) -> ClockOffset:
    asked_at = time.time()
    _send(note, peer)
    _receive(note, peer)
    theirs = note.item()
    answered_at = time.time()
    middle = (asked_at + answered_at) / 2
    return ClockOffset(rank=peer, offset_s=theirs - middle, round_trip_s=answered_at - asked_at)


def _ping_pong_s(buffer: Tensor, peer: int, budget_s: float) -> float:
    """Return half of a round trip with `peer`; the lower rank serves, and says how often."""
    serves = dist.get_rank() < peer

    def round_trip() -> None:
        for move in (_send, _receive) if serves else (_receive, _send):
            move(buffer, peer)

    round_trip()
    trial_s = time_batch(round_trip, 1, buffer.device)
    batches = plan_batches(trial_s, budget_s - 2 * trial_s)
    agreed = torch.tensor([batches.num, batches.size], device=buffer.device)
    (_send if serves else _receive)(agreed, peer)
    num, size = agreed.tolist()
    batches = Batches(num=int(num), size=int(size))
    return min(time_batch(round_trip, batches.size, buffer.device) for _ in range(batches.num)) / 2


def _send(data: Tensor, peer: int) -> None:
    _move(dist.isend, data, peer)


def _receive(data: Tensor, peer: int) -> None:
    _move(dist.irecv, data, peer)


def _move(way: Callable[..., Any], data: Tensor, peer: int) -> None:
    if not data.is_cuda:
        way(data, peer).wait()
        return
    # A batch of one: NCCL makes a communicator for each pair that sends without a batch.
    for work in dist.batch_isend_irecv([dist.P2POp(way, data, peer)]):
        work.wait()


def _wire(device: torch.device) -> torch.device:
    """Return where sent tensors lie: gloo sends from the host only, and through it for a GPU's
    tensors."""
    return device if why_no_send_recv(device) is None else torch.device("cpu")
