"""What each rank did itself in each step, told from where it waited for others.

Ranks of a synchronous job take equally long for a step: the slow one works, the others wait for it
inside collectives. A rank knows by its own clock alone how long it was inside them
(strategies/clock.py); what is left of a phase is its own work, and that is what differs. No common
clock is needed: who comes last to an exchange sees the shortest one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.health.evidence import Evidence
from paceline.records import PipelinePlan
from paceline.records.columns import Table
from paceline.records.phases import OWN_PHASES, Phase
from paceline.records.tables import StepRow

Matrix = NDArray[np.float64]  # ranks x steps, seconds


@dataclass(frozen=True)
class Work:
    """The steps that all of `ranks` have recorded. `own` has each part's work, ranks x steps;
    `blocked` the time in collectives. `is_whole` is False where nobody recorded that: then only
    what stands before the first exchange of a step is known to be a rank's own."""

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
    """Return the work of all ranks in the steps that all have; None where there are none."""
    tables = {rank: _steady(table) for rank, table in evidence.steps.items() if len(table)}
    if len(tables) < evidence.num_ranks or not tables:
        return None
    steps = _common_steps(list(tables.values()))
    if not len(steps):
        return None
    rows = [table.pick(np.isin(table.column("step"), steps)) for table in tables.values()]
    is_whole = evidence.num_ranks == 1 or any(_knows_blocked(table) for table in rows)
    parts = OWN_PHASES if is_whole else (Phase.DATA, Phase.FORWARD)
    own = {phase: _matrix(rows, phase.column) for phase in parts}
    inside = {phase: _matrix(rows, phase.blocked_column) for phase in OWN_PHASES}
    for phase in own:
        own[phase] = np.maximum(own[phase] - inside[phase], 0.0)
    if evidence.plan is not None and evidence.plan.pipeline is not None:
        _level_stages(own, evidence.plan.pipeline, tuple(tables), evidence.plan.batch.dp)
    blocked = np.sum(list(inside.values()), axis=0) + _matrix(rows, Phase.COMM.column)
    wall = _matrix(rows, "wall_s") - _matrix(rows, Phase.EVAL.column)
    return Work(tuple(tables), steps, own, blocked, wall, is_whole)


def _steady(table: Table[StepRow]) -> Table[StepRow]:
    """Leave out the first steps, which are another thing: memory is touched, kernels are chosen."""
    return table.pick(~table.column("warmup"))


def _common_steps(tables: list[Table[StepRow]]) -> NDArray[np.int64]:
    steps: NDArray[np.int64] = np.unique(tables[0].column("step"))
    for table in tables[1:]:
        steps = np.intersect1d(steps, table.column("step"))
    return steps


def _knows_blocked(table: Table[StepRow]) -> bool:
    return any(not table.is_empty[phase.blocked_column].all() for phase in OWN_PHASES)


def _matrix(tables: list[Table[StepRow]], column: str) -> Matrix:
    made: Matrix = np.nan_to_num(np.array([table.column(column) for table in tables], float))
    return made


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
