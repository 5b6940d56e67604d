"""Acceptance: a limit, and whether an interval lies beyond it."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.errors import ConfigError
from paceline.stats.figures import METRICS, is_speed, lower_is_better, require_metric
from paceline.stats.intervals import Interval

SPEEDUP = "speedup"
State = Literal["met", "missed", "open"]


class Target(NamedTuple):
    """A limit on a metric: `speedup>=1.08`, `tokens_per_s>=39`, `tail_mean_iter_p50_ms<=12`,
    `val/wer<=0.2`."""

    metric: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        found = re.fullmatch(r"\s*([\w/.@-]+)\s*(>=|<=)\s*([0-9.eE+-]+)\s*", text)
        known = [SPEEDUP, *METRICS]
        try:
            if found is None:
                raise ValueError
            limit = float(found[3])
            if found[1] not in known:  # the sign says which way is better
                way = "min" if found[2] == "<=" else "max"
                return cls(require_metric(f"{found[1]}:{way}"), found[2], limit)
        except ValueError as error:
            raise ConfigError(
                f"the target '{text}' is not one of {', '.join(known)}, val/NAME with >= or <= and"
                " a number\n"
                'hint: --target "speedup>=1.08" --baseline CELL, or --target "tokens_per_s>=39"'
            ) from error
        wanted = "<=" if is_speed(found[1]) and lower_is_better(found[1]) else ">="
        if found[2] != wanted:
            raise ConfigError(f"the target '{text}' asks to be worse\nhint: {found[1]}{wanted}...")
        return cls(found[1], found[2], limit)


@dataclass(frozen=True)
class TargetResult:
    """Hold how the winner stands to the target. `open`: the interval holds the limit, so that
    more repeats are needed to tell."""

    text: str
    group: str
    found: Interval | None
    state: State
    because: str

    @property
    def is_met(self) -> bool:
        return self.state == "met"


def hold(target: Target, found: Interval | None) -> tuple[State, str]:
    """Hold an interval against a limit: met only when the whole interval is on the right side of
    it."""
    if found is None:
        return "open", f"{target.metric} has no interval: it needs more repeats, or steps"
    sign = -1 if target.sign == "<=" else 1
    low, high = sorted((sign * found.low, sign * found.high))
    text = f"{target.metric} is {found.value:.4g} ({found.low:.4g} to {found.high:.4g})"
    if low >= sign * target.limit:
        return "met", text
    if high < sign * target.limit:
        return "missed", text
    side = "reached" if sign * found.value >= sign * target.limit else "not reached"
    return "open", f"{text}: {side}, but not shown; it needs more repeats"
