"""What each rank of a pipeline measured -> timelines of whole passes, and why ranks were idle.

Ranks note when their own actions ran, by their own clocks: on several machines these may be off by
some milliseconds, and the time that one rank waited for another is off by as much.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.schedules.actions import Action, Schedule
from paceline.schedules.orders import draw_schedule
from paceline.schedules.passes import Pass, read_passes
from paceline.schedules.simulate import Pairing, giver_of, pairing_of
from paceline.schedules.timeline import Interval, RankTimeline, Timeline, Transfer

WARMUP = 2  # passes that are left out if there are more


@dataclass(frozen=True)
class Wait:
    """A rank's gap before an action. What lies before its input was finished elsewhere is bubble;
    what lies after that is communication: the transfer, and the host's overhead."""

    rank: int
    bubble_s: float
    communication_s: float
    was_expected: bool  # the rank sat waiting for this very input
    was_there: bool  # the input had an action's time or more to arrive, or came from the rank


@dataclass(frozen=True)
class MeasuredPass:
    """`pipelines[d]`: the pass of the pipeline of data-parallel rank d."""

    step: int
    number: int
    pipelines: tuple[Timeline, ...]

    @property
    def total_s(self) -> float:
        return max(timeline.total_s for timeline in self.pipelines)

    @property
    def idle(self) -> float:
        return fmean(timeline.bubble for timeline in self.pipelines)


