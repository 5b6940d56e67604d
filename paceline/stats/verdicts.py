"""An interval of a speedup -> one of four verdicts, in words that a person can act on."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["faster", "slower", "no difference seen", "not enough data"]
OPPOSITE: dict[Kind, Kind] = {"faster": "slower", "slower": "faster"}
MOST_REPEATS = 100
FIRST_REPEATS = 2  # where nothing was repeated, there is no noise to compute from


@dataclass(frozen=True)
class Verdict:
    """`more_repeats`: a group, for an answer at today's noise; above MOST_REPEATS: more than that;
    None where repeats are not what is missing."""

    kind: Kind
    more_repeats: int | None = None

    def __str__(self) -> str:
        if self.more_repeats is None:
            return self.kind
        if self.more_repeats > MOST_REPEATS:
            return f"{self.kind} (needs more than {MOST_REPEATS} more repeats)"
        plural = "" if self.more_repeats == 1 else "s"
        return f"{self.kind} (needs about {self.more_repeats} more repeat{plural})"

    def mirrored(self) -> "Verdict":
        """The same, seen from the other side."""
        return Verdict(OPPOSITE.get(self.kind, self.kind), self.more_repeats)


def judge(gain: float, reach: Callable[[int], float | None], margin: float) -> Verdict:
    """`gain`: log of the speedup. `reach(more)`: half the width of its interval, with so many more
    repeats. A gain inside the margin in all its width is no difference, however sure it is."""
    now = reach(0)
    if now is None:
        return Verdict("not enough data", FIRST_REPEATS)
    edge = math.log1p(margin)
    if abs(gain) + now < edge:
        return Verdict("no difference seen")
    if abs(gain) > now:
        return Verdict("faster" if gain > 0 else "slower")

    def would_do(more: int) -> bool:
        later = reach(more)
        return later is not None and later < max(abs(gain), edge - abs(gain))

    more = 1 + bisect_left(range(1, MOST_REPEATS + 1), True, key=would_do)
    return Verdict("not enough data", more)
