"""What a report says about measured passes: times of ranks and stages beside those of the
schedule, and idle time that its formula does not explain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.records import IdleShares, PipelineFacts, PipelinePlan, PipelineRank, PipelineStage
from paceline.schedules.actions import Kind, Schedule
from paceline.schedules.formulas import Formula, bubble_formula
from paceline.schedules.measured import Measured, MeasuredPass, waits
from paceline.schedules.simulate import pairing_of, simulate
from paceline.schedules.timeline import Timeline, Times


def account(
    measured: Measured, plan: PipelinePlan, peak_bytes: Mapping[int, int | None]
) -> PipelineFacts:
    """Put the figures of a pipeline together. `peak_bytes`: of each rank of the run, if known."""
    drawn = measured.median
    stages = _stages(measured)
    simulated = simulate_measured(measured.schedule, stages)
    formula = bubble_formula(
        plan.schedule,
        plan.num_ranks,
        plan.num_microbatches,
        times_measured(stages),
        plan.stages_per_rank,
        pairing_of(plan.schedule),
    )
    gaps = _Gaps.of(measured)
    return PipelineFacts(
        schedule=plan.schedule,
        num_ranks=plan.num_ranks,
        stages_per_rank=plan.stages_per_rank,
        num_microbatches=plan.num_microbatches,
        num_passes=len(measured.passes),
        step=drawn.step,
        number=drawn.number,
        pass_s=drawn.total_s,
        simulated_s=simulated.total_s,
        idle=drawn.idle,
        idle_low=min(done.idle for done in measured.passes),
        idle_high=max(done.idle for done in measured.passes),
        simulated_idle=simulated.bubble,
        formula=formula.text,
        is_exact=formula.is_exact,
        shares=_shares(drawn, simulated, _evened(measured.schedule, stages), formula, gaps),
        overhead_s=gaps.overhead_s,
        transfer_s=gaps.transfer_s,
        ranks=_ranks(measured, simulated, peak_bytes),
        stages=stages,
    )


def times_measured(stages: Sequence[PipelineStage]) -> Times:
    """Return the times of a run's stages for the simulator; transfers are free. If a backward was
    only measured whole, each half counts as half of it."""
    halves = [_halves(stage) for stage in stages]
    return Times(
        forward_s=[stage.forward_s for stage in stages],
        input_s=[input_s for input_s, _ in halves],
        weight_s=[weight_s for _, weight_s in halves],
        backward_s=[
            sum(both) if stage.backward_s is None else stage.backward_s
            for stage, both in zip(stages, halves, strict=True)
        ],
    )


def simulate_measured(schedule: Schedule, stages: Sequence[PipelineStage]) -> Timeline:
    """Simulate the schedule with these stages, as if transfers and overhead were free."""
    return simulate(schedule, times_measured(stages), pairing_of(schedule.name))


@dataclass(frozen=True)
class _Gaps:
    """Typical seconds: before an action whose input was there, and of the transfer of one that was
    waited for."""

    overhead_s: float
    transfer_s: float

    @classmethod
    def of(cls, measured: Measured) -> "_Gaps":
        found = [
            wait for done in measured.passes for line in done.pipelines for wait in waits(line)
        ]
        overhead_s = _median([wait.communication_s for wait in found if wait.was_there])
        way_s = _median([wait.communication_s for wait in found if wait.was_expected])
        return cls(overhead_s, max(0.0, way_s - overhead_s))


def _ranks(
    measured: Measured, simulated: Timeline, peak_bytes: Mapping[int, int | None]
) -> list[PipelineRank]:
    drawn, made = measured.median, []
    for number, timeline in enumerate(drawn.pipelines):
        gaps = waits(timeline)
        for own in timeline.ranks:
            rank = own.rank * len(drawn.pipelines) + number
            mine = [wait for wait in gaps if wait.rank == own.rank]
            promised = simulated.ranks[own.rank]
            seen = [done.pipelines[number].ranks[own.rank] for done in measured.passes]
            made.append(
                PipelineRank(
                    rank=rank,
                    stages=measured.schedule.stages_of(own.rank),
                    busy_s=own.busy_s,
                    bubble_s=sum(wait.bubble_s for wait in mine),
                    communication_s=sum(wait.communication_s for wait in mine),
                    utilisation=timeline.utilisation(own.rank),
                    max_forward_queue=max(one.max_queue(Kind.FORWARD) for one in seen),
                    max_backward_queue=max(one.max_queue(Kind.BACKWARD) for one in seen),
                    simulated_forward_queue=promised.max_queue(Kind.FORWARD),
                    simulated_backward_queue=promised.max_queue(Kind.BACKWARD),
                    max_in_flight=max(one.max_in_flight for one in seen),
                    in_flight_limit=promised.max_in_flight,
                    peak_bytes=peak_bytes.get(rank),
                )
            )
    return sorted(made, key=lambda item: item.rank)


def _stages(measured: Measured) -> list[PipelineStage]:
    spent = [_spent(done) for done in measured.passes]
    held = [stage for homes in measured.schedule.homes for stage, _ in enumerate(homes)]
    drawn = measured.median
    whole_s = sum(timeline.total_s for timeline in drawn.pipelines)
    made = []
    for stage in range(measured.schedule.num_stages):
        means = {
            kind: _median([fmean(of[stage, kind]) for of in spent if (stage, kind) in of])
            for kind in Kind
            if any((stage, kind) in of for of in spent)
        }
        busy_s = sum(sum(_spent(drawn).get((stage, kind), [])) for kind in Kind)
        made.append(
            PipelineStage(
                stage=stage,
                utilisation=busy_s / (whole_s * held.count(stage)) if whole_s else 0.0,
                forward_s=means.get(Kind.FORWARD, 0.0),
                backward_s=means.get(Kind.BACKWARD),
                input_s=means.get(Kind.INPUT),
                weight_s=means.get(Kind.WEIGHT),
            )
        )
    return made


def _spent(done: MeasuredPass) -> dict[tuple[int, Kind], list[float]]:
    """Collect the seconds of every action of a pass, by stage and kind."""
    spent: dict[tuple[int, Kind], list[float]] = {}
    for timeline in done.pipelines:
        for rank in timeline.ranks:
            for interval in rank.intervals:
                action = interval.action
                seconds = interval.ended_s - interval.started_s
                spent.setdefault((action.stage, action.kind), []).append(seconds)
    return spent


def _shares(
    drawn: MeasuredPass, simulated: Timeline, evened: Timeline, formula: Formula, gaps: _Gaps
) -> IdleShares:
    """Split idle time: each part is what the simulator, or the measured gaps, add to the one
    before."""
    whole_s = sum(timeline.total_s * len(timeline.ranks) for timeline in drawn.pipelines)
    found = [wait for timeline in drawn.pipelines for wait in waits(timeline)]
    num_actions = sum(len(rank.intervals) for line in drawn.pipelines for rank in line.ranks)
    communication = sum(wait.communication_s for wait in found) / whole_s if whole_s else 0.0
    overhead = gaps.overhead_s * num_actions / whole_s if whole_s else 0.0
    overhead = min(overhead, communication)
    return IdleShares(
        formula=formula.bubble,
        unequal_actions=evened.bubble - formula.bubble,
        uneven_stages=simulated.bubble - evened.bubble,
        overhead=overhead,
        transfers=communication - overhead,
        passed_on=drawn.idle - simulated.bubble - communication,
    )


def _evened(schedule: Schedule, stages: Sequence[PipelineStage]) -> Timeline:
    """Return the times as if every stage took the mean of all."""
    times = times_measured(stages).of_stages(len(stages)).seconds
    mean = {kind: fmean(seconds) for kind, seconds in times.items()}
    even = Times(
        mean[Kind.FORWARD], mean[Kind.INPUT], mean[Kind.WEIGHT], backward_s=mean[Kind.BACKWARD]
    )
    return simulate(schedule, even, pairing_of(schedule.name))


def _halves(stage: PipelineStage) -> tuple[float, float]:
    if stage.input_s is None and stage.weight_s is None:
        return (stage.backward_s or 0.0) / 2, (stage.backward_s or 0.0) / 2
    return stage.input_s or 0.0, stage.weight_s or 0.0


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
