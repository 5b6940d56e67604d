"""Passes as ranks would have measured them, made by the simulator, so that the truth is known."""

from random import Random

from paceline.records import PipelinePlan, StagePlan
from paceline.records.rundir import RunDir
from paceline.schedules.actions import Schedule
from paceline.schedules.orders import draw_schedule
from paceline.schedules.passes import Pass, Timed, render_passes
from paceline.schedules.simulate import pairing_of, simulate
from paceline.schedules.timeline import Timeline, Times

EPOCH = 1.7e9


def passes_of(timeline: Timeline, step: int = 3, number: int = 0) -> list[Pass]:
    """One pass of each rank, whose own clock starts with its own first action."""
    made = []
    for rank in timeline.ranks:
        first_s = rank.intervals[0].started_s
        actions = tuple(
            Timed(i.action, i.started_s - first_s, i.ended_s - first_s) for i in rank.intervals
        )
        made.append(Pass(step, number, EPOCH + 10 * step + first_s, actions))
    return made


def jittered(schedule: Schedule, times: Times, num_passes: int, seed: int = 0) -> list[list[Pass]]:
    """Passes of each rank; a pass is up to 5 % slower than the one the times give."""
    random = Random(seed)
    by_rank: list[list[Pass]] = [[] for _ in range(schedule.num_ranks)]
    for step in range(1, num_passes + 1):
        slow = 1 + 0.05 * random.random()
        spread = times.of_stages(schedule.num_stages)
        seconds = {kind: [s * slow for s in values] for kind, values in spread.seconds.items()}
        F, B, I, W = (seconds[kind] for kind in "FBIW")  # noqa: E741
        slower = Times(F, I, W, spread.transfer_s, B, times.overhead_s)
        line = simulate(schedule, slower, pairing_of(schedule.name))
        for own, done in zip(by_rank, passes_of(line, step), strict=True):
            own.append(done)
    return by_rank


def plan_of(schedule: Schedule, stages_per_rank: int) -> PipelinePlan:
    share = 1 / schedule.num_stages
    stages = [
        StagePlan(
            first_block=stage,
            end_block=stage + 1,
            num_parameters=1000,
            cost=share,
            ranks=[homes[stage] for homes in schedule.homes],
        )
        for stage in range(schedule.num_stages)
    ]
    return PipelinePlan(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=schedule.num_microbatches,
        stages=stages,
    )


def write_run(run: RunDir, plan: PipelinePlan, times: Times, num_passes: int = 6) -> None:
    """What the ranks of one pipeline leave in a run directory."""
    schedule = draw_schedule(
        plan.schedule, plan.num_ranks, plan.num_microbatches, plan.stages_per_rank
    )
    for rank, passes in enumerate(jittered(schedule, times, num_passes)):
        run.rank(rank).mkdir(parents=True, exist_ok=True)
        run.passes(rank).write_text(render_passes(passes))
