"""A series of numbers of any length, kept in bounded memory.

Values are kept one by one until there are too many; then neighbours are merged, two into one, and
from there on each bin holds twice as many. A bin knows its least, mean and largest value, so that a
spike of one step in 100,000 is still seen.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

MAX_BINS = 400  # as many points as a chart of the report has


@dataclass
class Series:
    """Values over steps or seconds. `width` is how many values a whole bin has."""

    width: int = 1
    x: list[float] = field(default_factory=list)  # of the last value of each bin
    count: list[int] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    last: float | None = None

    def copy(self) -> "Series":
        """Return a copy that does not grow with this one."""
        return replace(
            self, x=[*self.x], count=[*self.count], total=[*self.total], low=[*self.low],
            high=[*self.high],
        )  # fmt: skip

    def add(self, x: float, value: float) -> None:
        if self.count and self.count[-1] < self.width:
            self.x[-1], self.total[-1] = x, self.total[-1] + value
            self.count[-1] += 1
            self.low[-1] = min(self.low[-1], value)
            self.high[-1] = max(self.high[-1], value)
        else:
            self._append(x, 1, value, value, value)
        self.last = value

    def extend(self, xs: NDArray[Any], values: NDArray[Any]) -> None:
        """Take in many values at once: whole bins by numpy, the rest one by one."""
        place = 0
        while place < len(values):
            is_aligned = not self.count or self.count[-1] == self.width
            num_whole = (len(values) - place) // self.width
            room = MAX_BINS - len(self.x)
            if not is_aligned or num_whole == 0 or self.width == 1 and num_whole < 8:
                self.add(float(xs[place]), float(values[place]))
                place += 1
                continue
            taken = min(num_whole, max(room, 1))
            end = place + taken * self.width
            parts = values[place:end].astype(float).reshape(taken, self.width)
            self.x += xs[place:end].astype(float)[self.width - 1 :: self.width].tolist()
            self.count += [self.width] * taken
            self.total += parts.sum(axis=1).tolist()
            self.low += parts.min(axis=1).tolist()
            self.high += parts.max(axis=1).tolist()
            self.last, place = float(values[end - 1]), end
            self._fit()

    def _append(self, x: float, count: int, total: float, low: float, high: float) -> None:
        self.x.append(x)
        self.count.append(count)
        self.total.append(total)
        self.low.append(low)
        self.high.append(high)
        self._fit()

    def _fit(self) -> None:
        """Merge neighbours once there are more bins than fit. The last one may stay alone."""
        while len(self.x) > MAX_BINS:
            pairs = range(0, len(self.x), 2)
            self.x = [self.x[min(i + 1, len(self.x) - 1)] for i in pairs]
            self.count = [sum(self.count[i : i + 2]) for i in pairs]
            self.total = [sum(self.total[i : i + 2]) for i in pairs]
            self.low = [min(self.low[i : i + 2]) for i in pairs]
            self.high = [max(self.high[i : i + 2]) for i in pairs]
            self.width *= 2

    @property
    def mean(self) -> list[float]:
        return [total / count for total, count in zip(self.total, self.count, strict=True)]

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.x, self.mean, strict=True))

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """Return least and largest of each bin; nothing if each bin is one value."""
        return list(zip(self.x, self.low, self.high, strict=True)) if self.width > 1 else []
