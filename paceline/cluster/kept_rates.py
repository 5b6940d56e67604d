"""What this machine's devices can do, kept by `paceline check` for every later run's report."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.facts import hardware_fingerprint
from paceline.cluster.measures import Rate
from paceline.errors import DataError
from paceline.records import Env, Record


class KeptRates(Record):
    """Of one rank's device, measured while all ranks of the machine measured theirs."""

    measured_at: float
    threads: int
    rates: list[Rate]


def keep_rates(env: Env, device: str, threads: int, rates: Sequence[Rate]) -> None:
    path = _path(env, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    KeptRates(measured_at=time.time(), threads=threads, rates=list(rates)).save(path)


def load_matmul_tflops(env: Env, device: str, precision: str, threads: int) -> float | None:
    """The matmul rate measured on this very hardware; a CPU's holds for as many threads only."""
    try:
        kept = KeptRates.load(_path(env, device))
    except DataError:  # never checked, or by another version
        return None
    if device == "cpu" and kept.threads != threads:
        return None
    found = [r.tflop_per_s for r in kept.rates if r.what == "matmul" and r.precision == precision]
    return found[0] if found else None


def _path(env: Env, device: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "paceline" / "rates" / f"{hardware_fingerprint(env)}-{device}.json"
