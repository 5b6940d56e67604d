"""Step times of one run -> where its steady part begins, and how steady that part is.

The warm-up is found, not assumed, by MSER-5 (K. P. White, "An effective truncation heuristic for
bias reduction in simulation output", Simulation 69(6), 1997): of all places to cut, the one that
leaves the smallest standard error of the mean, counted over means of five steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

MSER_BATCH = 5
MIN_BATCHES = 8  # with fewer, single steps take the place of batches
# A step is taken to have compiled when it is this many medians long and this much longer than one.
# Nothing else is set apart: a spike that the user pays for counts.
COMPILE_MEDIANS, COMPILE_EXTRA_S = 5.0, 0.2
NUM_BLOCKS, MIN_BLOCKS = 16, 8


@dataclass(frozen=True)
class Spread:
    """How steady a window is; all but the blocks relative to the mean step time."""

    standard_error: float
    drift: float
    blocks_s: tuple[float, ...]


def find_compile_steps(step_s: Seconds) -> NDArray[np.bool_]:
    """Mark the steps that contained a compilation. Call it only for runs whose plan says that they
    compile; the median is that of the second half, which has the fewest of them."""
    usual_s = np.median(step_s[len(step_s) // 2 :])
    return (step_s > COMPILE_MEDIANS * usual_s) & (step_s > usual_s + COMPILE_EXTRA_S)


def count_warmup(step_s: Seconds) -> int:
    """Return how many steps to leave out at the start: at least the first, at most half of them.

    Spikes are bent down to a band around the median before MSER looks, or it would cut behind
    whatever spike comes early, and runs would look faster than they are.
    """
    num_steps = len(step_s)
    if num_steps < 2:
        return num_steps
    low_s, high_s = _usual_band(step_s[num_steps // 2 :])
    # 1. Skip to the first usual step. 2. From there, let MSER find what is left of the warm-up.
    is_usual = (low_s <= step_s) & (step_s <= high_s)
    first = int(np.argmax(is_usual)) if is_usual.any() else 0
    first = min(max(first, 1), num_steps // 2)
    rest = np.clip(step_s[first:], low_s, high_s)
    return first + _cut_by_mser(rest, num_steps // 2 - first)


def _usual_band(step_s: Seconds) -> tuple[float, float]:
    """Return two standard deviations around the median, at least 0.1 % of it."""
    middle = float(np.median(step_s))
    # 1.4826: from a median absolute deviation to the standard deviation of a normal law
    reach = max(2 * 1.4826 * float(np.median(np.abs(step_s - middle))), 0.001 * middle)
    return middle - reach, middle + reach


def _cut_by_mser(values: Seconds, most: int) -> int:
    """Return how many of `values` to cut, at most `most`, by MSER.

    MSER minimises the squared standard error of the mean over what is left after a cut at d:
    sum((x - mean)^2) / n^2, n being the number of batches left. Dropping a slow start lowers the
    sum more than n; dropping steady batches only lowers n. All cuts are computed at once from
    sums that run from the end to the start.
    """
    batch = MSER_BATCH if len(values) >= MSER_BATCH * MIN_BATCHES else 1
    num_batches = len(values) // batch
    means = values[: num_batches * batch].reshape(num_batches, batch).mean(axis=1)
    means = means - means.mean()  # sums of squares lose fewer digits near zero
    left = np.arange(num_batches, 0, -1)
    sums, squares = (np.cumsum(part[::-1])[::-1] for part in (means, means**2))
    error = (squares - sums**2 / left) / left**2
    candidates = error[: most // batch + 1]
    # The first of equals: rounding must not move the cut of a series that never changes.
    return int(np.argmax(candidates <= candidates.min() + 1e-12 * values.mean() ** 2)) * batch


def measure_spread(step_s: Seconds) -> Spread:
    """Return batch means over blocks that do not overlap, and the drift from start to end."""
    blocks_s = _block_means(step_s)
    num_blocks, mean_s = len(blocks_s), float(step_s.mean())
    error = blocks_s.std(ddof=1) / num_blocks**0.5 / mean_s if num_blocks > 1 else 0.0
    return Spread(
        standard_error=float(error),
        drift=_median_slope(blocks_s) * num_blocks / mean_s,
        blocks_s=tuple(blocks_s.tolist()),
    )


def _block_means(step_s: Seconds) -> Seconds:
    """Return the means of sixteen blocks, or of eight where neighbours of sixteen are still
    alike: the longer a block, the less it depends on the one before."""
    num_blocks = min(NUM_BLOCKS, len(step_s))
    means = _means_of(step_s, num_blocks)
    # 2 / sqrt(n): above it an autocorrelation of n independent values lies in 2.5 % of cases.
    if num_blocks > MIN_BLOCKS and _autocorrelation(means) > 2 / num_blocks**0.5:
        means = _means_of(step_s, MIN_BLOCKS)
    return means


def _means_of(step_s: Seconds, num_blocks: int) -> Seconds:
    """Return the means of equal blocks. What does not divide is left out at the start, nearest
    to the warm-up."""
    size = len(step_s) // num_blocks
    blocks = step_s[len(step_s) - size * num_blocks :].reshape(num_blocks, size)
    return np.asarray(blocks.mean(axis=1))


def _autocorrelation(values: Seconds) -> float:
    """Return the lag-1 autocorrelation."""
    apart = values - values.mean()
    total = float(apart @ apart)
    return float(apart[1:] @ apart[:-1]) / total if total > 0 else 0.0


def _median_slope(values: Seconds) -> float:
    """Return the slope per block as the median over all pairs (Theil-Sen): one block with a
    spike does not bend it."""
    # As scipy.stats.theilslopes, whose import alone takes longer than reading all files of a run.
    if len(values) < 2:
        return 0.0
    first, second = np.triu_indices(len(values), 1)
    return float(np.median((values[second] - values[first]) / (second - first)))
