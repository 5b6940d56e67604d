"""The pipeline of a run for its report: tables, sentences and the two charts."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.records import PipelineFacts, PipelineRank, PipelineStage
from paceline.records.words import duration, size
from paceline.report.gantt import Chart, gantt
from paceline.schedules.account import simulate_measured
from paceline.schedules.measured import Measured

REMARKABLE = 0.03  # idle time beyond the formula that has to be explained
WORTH_A_WORD = 0.005
RANK_COLUMNS = (
    "rank", "stages", "busy", "bubble", "communication", "utilisation", "idle / formula",
    "queue F, B / simulated", "in flight / schedule", "peak memory",
)  # fmt: skip
STAGE_COLUMNS = ("stage", "utilisation", "F", "B", "I", "W")


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def draw_pipeline(measured: Measured, facts: PipelineFacts) -> str:
    """Draw the measured pass above a simulation with its stage times, on one scale."""
    simulated = simulate_measured(measured.schedule, facts.stages)
    return gantt(
        [
            Chart(f"measured, step {facts.step}", measured.median.pipelines[0]),
            Chart("simulated with the same stages, transfers free", simulated),
        ]
    )


def describe_source(facts: PipelineFacts, num_nodes: int) -> str:
    """Say what was measured, where it lies, and what to keep in mind."""
    passes = "the only pass" if facts.num_passes == 1 else f"the last {facts.num_passes} passes"
    num_pipelines = len(facts.ranks) // facts.num_ranks
    note = (
        f"{facts.schedule}, {facts.num_microbatches} microbatches; from {passes} in"
        " ranks/rank<r>/pipeline.jsonl, of which the one of median length is drawn and in"
        " timeline.json (for Perfetto)"
    )
    if num_pipelines > 1:
        note += (
            f"; the first of {num_pipelines} pipelines is drawn, whose rank r is rank"
            f" {num_pipelines} x r of the run"
        )
    if num_nodes > 1:
        note += f"; the clocks of {num_nodes} machines may be some milliseconds apart"
    return note


def explain_idle(facts: PipelineFacts) -> list[str]:
    """Compare the ranks' idle time with the formula; if it was much longer, say why."""
    formula, excess = facts.shares.formula, facts.idle - facts.shares.formula
    exact = "" if facts.is_exact else ", a guide with stages like these"
    lines = [
        f"Ranks were idle {facts.idle:.1%} of the pass ({facts.idle_low:.1%} to"
        f" {facts.idle_high:.1%} over all). The formula, {facts.formula}, says"
        f" {formula:.1%}{exact}; the simulator with the measured stages, transfers free, says"
        f" {facts.simulated_idle:.1%}."
    ]
    if excess > REMARKABLE:
        lines.append(
            f"That is {_points(excess)} more than the formula: {'; '.join(_reasons(facts))}."
        )
    lines += [
        f"Rank {rank.rank} held {rank.max_in_flight} activations at once, and the schedule"
        f" {rank.in_flight_limit}."
        for rank in facts.ranks
        if rank.max_in_flight > rank.in_flight_limit
    ]
    return lines


def rank_table(facts: PipelineFacts) -> Table:
    return Table(RANK_COLUMNS, [_rank_row(rank, facts) for rank in facts.ranks])


def stage_table(facts: PipelineFacts) -> Table:
    """Return milliseconds of one microbatch: the median over passes of their means."""
    return Table(STAGE_COLUMNS, [_stage_row(stage) for stage in facts.stages])


def _reasons(facts: PipelineFacts) -> Iterator[str]:
    """Yield the reasons of idle time, the largest first, then what was gained."""
    shares = facts.shares
    cost_s = [_cost_s(stage) for stage in facts.stages]
    slowest = max(cost_s) * len(cost_s) / (sum(cost_s) or 1.0)
    parts = {
        f"transfers ({duration(facts.transfer_s)} where a rank sat waiting for one)": (
            shares.transfers
        ),
        f"overhead of the host ({duration(facts.overhead_s)} before an action)": shares.overhead,
        f"uneven stages (the slowest takes {slowest:.2f} times the mean)": shares.uneven_stages,
        "forwards and backwards of other lengths than the formula is for": shares.unequal_actions,
        "waits for ranks that were late themselves": shares.passed_on,
    }
    for name, share in sorted(parts.items(), key=lambda part: -part[1]):
        if share > WORTH_A_WORD:
            yield f"{_points(share)} are {name}"
    below = -min(0.0, shares.unequal_actions) - min(0.0, shares.uneven_stages)
    if below > WORTH_A_WORD:
        yield f"less {_points(below)}, for stages of such lengths do better than the formula"
    if shares.passed_on < -WORTH_A_WORD:
        yield f"less {_points(-shares.passed_on)}, for delays in idle time cost nothing"


def _cost_s(stage: PipelineStage) -> float:
    halves_s = (stage.input_s or 0.0) + (stage.weight_s or 0.0)
    return stage.forward_s + (halves_s if stage.backward_s is None else stage.backward_s)


def _points(share: float) -> str:
    return f"{share * 100:.1f} points"


def _rank_row(rank: PipelineRank, facts: PipelineFacts) -> tuple[str, ...]:
    return (
        f"rank {rank.rank}",
        ", ".join(str(stage) for stage in rank.stages),
        duration(rank.busy_s),
        duration(rank.bubble_s),
        duration(rank.communication_s),
        f"{rank.utilisation:.1%}",
        f"{1 - rank.utilisation:.1%} / {facts.shares.formula:.1%}",
        f"{rank.max_forward_queue}, {rank.max_backward_queue} /"
        f" {rank.simulated_forward_queue}, {rank.simulated_backward_queue}",
        f"{rank.max_in_flight} / {rank.in_flight_limit}",
        size(rank.peak_bytes) if rank.peak_bytes else "unknown",
    )


def _stage_row(stage: PipelineStage) -> tuple[str, ...]:
    times_s = (stage.forward_s, stage.backward_s, stage.input_s, stage.weight_s)
    cells = [duration(time_s) if time_s is not None else "none" for time_s in times_s]
    return (f"stage {stage.stage}", f"{stage.utilisation:.1%}", *cells)
