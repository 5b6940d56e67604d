"""Cuts a recording, where it is quiet, into pieces that a model can hear at once.

cut_quietly(samples, most=480_000, rate=16000)       [(0, 471_200), (471_200, 912_800), ...]
"""

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

SEARCHED = 1 / 3  # of a piece's end is looked through for a pause
PAUSE_S, STEP_S = 0.2, 0.01  # as long as a pause between words; how exactly it is found


def cut_quietly(samples: Samples, most: int, rate: int) -> list[tuple[int, int]]:
    """Return where pieces of at most `most` samples begin and end: one behind the other, nothing
    left out. Each ends in the quietest moment of its last third."""
    found, first = [], 0
    while len(samples) - first > most:
        begin = first + round(most * (1 - SEARCHED))
        end = begin + _quietest(samples[begin : first + most], rate)
        found.append((first, end))
        first = end
    return [*found, (first, len(samples))]


def _quietest(samples: Samples, rate: int) -> int:
    """Return the middle of the stretch of PAUSE_S with the least energy; of several the last."""
    step = max(1, round(STEP_S * rate))
    num_steps = len(samples) // step
    energy = np.square(samples[: num_steps * step].reshape(num_steps, step)).sum(axis=1)
    width = min(round(PAUSE_S / STEP_S), num_steps)
    sums = np.convolve(energy, np.ones(width), mode="valid")
    last = num_steps - width - int(np.argmin(sums[::-1]))
    return (last + width // 2) * step
