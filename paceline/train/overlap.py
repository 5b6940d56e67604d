"""How much of a step's communication nothing was computed beside: overlap.json of each rank.

The profile of one step has when each collective was on its way and when each kernel or operation
ran. What of the first is not covered by the second is exposed: the step would be that much shorter
if links were infinitely fast. A rank that waits for a slower one sees its waiting too, so ranks are
told apart.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._autograd import DeviceType

from paceline.records import Overlap

Span = tuple[int, int]  # from and to, ns
# Kernels that move numbers between ranks: NCCL's, and torch's of symmetric memory.
KERNELS = ("nccl", "all_reduce_kernel", "shot_all_reduce", "PtoP")
ON_HOST = "gloo:"


def measure_overlap(events: Iterable[Any], rank: int, step: int) -> Overlap:
    """Return what a profiled step spent; `events` are kineto's, of one rank."""
    sent: list[Span] = []
    on_device: list[Span] = []
    on_host: list[Span] = []
    for event in events:
        name, span = event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())
        is_device = event.device_type() == DeviceType.CUDA
        if name.startswith(ON_HOST) or (is_device and any(mark in name for mark in KERNELS)):
            sent.append(span)
        elif is_device and not name.startswith(("Memcpy", "Memset")):
            on_device.append(span)
        elif name.startswith("aten::"):
            on_host.append(span)
    computed = on_device or on_host
    exposed = uncovered(sent, computed)
    return Overlap(
        rank=rank,
        step=step,
        communication_s=_seconds(merge(sent)),
        exposed_s=_seconds(exposed),
        compute_s=_seconds(merge(computed)),
    )


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def uncovered(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` in which none of `others` runs."""
    left: list[Span] = []
    covers = merge(others)
    for start, end in merge(spans):
        for begin, finish in covers:
            if finish <= start or begin >= end:
                continue
            if begin > start:
                left.append((start, begin))
            start = max(start, finish)
        if start < end:
            left.append((start, end))
    return left


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) / 1e9
