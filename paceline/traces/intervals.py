"""Intervals of time: which of them cover others. For kernels and collectives of a profile."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # from and to


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not touch, in order."""
    covered: list[Interval] = []
    for start, end in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((start, end))
    return covered


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def subtract(whole: Sequence[Interval], cut: Sequence[Interval]) -> list[Interval]:
    """Return what of `whole` no interval of `cut` covers. Both are as `merge` returns them."""
    left: list[Interval] = []
    place = 0
    for start, end in whole:
        at = start
        while place < len(cut) and cut[place][1] <= at:
            place += 1
        number = place
        while number < len(cut) and cut[number][0] < end:
            if cut[number][0] > at:
                left.append((at, cut[number][0]))
            at = max(at, cut[number][1])
            number += 1
        if at < end:
            left.append((at, end))
    return left
