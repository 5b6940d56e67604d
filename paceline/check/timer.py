"""Timing work that may run behind the host's back: batches between two synchronisations."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

NUM_BATCHES = 5
MAX_PER_BATCH = 500


@dataclass(frozen=True)
class Batches:
    """How often to time something: `num` batches of `size` runs."""

    num: int
    size: int


def plan_batches(trial_s: float, budget_s: float) -> Batches:
    """As many runs of `trial_s` as the budget holds, in five batches; at least one run."""
    affordable = int(budget_s / max(trial_s, 1e-9))
    if affordable < NUM_BATCHES:
        return Batches(num=max(affordable, 1), size=1)
    return Batches(num=NUM_BATCHES, size=min(affordable // NUM_BATCHES, MAX_PER_BATCH))


def time_batch(run: Callable[[], object], size: int, device: torch.device) -> float:
    """Seconds of one run, averaged over `size` runs back to back and the device's end of them."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(size):
        run()
    synchronise(device)
    return (time.perf_counter() - started) / size


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