@dataclass(frozen=True)
class Measured:
    """The passes that all ranks have, the oldest first."""

    schedule: Schedule
    passes: tuple[MeasuredPass, ...]

    @property
    def median(self) -> MeasuredPass:
        """Return the one to draw: a real pass, of median length."""
        return sorted(self.passes, key=lambda done: done.total_s)[(len(self.passes) - 1) // 2]


def load_measured(run: RunDir, plan: Plan) -> Measured | None:
    """Load what the ranks of a run measured; None if it has no pipeline, or if some rank left no
    passes."""
    if plan.pipeline is None:
        return None
    drawn = plan.pipeline
    schedule = draw_schedule(
        drawn.schedule, drawn.num_ranks, drawn.num_microbatches, drawn.stages_per_rank
    )
    by_rank = [read_passes(run.passes(rank)) for rank in range(plan.world_size)]
    num_pipelines = plan.world_size // drawn.num_ranks
    return measure([by_rank[number::num_pipelines] for number in range(num_pipelines)], schedule)


def measure(pipelines: Sequence[Sequence[Sequence[Pass]]], schedule: Schedule) -> Measured | None:
    """Put the passes of each rank of each pipeline together, as far as all ranks have them."""
    named = [
        [{(p.step, p.number): p for p in passes if _is_of(p, schedule)} for passes in ranks]
        for ranks in pipelines
    ]
    common = set.intersection(*(set(of_rank) for ranks in named for of_rank in ranks))
    keys = sorted(common)
    if not keys:
        return None
    passes = tuple(
        MeasuredPass(
            *key, tuple(assemble([of_rank[key] for of_rank in ranks], schedule) for ranks in named)
        )
        for key in keys[WARMUP:] or keys
    )
    return Measured(schedule, passes)


def assemble(passes: Sequence[Pass], schedule: Schedule) -> Timeline:
    """Turn one pass of every rank of a pipeline, in their order, into a timeline from the first
    start on.

    No rank notes when a result arrived. If its rank was waiting for it, it was used as it arrived;
    any other counts as arrived when it was finished.
    """
    first_at = min(p.started_at + timed.started_s for p in passes for timed in p.actions)
    intervals = [_intervals(done, done.started_at - first_at, schedule) for done in passes]
    arrivals: list[dict[Action, float]] = [{} for _ in passes]
    transfers = []
    for turn in _turns(intervals, schedule):
        started_s = turn.interval.started_s
        if turn.giver is None:
            continue
        arrivals[turn.rank][turn.interval.action] = started_s if turn.was_idle else turn.ready_s
        source = schedule.home(turn.giver)
        if source != turn.rank:
            transfers.append(Transfer(turn.giver, source, turn.rank, turn.ready_s, started_s))
    ranks = [RankTimeline(rank, tuple(own), arrivals[rank]) for rank, own in enumerate(intervals)]
    total_s = max(interval.ended_s for own in intervals for interval in own)
    return Timeline(schedule, total_s, tuple(ranks), tuple(transfers))


def waits(timeline: Timeline) -> list[Wait]:
    """Return every gap of every rank; with its busy time they fill the whole pass.

        rank 0   |--- F0 ---|--- F1 ---|
        rank 1    bbbbbbbbbb cc|--- F0 ---|ccc|--- F1 ---|

    b: bubble, until F0 of rank 0 was finished (`ready_s`). c: communication, from then on, or from
    when rank 1 was free (`free_s`) if its input was ready before that, as for F1.
    """
    found = []
    last_s = dict.fromkeys(range(len(timeline.ranks)), 0.0)
    for turn in _turns([rank.intervals for rank in timeline.ranks], timeline.schedule):
        gap_s = max(0.0, turn.interval.started_s - turn.free_s)
        # Only an input from another rank makes a bubble: a gap before one's own is overhead.
        is_foreign = turn.giver is not None and timeline.schedule.home(turn.giver) != turn.rank
        bubble_s = max(0.0, min(gap_s, turn.ready_s - turn.free_s)) if is_foreign else 0.0
        found.append(
            Wait(
                turn.rank,
                bubble_s,
                gap_s - bubble_s,
                was_expected=is_foreign and turn.was_idle,
                # Before its first action a rank has done nothing that took its time.
                was_there=turn.free_s > 0 and (not is_foreign or turn.ready_s <= turn.began_s),
            )
        )
        last_s[turn.rank] = max(turn.free_s, turn.interval.ended_s)
    # After its last action a rank waits for the slowest one: bubble.
    ends = [
        Wait(rank, timeline.total_s - end_s, 0.0, False, False) for rank, end_s in last_s.items()
    ]
    return found + ends


@dataclass(frozen=True, slots=True)
class _Turn:
    """An action of a rank, with its inputs, and when the rank had finished the ones before."""

    rank: int
    interval: Interval
    giver: Action | None
    ready_s: float  # when the given was finished; no later than it was taken, whatever clocks say
    began_s: float  # the action before it
    free_s: float  # all actions before it

    @property
    def was_idle(self) -> bool:
        """Say whether the rank had nothing to do when its input was finished: it waited for it."""
        return self.ready_s >= self.free_s


def _turns(intervals: Sequence[Sequence[Interval]], schedule: Schedule) -> Iterator[_Turn]:
    """Yield the actions of every rank in their order, each with what it waited for."""
    ready = _ready(intervals, schedule)
    for rank, own in enumerate(intervals):
        began_s = free_s = 0.0
        for interval in own:
            giver = giver_of(interval.action, schedule.num_stages, ready)
            giver = giver if giver in ready else None
            # Clocks of two machines differ: an input cannot be finished after it was taken.
            ready_s = min(ready[giver], interval.started_s) if giver is not None else 0.0
            yield _Turn(rank, interval, giver, ready_s, began_s, free_s)
            began_s, free_s = interval.started_s, max(free_s, interval.ended_s)


def _is_of(done: Pass, schedule: Schedule) -> bool:
    """Say whether this can be a pass of the schedule; one from a stale file is not."""
    actions = [timed.action for timed in done.actions]
    return bool(actions) and all(
        0 <= a.stage < schedule.num_stages and 0 <= a.direction < schedule.num_copies
        for a in actions
    )


def _intervals(done: Pass, offset_s: float, schedule: Schedule) -> list[Interval]:
    paired = {a for order in schedule.ranks for slot in order if slot.is_pair for a in slot.actions}
    intervals = [
        Interval(
            timed.action,
            offset_s + timed.started_s,
            offset_s + max(timed.started_s, timed.ended_s),
            timed.action in paired,
        )
        for timed in done.actions
    ]
    return sorted(intervals, key=lambda interval: interval.started_s)


def _ready(intervals: Sequence[Sequence[Interval]], schedule: Schedule) -> Mapping[Action, float]:
    """Return when each result could leave its rank: as its action ended; where an engine sends both
    results of a pair at the end, when its second half did."""
    ended = {interval.action: interval.ended_s for own in intervals for interval in own}
    if pairing_of(schedule.name) is not Pairing.LATE_SENDS:
        return ended
    ready = dict(ended)
    for order in schedule.ranks:
        for slot in order:
            last_s = max((ended[a] for a in slot.actions if a in ended), default=0.0)
            ready |= {action: last_s for action in slot.actions if action in ended}
    return ready
