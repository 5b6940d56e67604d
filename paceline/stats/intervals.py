"""Numbers of repeated runs -> intervals, for one group of runs and for the ratio of two.

The unit is the run. All is done on logarithms, where a ratio is a difference, and noise that grows
with the value has one size. docs/statistics.md tells the method and what was measured of it.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

# No machine is assumed to repeat itself better than this (relative standard deviation): runs that
# came out equal to the last digit are luck or a coarse clock, not certainty.
SMALLEST_NOISE = 0.001
TABLE_ROWS = (*range(1, 21), 24, 30, 40, 60, 120)  # degrees of freedom
MAX_LOG = math.log(sys.float_info.max)


class Interval(NamedTuple):
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Noise:
    """What one run scatters: the variance of its logarithm, and how well that is known."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Sample:
    """A group's runs on the log scale. `own` is None for a single run; `leaned` is what the group
    is compared with, and is None where nothing was ever repeated."""

    num_runs: int
    mean: float
    own: Noise | None
    leaned: Noise | None

    def interval(self, confidence: float) -> Interval | None:
        """Return the interval of the group's typical value: Student's t over its own runs, or
        over the noise of the others for a single run."""
        noise = self.own or self.leaned
        if noise is None:
            return None
        reach = _student(1 - (1 - confidence) / 2, noise.freedom)
        return around(self.mean, reach * math.sqrt(noise.variance / self.num_runs))


def around(mean: float, reach: float) -> Interval:
    """Turn a mean and a reach on the log scale into an interval of values. A few runs that lie far
    apart may reach beyond any float: then it ends at the last."""
    value, low, high = (math.exp(min(at, MAX_LOG)) for at in (mean, mean - reach, mean + reach))
    return Interval(value, low, high)


def measure_samples(groups: Sequence[Sequence[float]]) -> list[Sample]:
    """Return the sample of each group; each group has at least one run."""
    logs = [np.log(values) for values in groups]
    owns = [
        Noise(max(float(values.var(ddof=1)), SMALLEST_NOISE**2), len(values) - 1)
        if len(values) > 1
        else None
        for values in logs
    ]
    return [
        Sample(len(values), float(values.mean()), own, _lean(own, owns[:n] + owns[n + 1 :]))
        for n, (values, own) in enumerate(zip(logs, owns, strict=True))
    ]


def pool(noises: Sequence[Noise | None]) -> Noise | None:
    """Return one noise for all, each weighed by its degrees of freedom."""
    known = [noise for noise in noises if noise is not None]
    freedom = sum(noise.freedom for noise in known)
    if not freedom:
        return None
    return Noise(sum(noise.variance * noise.freedom for noise in known) / freedom, freedom)


def _lean(own: Noise | None, others: Sequence[Noise | None]) -> Noise | None:
    """Join a group's own noise with that of the other groups, as far as they agree.

    Three runs say little about noise, twelve groups of three say much. The others count with a
    share of their degrees of freedom: the probability that a group as noisy as they are would
    scatter at least as much as this one did (F test). A group that is clearly noisier has a share
    near 0 and stands on its own; a quiet one does not profit from its luck. This is the moderated
    variance of Smyth 2004 (limma) with a weight of each group's own, as in Phipson et al. 2016.
    """
    rest = pool(others)
    if own is None or rest is None:
        return own or rest
    ratio = own.variance / rest.variance
    share = float(special.fdtrc(own.freedom, rest.freedom, ratio))
    lent = Noise(rest.variance, share * rest.freedom)
    return pool([own, lent])


@dataclass(frozen=True)
class Ruler:
    """How far two of several groups must lie apart to be told apart, in all comparisons together.

    `num_comparisons` None: any two may be compared, as when the best was picked after looking
    (studentized range, Tukey-Kramer). A number: that many were named before (Bonferroni's t).
    """

    num_groups: int
    freedom: float  # of all groups' noise together: no comparison can know more
    confidence: float
    num_comparisons: int | None = None

    def reach(self, one: Sample, other: Sample, more: int = 0) -> float | None:
        """Return half the width of the interval of their log ratio; None where no noise is known.
        `more`: as it would be with so many more runs in every group."""
        if one.leaned is None or other.leaned is None:
            return None
        part = one.leaned.variance / (one.num_runs + more)
        other_part = other.leaned.variance / (other.num_runs + more)
        both = part + other_part
        # Degrees of freedom of a difference of means with unequal variances (Welch-Satterthwaite).
        freedom = both**2 / (part**2 / one.leaned.freedom + other_part**2 / other.leaned.freedom)
        # Every group gets `more` runs, so the pooled degrees of freedom grow by as many each.
        growth = 1 + more * self.num_groups / self.freedom
        return self._critical(min(freedom, self.freedom) * growth) * math.sqrt(both)

    def _critical(self, freedom: float) -> float:
        if self.num_groups > 2 and self.num_comparisons is None:
            # Downwards, as in a printed table: wide rather than narrow.
            row = bisect_right(TABLE_ROWS, freedom) - 1
            return _tukey(self.confidence, self.num_groups, TABLE_ROWS[max(row, 0)])
        tail = (1 - self.confidence) / 2 / (self.num_comparisons or 1)
        return _student(1 - tail, freedom)


def _student(share: float, freedom: float) -> float:
    return float(special.stdtrit(freedom, share))


@lru_cache(maxsize=1024)
def _tukey(confidence: float, num_groups: int, freedom: int) -> float:
    """Compute what scipy.stats.studentized_range.ppf does (over the root of 2, as a multiple of the
    standard error), 20 times faster: a table that is redrawn cannot wait for seconds.

    The range of normal values is below q with the probability inside the integral over z; q is
    stretched by the noise's own error, averaged over equal steps of that error's probability.
    """
    # Outer integral, over the estimated noise: 64 Gauss-Legendre nodes in its probability (0 to 1).
    nodes, weights = np.polynomial.legendre.leggauss(64)
    stretch = np.sqrt(special.chdtri(freedom, (nodes + 1) / 2) / freedom)
    # Inner integral: the largest of the values is at z, and all others at most q below it.
    z, step = np.linspace(-8, 8, 161, retstep=True)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * step
    below = special.ndtr(z)[:, None]

    def excess(q: float) -> float:
        within = (below - special.ndtr(z[:, None] - q * stretch)) ** (num_groups - 1)
        return float(num_groups * density @ within @ weights / 2) - confidence

    return float(optimize.brentq(excess, 0.1, 10_000, xtol=1e-4)) / math.sqrt(2)
