"""Compares each collective with its exact answer, over dtypes and sizes, on every rank.

`verify_collectives(device)` needs an initialised default process group; every rank calls it.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.check.answers import BLANK, CHECKS, WINDOW, Case, Check, Question
from paceline.errors import ClusterError
from paceline.machine.measures import Correctness, Lacking, Wrong

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
NUMELS = (1, 1021, 2**18)  # one, an odd number, 1 MiB of float32
LATE_S = 0.02
# How backends say that they have no such operation, as opposed to one that failed.
NOT_THERE = ("not support", "unsupported", "not implemented", "can't be cast", "invalid scalar")
WRONGS = TypeAdapter(list[Wrong])


def verify_collectives(device: torch.device) -> Correctness:
    """Run every collective on every rank; rank 0's record names each rank with a wrong answer.

    Elsewhere the record has that rank's own. `ClusterError` where a collective fails outright:
    the process group cannot be trusted after that.
    """
    tally = _Tally(device, num_cases=1, wrong=_verify_barrier(device))
    for op, check in CHECKS.items():
        reason = why_no_send_recv(device) if op == "send_recv" else None
        if reason is None:
            tally.verify(op, check)
        else:
            tally.lacking.append(Lacking(op=op, dtypes=[], reason=reason))
    texts = gather_texts(WRONGS.dump_json(tally.wrong).decode())
    wrong = [each for text in texts for each in WRONGS.validate_json(text)]
    return Correctness(
        backend=backend_of(device),
        world_size=dist.get_world_size(),
        num_cases=tally.num_cases,
        apis={op: check.api for op, check in CHECKS.items()},
        wrong=wrong if dist.get_rank() == 0 else tally.wrong,
        lacking=tally.lacking,
    )


def backend_of(device: torch.device) -> str:
    """Return the backend of the default group that carries this device's tensors: gloo, nccl,
    ..."""
    # Reads "cpu:gloo,cuda:nccl", whatever the group was asked for with.
    pairs = dist.get_backend_config().split(",")
    return dict(pair.split(":") for pair in pairs)[device.type]


def why_no_send_recv(device: torch.device) -> str | None:
    """Say why this device's tensors cannot be sent to another rank; None where they can."""
    if dist.get_world_size() == 1:
        return "one rank has nobody to send to"
    if backend_of(device) == "gloo" and device.type != "cpu":
        # Seen with torch 2.11: trying closes the connection, and the whole group is lost.
        return f"not in gloo for {device.type} tensors"
    return None


@dataclass
class _Tally:
    """What this rank has seen so far."""

    device: torch.device
    num_cases: int
    wrong: list[Wrong]
    lacking: list[Lacking] = field(default_factory=list)

    def verify(self, op: str, check: Check) -> None:
        absent: dict[str, list[str]] = {}
        # The average of integers means something else in every backend.
        dtypes = FLOATS if op == "all_reduce avg" else FLOATS + INTEGERS
        for numel in NUMELS:
            case = Case(dist.get_rank(), dist.get_world_size(), self.device, numel)
            question = check.ask(case)
            for dtype in dtypes:
                result = _run(op, check, question, dtype)
                if isinstance(result, str):
                    absent.setdefault(result, []).append(_name(dtype))
                    continue
                self.num_cases += 1
                self.wrong += _compare(op, case, result, question.expected)
        for reason, names in absent.items():
            self.lacking.append(Lacking(op=op, dtypes=list(dict.fromkeys(names)), reason=reason))


def _run(op: str, check: Check, question: Question, dtype: torch.dtype) -> Tensor | str:
    """Return the op's result on this rank, or why the backend has no such op."""
    given = question.given.to(dtype, copy=True)
    blank = torch.full_like(question.expected, BLANK, dtype=dtype)
    try:
        return check.run(given, blank)
    except (RuntimeError, TypeError) as error:
        first_line = str(error).split("\n")[0]
        if any(phrase in first_line.lower() for phrase in NOT_THERE):
            return f"not in {backend_of(given.device)} ({first_line})"
        raise ClusterError(
            f"{op} of {len(given)} {_name(dtype)} failed on rank {dist.get_rank()}: {first_line}"
        ) from error


def _compare(op: str, case: Case, result: Tensor, answer: Tensor) -> list[Wrong]:
    """Return at most one entry, about the first wrong element."""
    expected = answer.to(result.dtype)
    wrong = result != expected  # nan differs from everything, as it should
    if op == "all_reduce avg" and case.world_size.bit_count() > 1:
        # NCCL first multiplies each term by 1/n, rounded: some roundings away is right, too.
        slack = (WINDOW + 2) * torch.finfo(result.dtype).eps * answer
        wrong = ~((result.double() - answer).abs() <= slack)
    places = wrong.nonzero()
    if not len(places):
        return []
    index = int(places[0])
    return [
        Wrong(
            rank=case.rank,
            op=op,
            dtype=_name(result.dtype),
            numel=case.numel,
            num_wrong=len(places),
            index=index,
            expected=f"{expected[index].item():g}",
            got=f"{result[index].item():g}",
        )
    ]


def _verify_barrier(device: torch.device) -> list[Wrong]:
    """Check that nobody leaves before the last has come, whether the first or the last rank is
    late."""
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for late in sorted({0, world_size - 1}):
        key = turn_key(store, "barrier", rank)
        if rank == late:
            time.sleep(LATE_S)
        store.add(key, 1)
        # NCCL's barrier guesses the device, and warns, where it is not told.
        dist.barrier(device_ids=[device.index or 0] if backend_of(device) == "nccl" else None)
        entered = store.add(key, 0)
        if entered != world_size:
            wrong.append(
                Wrong(
                    rank=rank, op="barrier", dtype="", numel=0, num_wrong=1, index=0,
                    expected=str(world_size), got=str(entered),
                )
            )  # fmt: skip
    return wrong


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What ranks tell each other goes through the rendezvous store, which works where a fabric does not:
# so a wrong all_gather can still be reported.


def default_store() -> Store:
    """Return the store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def turn_key(store: Store, what: str, rank: int) -> str:
    """Return a key of this call's own. Each rank counts its calls: all make them in the same
    order."""
    return f"paceline/{what}/{store.add(f'paceline/{what}/turns/{rank}', 1)}"


def gather_texts(text: str) -> list[str]:
    """Return every rank's text in rank order, on rank 0; an empty list elsewhere."""
    store, rank = default_store(), dist.get_rank()
    key = turn_key(store, "gather", rank)
    store.set(f"{key}/{rank}", text)
    if rank != 0:
        return []
    return [store.get(f"{key}/{peer}").decode() for peer in range(dist.get_world_size())]
