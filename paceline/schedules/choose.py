"""A model's blocks, ranks and a link -> every schedule's step time and memory, the best first.

For `paceline plan --schedule all`: no device is needed, only times that were given, counted, or
measured in a run.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from paceline.errors import ConfigError
from paceline.records.words import size
from paceline.schedules.actions import Schedule
from paceline.schedules.formulas import Formula, bubble_formula
from paceline.schedules.orders import NAMES, draw_schedule
from paceline.schedules.requirements import (
    AUTO_STAGES,
    nearest_microbatches,
    next_microbatches,
    split_blocks,
    takes_microbatches,
    takes_ranks,
)
from paceline.schedules.simulate import pairing_of, simulate
from paceline.schedules.timeline import Timeline, Times

MAX_MICROBATCHES = 2000  # where a search ends
MAX_SEARCHED = 4096  # ranks times microbatches: above it a forecast that holds is taken


@dataclass(frozen=True)
class Block:
    """What cannot be cut in two: its times and activations for one microbatch, and its state
    (weights, gradients, optimizer)."""

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: float = 0.0
    state_bytes: float = 0.0
    backward_s: float | None = None  # a whole backward, where it is not the sum of its halves

    @property
    def cost_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    @property
    def whole_s(self) -> float:
        return self.input_s + self.weight_s if self.backward_s is None else self.backward_s


@dataclass(frozen=True)
class Setup:
    """One step: so many microbatches of one size over so many ranks. `transfer_s`: one microbatch
    from rank to rank. `memory_bytes`: what each rank has."""

    blocks: tuple[Block, ...]
    num_ranks: int
    num_microbatches: int
    transfer_s: float = 0.0
    overhead_s: float = 0.0
    memory_bytes: float = math.inf


@dataclass(frozen=True)
class Candidate:
    """A schedule in this setup. `timeline` and `formula` are None if it is refused."""

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
    """How many microbatches a target bubble needs; None: no number is enough."""

    num_microbatches: int | None
    bubble: float
    because: str


def compare_schedules(setup: Setup, names: Sequence[str] = NAMES) -> list[Candidate]:
    """Return those that fit, fastest first (of equally fast ones the one that needs least memory
    first); then those that are too large; then those that cannot be drawn."""
    made = [_consider(setup, name) for name in names]
    order = {"fits": 0, "too large": 1, "refused": 2}
    # Nine digits: sums of seconds are rounded.
    made.sort(
        key=lambda c: (order[c.status], float(f"{c.step_s:.9g}"), max(c.peak_bytes, default=0))
    )
    best_s = made[0].step_s
    return [_explain(candidate, best_s, setup) for candidate in made]


def simulate_setup(setup: Setup, name: str) -> Timeline:
    """Simulate one step of a schedule as its engine runs it; raise ConfigError if it cannot be
    drawn."""
    schedule = draw_schedule(name, setup.num_ranks, setup.num_microbatches)
    return simulate(schedule, times_of(setup, schedule.num_stages), pairing_of(name))


def times_of(setup: Setup, num_stages: int) -> Times:
    """Return the times of stages made of the setup's blocks."""
    stages = stages_of(setup, num_stages)
    return Times(
        [stage.forward_s for stage in stages],
        [stage.input_s for stage in stages],
        [stage.weight_s for stage in stages],
        backward_s=[stage.whole_s for stage in stages],
        transfer_s=setup.transfer_s,
        overhead_s=setup.overhead_s,
    )


def stages_of(setup: Setup, num_stages: int) -> list[Block]:
    """Return each stage as the sum of its blocks, split by cost."""
    return list(_split(setup.blocks, num_stages))


@lru_cache(maxsize=64)  # a search simulates the same stages again and again
def _split(blocks: tuple[Block, ...], num_stages: int) -> tuple[Block, ...]:
    spans = split_blocks([block.cost_s for block in blocks], num_stages)
    return tuple(_merge(blocks[span.start : span.stop]) for span in spans)


