"""Plans each cell before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, PacelineError
from paceline.job import Job, load_job
from paceline.metrics import VAL
from paceline.plan.planner import make_plan
from paceline.records import Env
from paceline.records.swept import SweptCell
from paceline.run.flow import Decided, Talk, prepare, require_feasible

# Switch off validation and checkpoints: they cost time that is not compared. The user's own
# overrides come after these and win. Cells that are compared by an evaluation have one at the end.
PLAIN = (
    "train.eval_every=off", "train.eval_samples=all", "checkpoint.at_end=false",
    "checkpoint.at_stop=false",
)  # fmt: skip


@dataclass(frozen=True)
class Ground:
    """Hold what all cells have in common."""

    recipe: str
    overrides: tuple[str, ...]
    env: Env
    evaluates: bool = False


def needs_evaluation(metric: str, target: str | None) -> bool:
    """Say whether cells are compared, or held against a target, by an evaluation."""
    return any(text.strip().startswith(VAL) for text in (metric, target or ""))


def load_cell(ground: Ground, cell: SweptCell, steps: int) -> Job:
    """Return the job of a cell; `ConfigError` when one of its words is wrong."""
    last = [f"train.eval_every={steps}"] if ground.evaluates else []
    words = [*PLAIN, *last, *ground.overrides, *cell.overrides, f"train.steps={steps}"]
    return load_job(ground.recipe, words)


def load_cells(ground: Ground, cells: Sequence[SweptCell], steps: int) -> dict[str, Job]:
    """Return the job of every cell by its name. A word that no schema knows is a mistake, not a
    cell that cannot run: all of them are named at once."""
    jobs, problems = {}, dict[str, None]()
    for cell in cells:
        try:
            jobs[cell.name] = load_cell(ground, cell, steps)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))
    return jobs


def refuse_impossible(
    cells: Sequence[SweptCell], jobs: dict[str, Job], env: Env
) -> list[SweptCell]:
    """Return the cells again, each with the reason where its plan is refused."""
    return [_planned(cell, jobs[cell.name], env) for cell in cells]


def _planned(cell: SweptCell, job: Job, env: Env) -> SweptCell:
    try:
        require_feasible(make_plan(job, env))
    except PacelineError as error:
        reasons = [problem.replace("\nhint: ", "; ") for problem in error.problems]
        return cell.model_copy(update={"refusal": "; ".join(reasons)})
    return cell


def decide_cell(ground: Ground, cell: SweptCell, steps: int, talk: Talk) -> Decided:
    """Plan and prepare a cell, so that it can run any number of times."""
    job = load_cell(ground, cell, steps)
    return prepare(job, ground.env, make_plan(job, ground.env), talk)
