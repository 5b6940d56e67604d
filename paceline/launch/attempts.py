"""Attempts: after a failure all ranks start again from the last checkpoint, so often and no more.

Here is the policy, the same for ranks of our own (local.py) and for members (member.py): which
failures are worth another attempt, and when two of them are the same one.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.errors import LoaderError, Outcome
from paceline.launch.archive import archive_attempt, begin_attempt, finish_attempt
from paceline.launch.base import LaunchEnd
from paceline.launch.blame import missed_deadline
from paceline.launch.ending import Ending, judge_end
from paceline.launch.signals import SignalLog, logged_signals
from paceline.launch.supervisor import log_line
from paceline.records import Attempt, LaunchPlan, Limits
from paceline.records.rundir import RunDir

WORTH_ANOTHER = (Outcome.CRASHED, Outcome.STALL, Outcome.OUT_OF_RESOURCES)
LAST_MOMENT_S = 0.1


@dataclass(frozen=True)
class Start:
    """What differs between two starts of the same ranks."""

    limits: Limits
    signals: SignalLog


@dataclass(frozen=True)
class Decision:
    again: bool
    why_not: str = ""  # where another attempt might have followed


def run_attempts(
    launch: LaunchPlan,
    run: RunDir,
    start: Callable[[Start], LaunchEnd],
    publish_next: Callable[[int | None], None] = lambda number: None,
) -> LaunchEnd:
    """Start ranks until they end well or another attempt is not worth it. `publish_next` is told
    the number of an attempt that another one follows, or None. Without attempt.json it is one."""
    began_at, before = time.monotonic(), None
    with logged_signals() as signals:
        for restarts in itertools.count():
            end = start(Start(_what_is_left(launch.limits, began_at), signals))
            if not run.attempt.is_file():  # a check, a proof: nothing to go on from
                break
            ending = judge_end(run, launch.crew.world_size, end)
            decision = decide(launch, end, (before, ending), restarts)
            if decision.again and signals.stops:  # it came when no rank was there to hear it
                end = replace(end, signal=signals.first)
                ending, decision = judge_end(run, launch.crew.world_size, end), Decision(False)
            ended = _finish(run, launch, ending, decision.why_not)
            if not decision.again:
                break
            log_line(run, f"attempt {ended.number} failed: {ended.cause}: all ranks start again")
            archive_attempt(run, ended)
            begin_attempt(run, True, ended.halt_seen, ended.allow_change)
            publish_next(ended.number)
            before = ending
    publish_next(None)
    return end


def decide(
    launch: LaunchPlan, end: LaunchEnd, last_two: tuple[Ending | None, Ending], restarts: int
) -> Decision:
    """Is another attempt worth it?"""
    before, now = last_two
    if launch.max_restarts == 0 or end.signal is not None or not is_worth_another(now, end):
        return Decision(False)
    missing = [rank for rank in range(launch.crew.world_size) if rank not in end.ends]
    if missing:
        return Decision(False, f"not started again: rank {missing[0]} has no supervisor any more")
    if before is not None and are_alike(before, now):
        assert now.failure is not None, "only failures are alike"
        what = now.failure.message.partition("\n")[0]
        return Decision(
            False,
            f"not started again: the last two attempts failed alike, rank {now.failure.rank} at"
            f" step {now.failure.step} ({what})",
        )
    if restarts >= launch.max_restarts:
        return Decision(False, f"not started again: launch.max_restarts is {launch.max_restarts}")
    return Decision(True)


def is_worth_another(ending: Ending, end: LaunchEnd) -> bool:
    """A rank that died may not die again; a refusal stays one, and so does a bad loss."""
    if end.refusal or missed_deadline(end.ends) == "total":
        return False
    return ending.outcome in WORTH_ANOTHER or ending.kind == LoaderError.__name__


def are_alike(one: Ending, other: Ending) -> bool:
    """The same rank, step and words: a third time would be the same."""
    a, b = one.failure, other.failure
    if a is None or b is None or a.rank != b.rank:
        return False
    if a.message.partition("\n")[0] != b.message.partition("\n")[0]:
        return False
    return a.step == b.step


def _finish(run: RunDir, launch: LaunchPlan, ending: Ending, why_not: str) -> Attempt:
    failure = ending.failure
    cause = f"rank {failure.rank} at step {failure.step}: {failure.message}" if failure else ""
    number = Attempt.load(run.attempt).number
    if why_not and number > 1:
        why_not += f"; what attempt {number - 1} left is in attempts/{number - 1}"
    return finish_attempt(run, launch.crew.world_size, ending.outcome, cause, why_not)


def _what_is_left(limits: Limits, began_at: float) -> Limits:
    """launch.total_s is for all attempts together."""
    if limits.total_s is None:
        return limits
    left_s = limits.total_s - (time.monotonic() - began_at)
    return limits.model_copy(update={"total_s": max(LAST_MOMENT_S, left_s)})
