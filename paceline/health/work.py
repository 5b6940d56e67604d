"""Separates what each rank did itself in each step from the time it waited for others.

Ranks of a synchronous job take equally long for a step: the slow one works, the others wait for it
inside collectives. A rank knows by its own clock alone how long it was inside them
(strategies/clock.py); what is left of a phase is its own work, and that is what differs. No common
clock is needed: who comes last to an exchange sees the shortest one.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.health.evidence import Evidence
from paceline.records import PipelinePlan
from paceline.records.columns import Table
from paceline.records.phases import OWN_PHASES, Phase
from paceline.records.tables import StepRow

TINY_S = 1e-9  # no step takes less
Matrix = NDArray[np.float64]  # ranks x steps, seconds


@dataclass(frozen=True)
class Work:
    """The steps that all of `ranks` have recorded. `own` has each part's work, ranks x steps;
    `blocked` the time in collectives. `is_whole` is False if that was not recorded: then only what
    comes before the first exchange of a step is known to be a rank's own."""

    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    own: dict[Phase, Matrix]
    blocked: Matrix
    wall: Matrix
    is_whole: bool

    @property
    def total(self) -> Matrix:
        """Return all own work, ranks x steps."""
        made: Matrix = np.sum(list(self.own.values()), axis=0)
        return made

    @property
    def step_s(self) -> float:
        """Return the median step."""
        return float(np.median(self.wall))

    def against_start(self, num_steps: int) -> "Work":
        """Return the work as if the ranks had been equal in the first steps, part by part: the
        differences that are left have come since."""
        level = {}
        for phase, part in self.own.items():
            usual = np.maximum(np.median(part[:, :num_steps], axis=1, keepdims=True), TINY_S)
            level[phase] = part * (usual.mean() / usual)
        return replace(self, own=level)

    def last(self, num_steps: int) -> "Work":
        return Work(
            self.ranks,
            self.steps[-num_steps:],
            {phase: part[:, -num_steps:] for phase, part in self.own.items()},
            self.blocked[:, -num_steps:],
            self.wall[:, -num_steps:],
            self.is_whole,
        )


def measure_work(evidence: Evidence) -> Work | None:
    """Return the work of all ranks in the steps that all have; None if there are none."""
    tables = {rank: _steady(table) for rank, table in evidence.steps.items() if len(table)}
    if len(tables) < evidence.num_ranks or not tables:
        return None
    rows = align_steps(list(tables.values()))
    steps = rows[0].column("step")
    if not len(steps):
        return None
    is_whole = evidence.num_ranks == 1 or any(_knows_blocked(table) for table in rows)
    parts = OWN_PHASES if is_whole else (Phase.DATA, Phase.FORWARD)
    # All columns at once: a live run is judged several times a second.
    names = [p.column for p in OWN_PHASES] + [p.blocked_column for p in OWN_PHASES]
    names += [Phase.COMM.column, "wall_s", Phase.EVAL.column]
    cube = np.nan_to_num([[table.column(name) for table in rows] for name in names])
    inside, (comm, all_s, eval_s) = cube[len(OWN_PHASES) : 2 * len(OWN_PHASES)], cube[-3:]
    worked = np.maximum(cube[: len(OWN_PHASES)] - inside, 0.0)
    own = {phase: worked[OWN_PHASES.index(phase)] for phase in parts}
    if evidence.plan is not None and evidence.plan.pipeline is not None:
        _level_stages(own, evidence.plan.pipeline, tuple(tables), evidence.plan.batch.dp)
    wall = np.maximum(all_s - eval_s, TINY_S)
    return Work(tuple(tables), steps, own, inside.sum(axis=0) + comm, wall, is_whole)


def _steady(table: Table[StepRow]) -> Table[StepRow]:
    """Leave out the first steps, which are different: memory is touched, kernels are chosen."""
    return table.pick(~table.column("warmup"))


def align_steps(tables: list[Table[StepRow]]) -> list[Table[StepRow]]:
    """Return the rows of the steps that all tables have, in order and each once."""
    tables = [_rising(table) for table in tables]
    first = tables[0].column("step")
    if all(np.array_equal(first, table.column("step")) for table in tables[1:]):
        return tables
    steps = first
    for table in tables[1:]:
        steps = np.intersect1d(steps, table.column("step"))
    return [table.pick(np.isin(table.column("step"), steps)) for table in tables]


def _rising(table: Table[StepRow]) -> Table[StepRow]:
    """Leave out rows of steps that appeared before: the file was put together, or copied while it
    was written."""
    steps = table.column("step")
    is_new = np.ones(len(steps), bool)
    is_new[1:] = steps[1:] > np.maximum.accumulate(steps)[:-1]
    return table.pick(is_new)


def _knows_blocked(table: Table[StepRow]) -> bool:
    return any(not table.is_empty[phase.blocked_column].all() for phase in OWN_PHASES)


def _level_stages(
    own: dict[Phase, Matrix], pipeline: PipelinePlan, ranks: tuple[int, ...], dp: int
) -> None:
    """Divide the work of each rank by its share of the model: stages of a pipeline are not equal,
    and a rank that holds more of the model is not slow for that."""
    places = [rank // dp for rank in ranks]
    flops = np.array([_held(pipeline, place, "cost") for place in places])
    weights = np.array([_held(pipeline, place, "num_parameters") for place in places])
    for phase, shares in (
        (Phase.FORWARD, flops),
        (Phase.BACKWARD, flops),
        (Phase.OPTIMIZER, weights),
    ):
        if phase in own and shares.all():
            own[phase] = own[phase] * (shares.mean() / shares)[:, None]


def _held(pipeline: PipelinePlan, place: int, what: str) -> float:
    return float(sum(getattr(stage, what) for stage in pipeline.stages if place in stage.ranks))
