"""Whether a run is steady enough for its speed to be trusted, and for it to go on for days.

Three gates, for a single run as for those of a sweep: how slow the slow steps are (p90/p50),
whether the speed changes while it is measured (drift), and whether memory grows (leak). Nothing
here compares runs: standings.py does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.records.columns import Table
from paceline.records.rundir import RunDir
from paceline.records.tables import TelemetryRow, read_telemetry

MAX_SPREAD, MAX_DRIFT = 1.5, 0.10
# Mebibytes per minute, and in all: of a GPU, and of the process of a rank.
MAX_GROWTH = {"gpu": (20.0, 4096.0), "host": (100.0, 8192.0)}
GATES = (
    f"p90/p50 over {MAX_SPREAD}, drift over {MAX_DRIFT:.0%}, memory that grows by over"
    f" {MAX_GROWTH['gpu'][0]:g} MiB a minute on a GPU or {MAX_GROWTH['host'][0]:g} of a rank"
)
LEFT_OUT, PART = 0.2, 0.1  # of the samples: the beginning, and what head, middle and tail are
MIN_SECONDS, MIN_SAMPLES = 60.0, 30  # less says nothing
MIB = 2**20


@dataclass(frozen=True)
class Growth:
    """How the memory of one GPU, or one rank, changed: `kind` is a key of MAX_GROWTH."""

    kind: str
    name: str
    mib_per_min: float
    mib: float
    is_steady: bool  # in both halves, so that no single jump looks like a leak

    @property
    def is_leak(self) -> bool:
        slope, whole = MAX_GROWTH[self.kind]
        return self.is_steady and (self.mib_per_min > slope or self.mib > whole)

    def __str__(self) -> str:
        return f"{self.name} {self.mib_per_min:+.1f} MiB a minute, {self.mib:+.0f} MiB in all"


def explain_spread(spread: float) -> str:
    """Return what is wrong with p90/p50 of the step times, or nothing."""
    return f"step time p90/p50 is {spread:.2f}" if spread > MAX_SPREAD else ""


def explain_drift(drift: float) -> str:
    """Return what is wrong with a relative change of the step time, or nothing."""
    if abs(drift) <= MAX_DRIFT:
        return ""
    way = "slower" if drift > 0 else "faster"
    return f"{abs(drift):.0%} {way} at the end of the window than at its start"


def measure_growth(run: RunDir, since: float | None) -> tuple[Growth, ...]:
    """Return the growth of each GPU and each rank, from telemetry since a moment."""
    found = []
    for path in sorted(run.root.glob(f"{run.telemetry.stem}*.csv")):
        rows = read_telemetry(path)
        if since is not None:
            rows = rows.pick(rows.column("time") >= since)
        rank = path.stem.partition("_rank")[2] or "0"
        for kind, name, part, column in _series(rows, rank):
            values = part.column(column)
            known = ~np.isnan(values)
            growth = _growth(kind, name, part.column("time")[known], values[known] / MIB)
            found += [growth] if growth is not None else []
    return tuple(found)


def _series(
    rows: Table[TelemetryRow], rank: str
) -> Iterator[tuple[str, str, Table[TelemetryRow], str]]:
    """Yield what is looked at in one file: the process of a rank, and each GPU."""
    source = rows.column("source").astype(str)
    for name in sorted(set(source.tolist())):
        part = rows.pick(source == name)
        if name.startswith("gpu"):
            yield "gpu", f"GPU {name.removeprefix('gpu')}", part, "memory_bytes"
        else:
            yield "host", f"rank {rank}", part, "rss_bytes"


def _growth(
    kind: str, name: str, times: NDArray[np.float64], mib: NDArray[np.float64]
) -> Growth | None:
    """Compare medians at the beginning, in the middle and at the end: single samples are noisy."""
    first = int(len(times) * LEFT_OUT)
    times, mib = times[first:], mib[first:]
    if len(times) < MIN_SAMPLES or times[-1] - times[0] < MIN_SECONDS:
        return None
    part = max(1, int(len(times) * PART))
    middle = slice((len(times) - part) // 2, (len(times) + part) // 2)
    places = (slice(part), middle, slice(-part, None))
    head, half, tail = (float(np.median(mib[place])) for place in places)
    minutes = float(np.median(times[-part:]) - np.median(times[:part])) / 60
    whole = tail - head
    is_steady = min(half - head, tail - half) > whole / 4 > 0
    return Growth(kind, name, whole / minutes, whole, is_steady)
