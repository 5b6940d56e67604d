"""The only training loop. It drives any engine and never asks which one it is.

    begin -> data -> forward and backward -> update -> other (record) -> eval -> checkpoint -> ...

Nothing in a step waits for the device. The host learns one step late that an update was vetoed.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.config.schema import RunConfig
from paceline.data.cursor import Indices
from paceline.errors import Outcome
from paceline.records import Plan
from paceline.records.phases import Phase
from paceline.strategies.base import Engine
from paceline.strategies.clock import Clock
from paceline.train.audit import Auditor
from paceline.train.evaluation import Evaluation
from paceline.train.feed import Feed
from paceline.train.hooks import Hooks
from paceline.train.keeper import Keeper
from paceline.train.ledger import Ledger
from paceline.train.observers import Observers
from paceline.train.verdict import require_fitting, require_memory

LATENESS = 1  # steps after which the host must know how a step went


@dataclass(frozen=True)
class Start:
    """Where the loop begins: at step 1, or where a checkpoint says."""

    first_step: int = 1
    num_skips: int = 0
    evaluation_is_due: bool = False


@dataclass(frozen=True)
class LoopParts:
    config: RunConfig
    plan: Plan
    engine: Engine
    feed: Feed
    clock: Clock
    ledger: Ledger
    auditor: Auditor
    evaluation: Evaluation
    keeper: Keeper
    observers: Observers
    rate: Callable[[int], float]  # the learning rate of a step
    hooks: Hooks = Hooks()
    samples: tuple[Callable[[int], None], ...] = ()  # write texts, where some are asked for
    start: Start = Start()


@dataclass(frozen=True)
class LoopEnd:
    """Why the loop stopped. `sample_ids` are this rank's in the step that was vetoed; `why_early`
    says why a run that ended well took fewer steps than planned."""

    outcome: Outcome
    step: int
    bad_step: int | None = None
    sample_ids: tuple[int, ...] = ()
    loss_was_finite: bool = True
    why_early: str = ""


def train(parts: LoopParts) -> LoopEnd:
    """Take the steps that are left; end early when asked to, or when too many were vetoed."""
    try:
        return _train(parts)
    except BaseException:
        with suppress(RuntimeError):  # a device in error answers nothing more
            parts.ledger.abandon()
        raise


def _train(parts: LoopParts) -> LoopEnd:
    plan, engine, clock, ledger = parts.plan, parts.engine, parts.clock, parts.ledger
    keeper, judge = parts.keeper, _Judge(parts)
    end = _before(parts)
    for step in range(parts.start.first_step, plan.steps + 1) if end is None else ():
        clock.begin(step)
        parts.auditor.begin(step)
        parts.observers.begin(step, is_free=not parts.auditor.is_profiling)
        batch = parts.feed.next(clock)
        try:
            totals = engine.forward_backward(batch.batches, batch.scale, clock)
        except (RuntimeError, ValueError, IndexError) as error:
            named = parts.feed.name(index for ids in batch.sample_ids for index in ids)
            require_memory(error, batch.batches, named)
            require_fitting(error, batch.batches, named)
            raise
        lr = parts.rate(step)
        info = engine.step(lr, clock)
        parts.auditor.end(step)

        clock.enter(Phase.OTHER)
        parts.observers.end(step)
        judge.remember(step, batch.sample_ids)
        ledger.record(step, lr, totals, info, batch)
        ledger.note_samples(step, batch.sample_ids)
        end = judge.verdict(step, ledger.vetoes(through=step - LATENESS))
        if end is not None:
            break
        ledger.settle(step)
        why_over = parts.feed.why_over(clock)
        if parts.evaluation.due(step, is_last=bool(why_over)):
            _evaluate(parts, step)
        with clock.blocked():
            wish = keeper.wish(step, is_over=bool(why_over))
        if wish.reason:
            # The step ends here, once the device has done it; its row is written; and only then can
            # a checkpoint say "after it".
            late = ledger.vetoes(through=step)
            clock.pause(Phase.CHECKPOINT)
            end = judge.verdict(step, [*late, *ledger.catch_up()])
            if end is not None:
                break
            keeper.save(step, wish.reason, judge.num_skips)
        if wish.stop is not None:
            end = _end(parts, wish.stop, step)
            break
    late = ledger.vetoes(through=plan.steps)
    clock.pause(Phase.CHECKPOINT)  # ends the last step
    late += ledger.close()
    parts.observers.close()
    keeper.close()
    return end or judge.verdict(plan.steps, late) or LoopEnd(Outcome.OK, plan.steps)


def _before(parts: LoopParts) -> LoopEnd | None:
    """End at once if a stop was asked for while ranks were starting; take an evaluation that the
    attempt before has left; end if that attempt had found that training is over."""
    last = parts.start.first_step - 1
    if parts.keeper.is_stopping():
        return LoopEnd(parts.keeper.wish(last).stop or Outcome.PREEMPTED, last)
    if parts.start.evaluation_is_due:
        _evaluate(parts, last)
    if parts.keeper.best.why_over or parts.feed.why_over(parts.clock):
        return _end(parts, Outcome.OK, last)
    return None


def _end(parts: LoopParts, outcome: Outcome, step: int) -> LoopEnd:
    is_early = outcome is Outcome.OK and step < parts.plan.steps
    why = parts.keeper.best.why_over or (is_early and parts.feed.why_over(parts.clock)) or ""
    return LoopEnd(outcome, step, why_early=why if is_early else "")


def _evaluate(parts: LoopParts, step: int) -> None:
    with parts.engine.averaged():
        found = parts.evaluation.run(parts.engine, parts.clock, parts.keeper.is_stopping)
        for write in parts.samples if found is not None else ():
            write(step)
    parts.keeper.note_evaluation(step, found)
    if found is None:
        return
    parts.ledger.note_evaluation(step, found)
    for hook in parts.hooks.on_eval:
        hook(step, found)


class _Judge:
    """Ends the run when more than `max_skips` updates were vetoed. Every rank sees the same."""

    def __init__(self, parts: LoopParts) -> None:
        self.max_skips, self.num_skips = parts.config.train.max_skips, parts.start.num_skips
        # A loss whose gradient was cut off everywhere is noticed only when losses are gathered.
        window = parts.config.train.log_every + LATENESS + 1
        self.recent: deque[tuple[int, list[Indices]]] = deque(maxlen=window)

    def remember(self, step: int, sample_ids: list[Indices]) -> None:
        self.recent.append((step, sample_ids))

    def verdict(self, step: int, vetoes: list[tuple[int, bool]]) -> LoopEnd | None:
        for bad_step, loss_was_finite in vetoes:
            self.num_skips += 1
            if self.num_skips > self.max_skips:
                ids = tuple(int(i) for part in dict(self.recent)[bad_step] for i in part)
                return LoopEnd(Outcome.NAN, step, bad_step, ids, loss_was_finite)
        return None
