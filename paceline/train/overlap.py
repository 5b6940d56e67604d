"""How much of a step's communication was not overlapped with computation: overlap.json of each
rank.

The profile of one step has when each collective was on its way and when each kernel or operation
ran. What of the first is not covered by the second is exposed: the step would be that much shorter
if links were infinitely fast. A rank that waits for a slower one sees its waiting too, so ranks are
told apart.
"""

from collections.abc import Iterable
from typing import Any

from torch._C._autograd import DeviceType

from paceline.records import Overlap
from paceline.traces.account import is_communication, is_computation
from paceline.traces.intervals import Interval, length, merge, subtract

NANO = 1e-9
ON_HOST = "gloo:"


def measure_overlap(events: Iterable[Any], rank: int, step: int) -> Overlap:
    """Return what a profiled step spent; `events` are kineto's, of one rank."""
    sent: list[Interval] = []
    on_device: list[Interval] = []
    on_host: list[Interval] = []
    for event in events:
        name, span = event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())
        is_device = event.device_type() == DeviceType.CUDA
        if name.startswith(ON_HOST) or (is_device and is_communication(name)):
            sent.append(span)
        elif is_device and is_computation(name):
            on_device.append(span)
        elif name.startswith("aten::"):
            on_host.append(span)
    exchanged, computed = merge(sent), merge(on_device or on_host)
    return Overlap(
        rank=rank,
        step=step,
        communication_s=length(exchanged) * NANO,
        exposed_s=length(subtract(exchanged, computed)) * NANO,
        compute_s=length(computed) * NANO,
    )
