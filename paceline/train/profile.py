"""One step as torch's profiler saw it: which operations ran, on which shapes and types.

It sees what the dispatcher was really asked for, compiled or not.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TYPE_NAMES = {"float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16"}


@dataclass(frozen=True)
class Op:
    """A call: its tensors' shapes and types by position, None and "" where it has another value."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[Any, ...]


class StepProfile:
    """Profiles what runs between `start` and `stop`."""

    def __init__(self, with_kernels: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if with_kernels:
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self.ops: list[Op] = []
        self.names: Counter[str] = Counter()

    def start(self) -> None:
        # kineto announces each start and stop on stderr, as if it were graver than an error (5). It
        # reads its level once, when a process profiles for the first time.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        self.ops = list(_iter_ops(self._profile))
        self.names = Counter(op.name for op in self.ops)

    def find(self, *names: str) -> list[Op]:
        return [op for op in self.ops if op.name in names]

    def types_of(self, *names: str) -> Counter[str]:
        """Types of the first tensor that the named operations took."""
        firsts = ((t for t in op.types if t in TYPE_NAMES.values()) for op in self.find(*names))
        return Counter(next(types, "other") for types in firsts)


def _iter_ops(profiled: profile) -> Iterator[Op]:
    # The public list of events has shapes, but not the types.
    results = profiled.profiler.kineto_results if profiled.profiler else None
    assert results is not None, "stopped after it was started"
    for event in _outermost(results.events()):
        yield Op(
            event.name(),
            tuple(tuple(shape) for shape in event.shapes()),
            tuple(TYPE_NAMES.get(name, name) for name in event.dtypes()),
            tuple(event.concrete_inputs()),
        )


def _outermost(events: Any) -> Iterator[Any]:
    """Without calls inside a call of the same name: a dispatch mode, as selective recomputation
    has one, passes each operation on to itself."""
    running: dict[tuple[int, str], int] = {}  # thread and name, to when the outermost ends
    for event in sorted(events, key=lambda event: event.start_ns()):
        key = event.start_thread_id(), event.name()
        if event.start_ns() >= running.get(key, -1):
            running[key] = event.start_ns() + event.duration_ns()
            yield event


def compile_counts() -> tuple[int, int, int]:
    """Graphs compiled, graph breaks and recompilations in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0, 0, 0  # nobody compiled, and to import it takes a second
    from torch._dynamo.utils import counters, get_compilation_metrics

    again = sum(bool(metrics.recompile_reason) for metrics in get_compilation_metrics())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), again


def group_timeouts_s(device: torch.device) -> list[float]:
    """How long a collective really waits, as the backend of every group has it."""
    from torch.distributed.distributed_c10d import _world

    groups = [group for group in _world.pg_map if hasattr(group, "_get_backend")]
    options = [group._get_backend(device).options for group in groups]
    return [float(option._timeout.total_seconds()) for option in options]
