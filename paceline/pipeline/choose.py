"""A model's blocks, ranks and a link -> every schedule's step time and memory, the best first.

For `paceline plan --schedule all`: no device is needed, only times that were given, counted, or
measured in a run.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ConfigError
from paceline.pipeline.actions import Schedule
from paceline.pipeline.formulas import Formula, bubble_formula, microbatches_for
from paceline.pipeline.requirements import AUTO_STAGES, next_microbatches, takes_microbatches
from paceline.pipeline.schedules import NAMES, draw_schedule
from paceline.pipeline.simulate import pairing_of, simulate
from paceline.pipeline.split import split_blocks
from paceline.pipeline.timeline import Timeline
from paceline.pipeline.times import Times

MAX_MICROBATCHES = 2000  # where a search ends


@dataclass(frozen=True)
class Block:
    """What cannot be cut in two: its times and activations for one microbatch, and its state
    (weights, gradients, optimizer)."""

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: float = 0.0
    state_bytes: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s


@dataclass(frozen=True)
class Setup:
    """A step: so many microbatches of one size over so many ranks. `transfer_s`: one microbatch
    from rank to rank. `memory_bytes`: what a rank has."""

    blocks: tuple[Block, ...]
    num_ranks: int
    num_microbatches: int
    transfer_s: float = 0.0
    overhead_s: float = 0.0
    memory_bytes: float = math.inf
    kept_after_input: float = 1.0  # share of activations that weight gradients still need


@dataclass(frozen=True)
class Candidate:
    """A schedule in this setup. `timeline` and `formula` are None where it is refused."""

    name: str
    stages_per_rank: int
    status: Literal["fits", "too large", "refused"]
    because: str
    timeline: Timeline | None = None
    formula: Formula | None = None
    peak_bytes: tuple[float, ...] = ()  # of each rank: state, and activations in flight

    @property
    def step_s(self) -> float:
        return self.timeline.total_s if self.timeline else math.inf


@dataclass(frozen=True)
class Needed:
    """How many microbatches a target bubble needs; None: no number will do."""

    num_microbatches: int | None
    bubble: float
    because: str


def compare_schedules(setup: Setup, names: Sequence[str] = NAMES) -> list[Candidate]:
    """Those that fit, fastest first; then those too large; then those that cannot be drawn."""
    made = [_consider(setup, name) for name in names]
    order = {"fits": 0, "too large": 1, "refused": 2}
    made.sort(key=lambda c: (order[c.status], c.step_s))
    best_s = made[0].step_s
    return [_explain(candidate, best_s, setup) for candidate in made]


def simulate_setup(setup: Setup, name: str) -> Timeline:
    """One step of a schedule as its engine runs it; raises ConfigError where it cannot be drawn."""
    schedule = draw_schedule(name, setup.num_ranks, setup.num_microbatches)
    return simulate(schedule, times_of(setup, schedule.num_stages), pairing_of(name))


def times_of(setup: Setup, num_stages: int) -> Times:
    """The times of stages made of the setup's blocks."""
    stages = stages_of(setup, num_stages)
    return Times(
        [stage.forward_s for stage in stages],
        [stage.input_s for stage in stages],
        [stage.weight_s for stage in stages],
        transfer_s=setup.transfer_s,
        overhead_s=setup.overhead_s,
    )


def stages_of(setup: Setup, num_stages: int) -> list[Block]:
    """Each stage as the sum of its blocks, split by cost."""
    spans = split_blocks([block.cost_s for block in setup.blocks], num_stages)
    return [_merge([setup.blocks[number] for number in span]) for span in spans]


