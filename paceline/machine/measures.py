"""The measurements of `paceline check` for ranks, links and devices, and those kept for plans and
reports. No torch, so that reports can read it.

GB is 10**9 bytes. Sizes follow nccl-tests: the larger of what one rank sends and what it receives.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from paceline.errors import DataError
from paceline.machine.facts import hardware_fingerprint
from paceline.records import Crew, Env, Part, Record
from paceline.records.files import cache_folder


class Wrong(Part):
    """A collective that gave one rank a wrong answer; values as text, because one may be nan."""

    rank: int
    op: str
    dtype: str
    numel: int = Field(description="Elements in the larger of the op's two buffers.")
    num_wrong: int
    index: int = Field(description="The first wrong element of this rank's result.")
    expected: str
    got: str

    def __str__(self) -> str:
        if self.op == "barrier":
            return (
                f"rank {self.rank}: left a barrier that {self.got} of {self.expected} had reached"
            )
        return (
            f"rank {self.rank}: {self.op} of {self.numel} {self.dtype} gave {self.got} for "
            f"{self.expected} at element {self.index} ({self.num_wrong} wrong)"
        )


class Lacking(Part):
    """What could not be checked, and why: neither right nor wrong."""

    op: str
    dtypes: list[str] = Field(description="Empty: no dtype at all.")
    reason: str

    def __str__(self) -> str:
        of = f" of {', '.join(self.dtypes)}" if self.dtypes else ""
        return f"{self.op}{of}: {self.reason}"


class Correctness(Part):
    """Every collective against its exact answer, on every rank."""

    backend: str
    world_size: int
    num_cases: int = Field(description="Op, dtype and size together; lacking ones not counted.")
    apis: dict[str, str] = Field(description="By op, the function of torch.distributed called.")
    wrong: list[Wrong]
    lacking: list[Lacking]


class Speed(Part):
    """One collective at one size; the time is the slowest rank's."""

    op: str
    num_bytes: int
    median_s: float = Field(description="Of one operation, over batches of them back to back.")
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    iterations: int


class PairSpeed(Part):
    """The link between two ranks: half of the fastest ping-pong."""

    a: int
    b: int
    num_bytes: int
    one_way_s: float
    gb_per_s: float


class ClockOffset(Part):
    """How far a rank's wall clock is ahead of rank 0's, known to half the round trip."""

    rank: int
    offset_s: float
    round_trip_s: float


class MatmulRate(Part):
    what: Literal["matmul"] = "matmul"
    precision: Literal["fp32", "tf32", "bf16", "fp16"]
    side: int = Field(description="Of the three square matrices.")
    tflop_per_s: float = Field(description="Median over batches.")
    best_tflop_per_s: float


class CopyRate(Part):
    what: Literal["copy"] = "copy"
    num_bytes: int = Field(description="Of the buffer; each copy reads and writes as many.")
    gb_per_s: float = Field(description="Read and written together; median over batches.")
    best_gb_per_s: float


Rate = MatmulRate | CopyRate


class KeptRates(Record):
    """Rates of one rank's device, measured while all ranks of the machine measured theirs."""

    measured_at: float
    threads: int
    rates: list[Rate]
    num_nodes: int = 1
    link: PairSpeed | None = Field(None, description="The slowest one between two of its ranks.")
    latency_s: float | None = Field(None, description="Of the smallest all-reduce of all ranks.")


def keep_rates(
    env: Env,
    crew: Crew,
    threads: int,
    rates: Sequence[Rate],
    pairs: Sequence[PairSpeed] = (),
    speeds: Sequence[Speed] = (),
) -> None:
    path = _path(env, crew.device.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    sums = [speed for speed in speeds if speed.op == "all_reduce"]
    smallest = min(sums, key=lambda speed: speed.num_bytes, default=None)
    KeptRates(
        measured_at=time.time(),
        threads=threads,
        rates=list(rates),
        num_nodes=crew.num_nodes,
        link=min(pairs, key=lambda pair: pair.gb_per_s, default=None),
        latency_s=smallest.median_s if smallest else None,
    ).save(path)


def load_matmul_tflops(env: Env, device: str, precision: str, threads: int) -> float | None:
    """Return the matmul rate measured on this very hardware; a CPU's holds for as many threads
    only."""
    kept = _load(env, device)
    if kept is None or (device == "cpu" and kept.threads != threads):
        return None
    found = [r.tflop_per_s for r in kept.rates if r.what == "matmul" and r.precision == precision]
    return found[0] if found else None


def load_link(env: Env, device: str, num_nodes: int) -> PairSpeed | None:
    """Return the slowest link measured from here, over as many machines."""
    kept = _load(env, device)
    return kept.link if kept is not None and kept.num_nodes == num_nodes else None


def load_latency(env: Env, device: str, num_nodes: int) -> float | None:
    """Return the seconds of the smallest all-reduce measured from here, over as many machines."""
    kept = _load(env, device)
    return kept.latency_s if kept is not None and kept.num_nodes == num_nodes else None


def _load(env: Env, device: str) -> KeptRates | None:
    try:
        return KeptRates.load(_path(env, device))
    except DataError:  # never checked, or by another version
        return None


def _path(env: Env, device: str) -> Path:
    return cache_folder("rates") / f"{hardware_fingerprint(env)}-{device}.json"
