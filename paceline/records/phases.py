"""The phases of a step: one list, in the order in which a rank goes through them.

Clocks, heartbeats, tables, blame and charts all read it; report.css has a rule for each of
`STEP_PHASES`, which a test checks.
"""

from enum import StrEnum


class Phase(StrEnum):
    """What a rank is doing. Its value is its name in heartbeats and its CSS class in a report."""

    START = "start"  # before the first step
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMM = "comm"  # waiting for another stage of a pipeline
    OPTIMIZER = "optimizer"
    OTHER = "other"  # the loop's own bookkeeping
    EVAL = "eval"
    CHECKPOINT = "checkpoint"  # between two steps

    @property
    def column(self) -> str:
        """Return its column in steps.csv, in seconds."""
        return f"{self}_s"

    @property
    def blocked_column(self) -> str:
        """Return the column of the seconds of it that were spent in collectives."""
        return f"{self}_blocked_s"

    @property
    def order(self) -> int:
        return list(Phase).index(self)


STEP_PHASES = tuple(p for p in Phase if p not in (Phase.START, Phase.CHECKPOINT))
# What a step is made of, without our own bookkeeping and the evaluation after it.
WORK_PHASES = tuple(p for p in STEP_PHASES if p not in (Phase.OTHER, Phase.EVAL))
# Where a rank does work of its own; in a pipeline `comm` is all waiting.
OWN_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
