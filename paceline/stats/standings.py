"""Groups of runs -> who is faster than whom, in one of four verdicts that a person can act on,
and the set of winners that cannot be told apart."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from paceline.errors import DataError
from paceline.stats.intervals import Interval, Ruler, Sample, around, measure_samples, pool

MARGIN, CONFIDENCE = 0.02, 0.95
Kind = Literal["faster", "slower", "no difference seen", "not enough data"]
OPPOSITE: dict[Kind, Kind] = {"faster": "slower", "slower": "faster"}
QUALITY = {"faster": "better", "slower": "worse"}
MOST_REPEATS = 100
FIRST_REPEATS = 2  # where nothing was repeated, there is no noise to compute from


@dataclass(frozen=True)
class Verdict:
    """One of four answers. `more_repeats`: how many more runs per group would give an answer at
    today's noise; above MOST_REPEATS: more than that; None where repeats are not what is
    missing."""

    kind: Kind
    more_repeats: int | None = None
    is_speed: bool = True  # else it is told as better or worse

    def __str__(self) -> str:
        kind = self.kind if self.is_speed else QUALITY.get(self.kind, self.kind)
        if self.more_repeats is None:
            return kind
        if self.more_repeats > MOST_REPEATS:
            return f"{kind} (needs more than {MOST_REPEATS} more repeats)"
        plural = "" if self.more_repeats == 1 else "s"
        return f"{kind} (needs about {self.more_repeats} more repeat{plural})"

    def mirrored(self) -> "Verdict":
        """Return the same verdict, seen from the other side."""
        return Verdict(OPPOSITE.get(self.kind, self.kind), self.more_repeats)


def judge(gain: float, reach: Callable[[int], float | None], margin: float) -> Verdict:
    """Turn a speedup into a verdict. `gain`: log of the speedup. `reach(more)`: half the width
    of its interval, with so many more repeats. A gain whose whole interval is inside the margin
    is not a difference, however sure it is."""
    now = reach(0)
    if now is None:
        return Verdict("not enough data", FIRST_REPEATS)
    edge = math.log1p(margin)
    if abs(gain) + now < edge:
        return Verdict("no difference seen")
    if abs(gain) > now:
        return Verdict("faster" if gain > 0 else "slower")

    # Enough repeats show either that the gain is not zero, or that it is inside the margin.
    def would_do(more: int) -> bool:
        later = reach(more)
        return later is not None and later < max(abs(gain), edge - abs(gain))

    # An interval shrinks with every repeat, so bisection finds the first number that would do.
    more = 1 + bisect_left(range(1, MOST_REPEATS + 1), True, key=would_do)
    return Verdict("not enough data", more)


NO_RUNS = Verdict("not enough data")  # it failed or was refused: repeats are not what it lacks


@dataclass(frozen=True)
class Group:
    """One configuration: one number per run (none: all failed), and its peak memory."""

    name: str
    values: tuple[float, ...]
    memory_bytes: float | None = None

    @property
    def variation(self) -> float | None:
        """Return the standard deviation of its runs over their mean."""
        return stdev(self.values) / fmean(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Standing:
    """`rate` is the group's typical value with its interval; of what is not a speed, and may have
    bounds that an interval on a log scale would leave, with the least and the most of its runs.
    `speedup` and `verdict` are against the reference; above 1 is better for every metric.
    The reference itself has speedup 1. As a baseline its verdict is "no difference seen"; as the
    best group it is the verdict against its nearest rival, "faster" only if it beats them all."""

    group: Group
    rate: Interval | None
    speedup: Interval | None
    verdict: Verdict
    is_winner: bool

    @property
    def value(self) -> float:
        """Return the middle of the interval, or the mean where there are too few runs to have
        one."""
        return self.rate.value if self.rate else fmean(self.group.values)

    @property
    def variation(self) -> float | None:
        return self.group.variation


@dataclass(frozen=True)
class Standings:
    """`rows`: winners, by lower memory, then by lower variation; then the rest, best first. Among
    winners those come first whose mean is within the margin of the best: one that looks slower
    may be there only for want of repeats."""

    rows: tuple[Standing, ...]
    reference: str
    is_baseline: bool
    noise: float | None  # standard deviation from run to run over all groups, relative
    best_name: str

    @property
    def winners(self) -> list[Standing]:
        return [row for row in self.rows if row.is_winner]

    @property
    def best(self) -> Standing:
        """Return the group with the best mean. Which of the winners to take is the order of
        `rows`."""
        return self.of(self.best_name)

    def of(self, name: str) -> Standing:
        return next(row for row in self.rows if row.group.name == name)


def compare_groups(
    groups: Sequence[Group], *, baseline: str | None = None, lower_is_better: bool = False,
    margin: float = MARGIN, confidence: float = CONFIDENCE, is_speed: bool = True,
) -> Standings:  # fmt: skip
    """Compare every group with the baseline, or with the best if none is named. All verdicts
    together are wrong in at most 1 - `confidence` of comparisons (measured: docs/statistics.md).
    Verdicts about something other than speed say better or worse."""
    _require_sound(groups, baseline, margin, confidence)
    running = [group for group in groups if group.values]
    samples = dict(
        zip([g.name for g in running], measure_samples([g.values for g in running]), strict=True)
    )
    table = _Table(samples, -1.0 if lower_is_better else 1.0, margin, confidence)
    reference = table.best if baseline is None else baseline
    standings = [
        Standing(
            group=group,
            rate=_interval(group, samples[group.name], is_speed, confidence)
            if group.values
            else None,
            speedup=table.speedup(group.name, reference, baseline is not None),
            verdict=replace(
                table.verdict(group.name, reference, baseline is not None), is_speed=is_speed
            ),
            is_winner=table.is_winner(group.name),
        )
        for group in groups
    ]
    noise = table.noise
    return Standings(
        rows=tuple(sorted(standings, key=table.order)),
        reference=reference,
        is_baseline=baseline is not None,
        noise=math.sqrt(noise.variance) if noise else None,
        best_name=table.best,
    )


def _interval(group: Group, sample: Sample, is_speed: bool, confidence: float) -> Interval | None:
    if is_speed:
        return sample.interval(confidence)
    ends = Interval(math.exp(sample.mean), min(group.values), max(group.values))
    return ends if len(group.values) > 1 else None


class _Table:
    """All pairs of groups on the log scale; `sign` makes a higher gain the better one."""

    def __init__(
        self, samples: dict[str, Sample], sign: float, margin: float, confidence: float
    ) -> None:
        self.samples, self.sign, self.margin = samples, sign, margin
        self.noise = pool([sample.own for sample in samples.values()])
        freedom = self.noise.freedom if self.noise else 0
        num = len(samples)
        self._any_pair = Ruler(num, freedom, confidence)
        self._named = Ruler(num, freedom, confidence, num_comparisons=max(1, num - 1))
        self.best = max(samples, key=lambda name: sign * samples[name].mean)

    def gain(self, name: str, reference: str) -> float:
        return self.sign * (self.samples[name].mean - self.samples[reference].mean)

    def reach(self, name: str, reference: str, is_named: bool, more: int = 0) -> float | None:
        ruler = self._named if is_named else self._any_pair
        return ruler.reach(self.samples[name], self.samples[reference], more)

    def speedup(self, name: str, reference: str, is_named: bool) -> Interval | None:
        if name not in self.samples or reference not in self.samples:
            return None
        if name == reference:
            return Interval(1.0, 1.0, 1.0)
        reach = self.reach(name, reference, is_named)
        return None if reach is None else around(self.gain(name, reference), reach)

    def verdict(self, name: str, reference: str, is_named: bool) -> Verdict:
        if name not in self.samples or reference not in self.samples:
            return NO_RUNS
        if name != reference:
            return self._judge(name, reference, is_named)
        return Verdict("no difference seen") if is_named else self._verdict_of_best()

    def is_winner(self, name: str) -> bool:
        """Say whether a group cannot be distinguished from the best. A baseline does not matter
        here."""
        if name not in self.samples:
            return False
        return name == self.best or self._judge(name, self.best, False).kind != "slower"

    def order(self, row: Standing) -> tuple[float, ...]:
        """Return the key that rows are sorted by, as `Standings` describes."""
        group = row.group
        if row.is_winner:
            memory, variation = group.memory_bytes, group.variation
            is_far = self.gain(self.best, group.name) > math.log1p(self.margin)
            return (
                0,
                is_far,
                math.inf if memory is None else memory,
                math.inf if variation is None else variation,
            )
        has_runs = group.name in self.samples
        return (1, self.gain(self.best, group.name)) if has_runs else (2,)

    def _judge(self, name: str, reference: str, is_named: bool) -> Verdict:
        return judge(
            self.gain(name, reference),
            lambda more: self.reach(name, reference, is_named, more),
            self.margin,
        )

    def _verdict_of_best(self) -> Verdict:
        rivals = [name for name in self.samples if name != self.best]
        if not rivals:
            return NO_RUNS

        def nearness(name: str) -> float:
            """Return the least that the best may be ahead of `name`: a far but noisy rival is
            near."""
            return self.gain(self.best, name) - (self.reach(self.best, name, False) or 0.0)

        return self._judge(min(rivals, key=nearness), self.best, False).mirrored()


def _require_sound(
    groups: Sequence[Group], baseline: str | None, margin: float, confidence: float
) -> None:
    names = [group.name for group in groups]
    problems = [
        f"{group.name}: {value} cannot be compared; a value must be finite and above 0"
        for group in groups
        for value in group.values
        if not (math.isfinite(value) and value > 0)
    ]
    problems += [
        f"{name} is named twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if baseline is not None and baseline not in names:
        problems.append(f"baseline {baseline!r} is none of {', '.join(names)}")
    if not any(group.values for group in groups):
        problems.append("no group has a run to compare")
    if not (math.isfinite(margin) and margin >= 0):
        problems.append(f"the margin must be 0 or more, not {margin}")
    if not 0.5 <= confidence < 1:
        problems.append(f"the confidence must lie between 0.5 and 1, not {confidence}")
    if problems:
        raise DataError("\n".join(problems))