def find_microbatches(setup: Setup, name: str, bubble: float) -> Needed:
    """Find the fewest microbatches, each of the size they have now, that idle no more than
    `bubble`."""
    if not 0 < bubble < 1:
        raise ConfigError(f"a bubble of {bubble:g} was asked for\nhint: give a share such as 0.1")
    many = _many(setup, name)
    bubble += 1e-9  # sums of seconds are rounded
    if many.least_bubble >= bubble:
        because = f"with more and more microbatches it still idles {many.least_bubble:.2%}"
        return Needed(None, many.least_bubble, because)
    guess = next_microbatches(name, setup.num_ranks, many.microbatches_for(bubble))
    if guess > MAX_MICROBATCHES:
        because = f"it would take about {guess} microbatches; {MAX_MICROBATCHES} are tried"
        return Needed(None, many.least_bubble, because)

    @cache
    def at(number: int) -> float:
        return simulate_setup(replace(setup, num_microbatches=number), name).bubble

    number, reached = guess, at(guess)
    is_large = guess >= many.first and guess * setup.num_ranks > MAX_SEARCHED
    # If a large one came out as predicted, its neighbours are not tried: that takes seconds.
    if not (is_large and math.isclose(reached, many.bubble(guess), rel_tol=1e-6)):
        number = _search(setup.num_ranks, name, guess, lambda number: at(number) <= bubble)
        reached = at(number)
    if reached > bubble:
        return Needed(None, reached, f"with {number} microbatches it still idles {reached:.1%}")
    because = f"{name} on {setup.num_ranks} ranks idles {reached:.1%} with {number} microbatches"
    return Needed(number, reached, because)


@dataclass(frozen=True)
class _Many:
    """How a step grows once there are many microbatches: each adds the same. `worked_s`: a rank's
    work within `added_s`. Uneven stages and waiting for results leave a rest that no number
    fills."""

    first: int
    first_s: float
    added_s: float
    worked_s: float

    @property
    def least_bubble(self) -> float:
        return max(0.0, 1 - self.worked_s / self.added_s) if self.added_s else 0.0

    def bubble(self, number: int) -> float:
        total_s = self.first_s + (number - self.first) * self.added_s
        return 1 - number * self.worked_s / total_s if total_s else 0.0

    def microbatches_for(self, bubble: float) -> int:
        """Return the number at which `self.bubble` falls to `bubble`."""
        share = 1 - bubble
        gained_s = self.worked_s - share * self.added_s
        if gained_s <= 0:
            return 1
        return math.ceil(share * (self.first_s - self.first * self.added_s) / gained_s - 1e-6)


def _many(setup: Setup, name: str) -> _Many:
    few = next_microbatches(name, setup.num_ranks, 2 * setup.num_ranks)
    more = next_microbatches(name, setup.num_ranks, few + setup.num_ranks)
    first, second = (
        simulate_setup(replace(setup, num_microbatches=number), name) for number in (few, more)
    )
    worked_s = sum(r.busy_s for r in second.ranks) - sum(r.busy_s for r in first.ranks)
    return _Many(
        few,
        first.total_s,
        (second.total_s - first.total_s) / (more - few),
        worked_s / setup.num_ranks / (more - few),
    )


def _search(num_ranks: int, name: str, guess: int, is_enough: Callable[[int], bool]) -> int:
    """Find the fewest valid microbatches that are enough, looking around `guess`."""
    low, high, step = 0, guess, 1
    if is_enough(guess):
        while low == 0 and high - step > 0:
            near = nearest_microbatches(name, num_ranks, high - step)
            if near < high and is_enough(near):
                high = near
            elif near < high:
                low = near
            step *= 2
    else:
        while True:
            low, high = high, next_microbatches(name, num_ranks, high + step)
            step *= 2
            if high > MAX_MICROBATCHES or is_enough(high):
                break
    valid = [m for m in range(low + 1, high + 1) if takes_microbatches(name, num_ranks, m)]
    return valid[bisect_left(valid, True, hi=len(valid) - 1, key=is_enough)]


def _consider(setup: Setup, name: str) -> Candidate:
    stages_per_rank = AUTO_STAGES[name]
    try:
        _require_blocks(setup, name)
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


def _require_blocks(setup: Setup, name: str) -> None:
    """Require a block for each stage; say how many ranks the model has blocks for."""
    distinct = 1 if name == "dualpipe" else AUTO_STAGES[name]  # the second is another's copy
    num_stages, num_blocks = setup.num_ranks * distinct, len(setup.blocks)
    if num_stages <= num_blocks or not takes_ranks(name, setup.num_ranks):
        return
    fitting = [n for n in range(2, num_blocks // distinct + 1) if takes_ranks(name, n)]
    ranks = f"set launch.nproc to {fitting[-1]}, or " if fitting else ""
    raise ConfigError(
        f"{name}: {num_stages} stages of a model of {num_blocks} blocks: each stage needs one\n"
        f"hint: {ranks}use a model of {num_stages} blocks or more"
    )


def _peaks(setup: Setup, timeline: Timeline, stages: Sequence[Block]) -> tuple[float, ...]:
    activations = timeline.peak_bytes([s.activation_bytes for s in stages])
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
        because = f"rank {rank} needs {size(most)} and has {size(setup.memory_bytes)}"
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
        None if all(b.backward_s is None for b in blocks) else sum(b.whole_s for b in blocks),
    )
