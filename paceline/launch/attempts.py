"""Attempts: after a failure all ranks start again from the last checkpoint, a limited number of
times.

Here is the policy, the same for ranks that we fork (local.py) and for those that each have a
supervisor of their own (member.py): which failures are worth another attempt, and when two of them
are the same one.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.errors import DiskError, is_retryable_kind
from paceline.launch.archive import archive_attempt, begin_attempt, finish_attempt
from paceline.launch.deadlines import missed_deadline
from paceline.launch.ending import Ending, LaunchEnd, judge_end
from paceline.launch.signals import SignalLog, logged_signals
from paceline.launch.supervisor import log_line
from paceline.records import Attempt, LaunchPlan, Limits
from paceline.records.rundir import RunDir

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
) -> Ending:
    """Start ranks until they end well or another attempt is not worth it; return how the last one
    ended. `publish_next` is called after each attempt: with its number if another one follows, and
    with None if none does. A task that keeps no attempt.json has one attempt."""
    began_at, before = time.monotonic(), None
    with logged_signals() as signals:
        for restarts in itertools.count():
            seen = start(Start(_what_is_left(launch.limits, began_at), signals))
            ending = judge_end(run, launch.crew.world_size, seen)
            if not run.attempt.is_file():  # a check, a proof: nothing to go on from
                break
            decision = decide(launch, before, ending, restarts)
            if decision.again and signals.stops:
                # It came after the ranks had failed, when none was there to be asked: the user
                # wants the end, so this attempt ends as stopped and nothing starts again.
                seen = replace(seen, signal=signals.first)
                ending, decision = judge_end(run, launch.crew.world_size, seen), Decision(False)
            ended = _finish(run, ending, decision.why_not)
            if not decision.again:
                break
            # The order matters to a kill at any point: attempt.json of the ended attempt is moved
            # last (archive.py), the next one's is written before other supervisors hear of it.
            log_line(run, f"attempt {ended.number} failed: {ended.cause}: all ranks start again")
            try:
                archive_attempt(run, ended)
                begin_attempt(run, True, ended.halt_seen, ended.allow_change)
            except OSError as error:  # the disk is full; what has failed is archived last
                why_not = f"not started again: {DiskError.of(error).problems[0]}"
                log_line(run, why_not)
                if run.attempt.is_file():
                    _finish(run, ending, why_not)
                break
            publish_next(ended.number)
            before = ending
    publish_next(None)
    return ending


def decide(launch: LaunchPlan, before: Ending | None, now: Ending, restarts: int) -> Decision:
    """Decide whether to start another attempt. If one was allowed but does not follow, the reason
    is given."""
    if launch.max_restarts == 0 or now.seen.signal is not None or not is_worth_another(now):
        return Decision(False)
    missing = [rank for rank in range(now.num_ranks) if rank not in now.seen.ends]
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


def is_worth_another(ending: Ending) -> bool:
    """Return True for a failure that may not happen again. A refusal and a bad loss would; and
    launch.total_s is over for any attempt."""
    if ending.seen.refusal or missed_deadline(ending.seen.ends) == "total":
        return False
    return ending.outcome.is_retryable or is_retryable_kind(ending.kind)


def are_alike(one: Ending, other: Ending) -> bool:
    """Return True for the same rank, step and message: a third attempt would end the same way."""
    a, b = one.failure, other.failure
    if a is None or b is None or a.rank != b.rank:
        return False
    if a.message.partition("\n")[0] != b.message.partition("\n")[0]:
        return False
    return a.step == b.step


def _finish(run: RunDir, ending: Ending, why_not: str) -> Attempt:
    failure = ending.failure
    cause = f"rank {failure.rank} at step {failure.step}: {failure.message}" if failure else ""
    number = Attempt.load(run.attempt).number
    if why_not and number > 1:
        why_not += f"; what attempt {number - 1} left is in attempts/{number - 1}"
    return finish_attempt(run, ending, cause, why_not)


def _what_is_left(limits: Limits, began_at: float) -> Limits:
    """Return the limits of the next attempt: launch.total_s is for all of them together."""
    if limits.total_s is None:
        return limits
    left_s = limits.total_s - (time.monotonic() - began_at)
    return limits.model_copy(update={"total_s": max(LAST_MOMENT_S, left_s)})
