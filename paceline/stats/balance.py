"""How busy each GPU of a run was, from telemetry.csv, and whether the work was spread evenly.

    balance = measure_balance(run, plan)      None where no GPU was sampled
    str(balance)                              71 to 78% busy: balanced

A GPU is sampled about once a second: the share of that time in which some kernel ran on it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.records.tables import TelemetryRow, read_telemetry

# What a run over several GPUs of one machine is expected to reach, each of them.
LEAST_PERCENT, MOST_PERCENT = 60.0, 85.0
MIN_SAMPLES = 3


class Balance(NamedTuple):
    """Return the mean percentage of time in which each GPU was busy, while it trained."""

    busy: tuple[float, ...]

    @property
    def is_balanced(self) -> bool:
        """Say whether every GPU works, and about as much as the others."""
        apart = max(self.busy) - min(self.busy)
        return min(self.busy) >= LEAST_PERCENT and apart <= MOST_PERCENT - LEAST_PERCENT

    @property
    def verdict(self) -> str:
        if self.is_balanced:
            return "balanced"
        idle = sum(busy < LEAST_PERCENT for busy in self.busy)
        if idle:
            return f"{idle} of {len(self.busy)} below {LEAST_PERCENT:.0f}%"
        return f"{max(self.busy) - min(self.busy):.0f} points apart"

    def __str__(self) -> str:
        least, most = round(min(self.busy)), round(max(self.busy))
        span = f"{least}%" if least == most else f"{least} to {most}%"
        return f"{span} busy: {self.verdict}"


def measure_balance(run: RunDir, plan: Plan) -> Balance | None:
    """Return how busy the GPUs were that the plan gave to ranks; the time before the first kernel
    and after the last does not count."""
    if not plan.on_gpu:
        return None
    rows = {rank: read_telemetry(run.telemetry_of(rank)) for rank in range(plan.world_size)}
    return balance_of(rows.items(), plan)


def balance_of(rows: Iterable[tuple[int, Iterable[TelemetryRow]]], plan: Plan) -> Balance | None:
    """Return the same from rows that are read already, by the rank that wrote them."""
    crew = plan.crew
    used = {f"gpu{index}" for index in (crew.device_indices or range(crew.per_node))}
    sampled: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank, found in rows:
        for row in found:
            if row.source in used and "utilisation_percent" in row.values:
                sampled[rank, row.source].append(row.values["utilisation_percent"])
    trained = [_while_busy(values) for values in sampled.values()]
    known = [values for values in trained if len(values) >= MIN_SAMPLES]
    return Balance(tuple(sum(v) / len(v) for v in known)) if known else None


def _while_busy(values: list[float]) -> list[float]:
    """Cut off what is zero at both ends; a GPU that never worked keeps all of it."""
    busy = [number for number, value in enumerate(values) if value > 0]
    return values[busy[0] : busy[-1] + 1] if busy else values
