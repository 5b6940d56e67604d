"""What this machine's devices can do, kept by `paceline check` for every later run's report."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from paceline.errors import DataError
from paceline.machine.facts import hardware_fingerprint
from paceline.machine.measures import PairSpeed, Rate
from paceline.records import Crew, Env, Record


class KeptRates(Record):
    """Of one rank's device, measured while all ranks of the machine measured theirs."""

    measured_at: float
    threads: int
    rates: list[Rate]
    num_nodes: int = 1
    link: PairSpeed | None = Field(None, description="The slowest one between two of its ranks.")


def keep_rates(
    env: Env,
    crew: Crew,
    threads: int,
    rates: Sequence[Rate],
    pairs: Sequence[PairSpeed] = (),
) -> None:
    path = _path(env, crew.device.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    KeptRates(
        measured_at=time.time(),
        threads=threads,
        rates=list(rates),
        num_nodes=crew.num_nodes,
        link=min(pairs, key=lambda pair: pair.gb_per_s, default=None),
    ).save(path)


def load_matmul_tflops(env: Env, device: str, precision: str, threads: int) -> float | None:
    """The matmul rate measured on this very hardware; a CPU's holds for as many threads only."""
    kept = _load(env, device)
    if kept is None or (device == "cpu" and kept.threads != threads):
        return None
    found = [r.tflop_per_s for r in kept.rates if r.what == "matmul" and r.precision == precision]
    return found[0] if found else None


def load_link(env: Env, device: str, num_nodes: int) -> PairSpeed | None:
    """The slowest link measured from here, over as many machines."""
    kept = _load(env, device)
    return kept.link if kept is not None and kept.num_nodes == num_nodes else None


def _load(env: Env, device: str) -> KeptRates | None:
    try:
        return KeptRates.load(_path(env, device))
    except DataError:  # never checked, or by another version
        return None


def _path(env: Env, device: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "paceline" / "rates" / f"{hardware_fingerprint(env)}-{device}.json"
