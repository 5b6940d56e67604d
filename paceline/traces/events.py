"""A chrome trace, plain or gzip, read into intervals. Only what is asked for is kept of an event: a
trace of five steps may have a million of them."""

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.records.base import DAMAGED, damaged
from paceline.records.files import open_regular
from paceline.traces.intervals import Interval

MAX_BYTES = 1 << 30  # of the text
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STEP = "ProfilerStep#"
MAX_MICRO = 1e18  # 30,000 years
LACKS = "no chrome trace"


@dataclass(frozen=True, slots=True)
class Span:
    """One event: a kernel, an operation, a call of CUDA. Times are microseconds of the trace."""

    name: str
    start: float
    end: float
    lane: tuple[int | str, int | str]  # process and thread; of a kernel, device and stream
    correlation: int = 0

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def time(self) -> Interval:
        return self.start, self.end


@dataclass
class Trace:
    """What a trace holds: `kernels` ran on a device, `operations` are torch's on the host."""

    kernels: list[Span] = field(default_factory=list)
    operations: list[Span] = field(default_factory=list)
    launches: dict[int, Span] = field(default_factory=dict)  # by correlation
    annotations: list[Span] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None

    @property
    def steps(self) -> list[Span]:
        return [each for each in self.annotations if each.name.startswith(STEP)]


def load_trace(path: Path, follow: bool = False) -> Trace:
    """Read a trace; `DataError` where the file is none."""
    try:
        with open_regular(path, follow) as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = gzip.GzipFile(fileobj=file).read(MAX_BYTES) if is_packed else file.read(MAX_BYTES)
        if len(raw) >= MAX_BYTES:
            raise DataError(f"{path} holds more than 1 GiB of text: profile fewer steps")
        body = json.loads(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except DAMAGED as error:
        raise damaged(path, LACKS, str(error)[:120]) from error
    events = body.get("traceEvents") if isinstance(body, dict) else body
    if not isinstance(events, list):
        raise damaged(path, LACKS, "it has no traceEvents")
    trace = _sort_out(events)
    info = body.get("distributedInfo") if isinstance(body, dict) else None
    if isinstance(info, dict):
        trace.rank, trace.world_size = _whole(info.get("rank")), _whole(info.get("world_size"))
    return trace


def _sort_out(events: Sequence[Any]) -> Trace:
    trace = Trace()
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = str(event.get("cat", "")).lower()
        try:
            span = _span(event)
        except (TypeError, ValueError, OverflowError):
            continue
        if kind in ON_DEVICE:
            trace.kernels.append(span)
        elif kind in LAUNCHES:
            trace.launches[span.correlation] = span
        elif kind in ("cpu_op", "operator"):
            trace.operations.append(span)
        elif kind == "user_annotation":
            trace.annotations.append(span)
    for spans in (trace.kernels, trace.operations, trace.annotations):
        spans.sort(key=lambda span: span.start)
    return trace


def _span(event: dict[str, Any]) -> Span:
    start, length = float(event.get("ts", math.nan)), float(event.get("dur", 0))
    if not (abs(start) < MAX_MICRO and 0 <= length < MAX_MICRO):
        raise ValueError("an event without a time")
    more = event.get("args")
    correlation = _whole(more.get("correlation")) if isinstance(more, dict) else None
    lane = (_name(event.get("pid", 0)), _name(event.get("tid", 0)))
    return Span(str(event.get("name")), start, start + length, lane, correlation or 0)


def _name(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