def find_microbatches(setup: Setup, name: str, bubble: float) -> Needed:
    """The fewest microbatches, each of the size they have now, that idle no more than `bubble`."""
    least = _bubble_of_many(setup, name)
    lost = Needed(None, least, f"with more and more microbatches it still idles {least:.1%}")
    bubble += 1e-9  # sums of seconds are rounded
    if least >= bubble:
        return lost

    def at(number: int) -> float:
        return simulate_setup(replace(setup, num_microbatches=number), name).bubble

    enough = microbatches_for(bubble, name, setup.num_ranks)
    too_few = 0
    while at(enough) > bubble:
        if enough > MAX_MICROBATCHES:
            return lost
        too_few, enough = enough, next_microbatches(name, setup.num_ranks, 2 * enough)
    between = range(too_few + 1, enough + 1)
    valid = [m for m in between if takes_microbatches(name, setup.num_ranks, m)]
    number = valid[bisect_left(valid, True, key=lambda m: at(m) <= bubble)]
    reached = at(number)
    because = f"{name} on {setup.num_ranks} ranks idles {reached:.1%} with {number} microbatches"
    return Needed(number, reached, because)


def _bubble_of_many(setup: Setup, name: str) -> float:
    """Where the bubble goes as microbatches become many: what one more of them adds to a step, and
    what of that ranks work. Uneven stages and results that are waited for leave a rest."""
    few = next_microbatches(name, setup.num_ranks, 4 * setup.num_ranks)
    many = next_microbatches(name, setup.num_ranks, 2 * few)
    first, second = (
        simulate_setup(replace(setup, num_microbatches=number), name) for number in (few, many)
    )
    added_s = second.total_s - first.total_s
    worked_s = sum(r.busy_s for r in second.ranks) - sum(r.busy_s for r in first.ranks)
    return max(0.0, 1 - worked_s / setup.num_ranks / added_s) if added_s else 0.0


def _consider(setup: Setup, name: str) -> Candidate:
    stages_per_rank = AUTO_STAGES[name]
    try:
        timeline = simulate_setup(setup, name)
    except ConfigError as error:
        return Candidate(name, stages_per_rank, "refused", str(error))
    schedule = timeline.schedule
    peaks = _peaks(setup, timeline, stages_of(setup, schedule.num_stages))
    formula = bubble_formula(
        name,
        setup.num_ranks,
        setup.num_microbatches,
        times_of(setup, schedule.num_stages),
        pairing=pairing_of(name),
    )
    status: Literal["fits", "too large"] = "fits"
    if max(peaks) > setup.memory_bytes:
        status = "too large"
    return Candidate(name, stages_per_rank, status, "", timeline, formula, peaks)


def _peaks(setup: Setup, timeline: Timeline, stages: Sequence[Block]) -> tuple[float, ...]:
    activations = timeline.peak_bytes([s.activation_bytes for s in stages], setup.kept_after_input)
    return tuple(
        held + _state_bytes(timeline.schedule, stages, rank)
        for rank, held in enumerate(activations)
    )


def _state_bytes(schedule: Schedule, stages: Sequence[Block], rank: int) -> float:
    return sum(stages[stage].state_bytes for stage in schedule.stages_of(rank))


def _explain(candidate: Candidate, best_s: float, setup: Setup) -> Candidate:
    if candidate.timeline is None:
        return candidate
    idle = f"idles {candidate.timeline.bubble:.1%}"
    if candidate.status == "too large":
        most = max(candidate.peak_bytes)
        rank = candidate.peak_bytes.index(most)
        because = (
            f"rank {rank} needs {most / 2**30:.3g} GiB and has {setup.memory_bytes / 2**30:.3g}"
        )
    elif candidate.step_s == best_s:
        because = f"no schedule that fits is faster; {idle}"
    else:
        because = f"{candidate.step_s / best_s - 1:+.1%} a step; {idle}"
    return replace(candidate, because=because)


def _merge(blocks: Sequence[Block]) -> Block:
    return Block(
        sum(block.forward_s for block in blocks),
        sum(block.input_s for block in blocks),
        sum(block.weight_s for block in blocks),
        sum(block.activation_bytes for block in blocks),
        sum(block.state_bytes for block in blocks),
    )
