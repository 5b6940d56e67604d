"""Axes into cells, and each cell into a plan, before anything runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from paceline.errors import ConfigError, PacelineError
from paceline.flow import Decided, Talk, prepare, require_feasible
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.records import Env
from paceline.records.swept import SweptCell
from paceline.sweep.spec import SweepSpec, shown_value, split_values

# What a run does only to be kept or judged later costs time that is not compared. The user's own
# overrides stand behind these.
PLAIN = ("train.eval_every=off", "checkpoint.at_end=false", "checkpoint.at_stop=false")


def draw_cells(spec: SweepSpec) -> list[SweptCell]:
    """Every combination, the last axis fastest."""
    short = short_keys(spec.axes)
    cells = []
    for values in product(*spec.axes.values()):
        settings = {key: shown_value(value) for key, value in zip(spec.axes, values, strict=True)}
        cells.append(
            SweptCell(
                name=",".join(f"{short[key]}={text}" for key, text in settings.items()),
                settings=settings,
                overrides=[f"{key}={text}" for key, text in settings.items()],
            )
        )
    return cells


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The shortest end of each key that no other key has."""
    parts = {key: key.split(".") for key in keys}

    def ends(key: str, length: int) -> str:
        return ".".join(parts[key][-length:])

    short = {}
    for key in parts:
        lengths = range(1, len(parts[key]) + 1)
        short[key] = next(
            (ends(key, n) for n in lengths if sum(ends(k, n) == ends(key, n) for k in parts) == 1),
            key,
        )
    return short


def find_cell(cells: Sequence[SweptCell], asked: str) -> SweptCell:
    """The cell of that name, or the only one that has all of its `key=value` parts."""
    wanted = {part.strip() for part in split_values(asked)}
    exact = [cell for cell in cells if cell.name == asked]
    fitting = exact or [cell for cell in cells if wanted <= _words(cell)]
    names = "\n".join(f"  {cell.name}" for cell in (fitting or cells)[:20])
    if not fitting:
        raise ConfigError(f"the baseline '{asked}' is not a cell; the cells are\n{names}")
    if len(fitting) > 1:
        raise ConfigError(f"the baseline '{asked}' fits {len(fitting)} cells\n{names}")
    if fitting[0].refusal:
        raise ConfigError(f"the baseline '{asked}' cannot run: {fitting[0].refusal}")
    return fitting[0]


def _words(cell: SweptCell) -> set[str]:
    return {*split_values(cell.name), *cell.overrides}


@dataclass(frozen=True)
class Ground:
    """What all cells stand on."""

    recipe: str
    overrides: tuple[str, ...]
    env: Env


def load_cell(ground: Ground, cell: SweptCell, steps: int) -> Job:
    """The job of a cell; `ConfigError` when one of its words is wrong."""
    words = [*PLAIN, *ground.overrides, *cell.overrides, f"train.steps={steps}"]
    return load_job(ground.recipe, words)


def load_cells(ground: Ground, cells: Sequence[SweptCell], steps: int) -> dict[str, Job]:
    """All of them. A word that no schema knows is a mistake, not a cell that cannot run: every one
    is named at once."""
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
    """The cells again, with the reason where the plan has no place for one."""
    return [_planned(cell, jobs[cell.name], env) for cell in cells]


def _planned(cell: SweptCell, job: Job, env: Env) -> SweptCell:
    try:
        require_feasible(make_plan(job, env))
    except PacelineError as error:
        reasons = [problem.replace("\nhint: ", "; ") for problem in error.problems]
        return cell.model_copy(update={"refusal": "; ".join(reasons)})
    return cell


def decide_cell(ground: Ground, cell: SweptCell, steps: int, talk: Talk) -> Decided:
    """Ready to run, any number of times."""
    job = load_cell(ground, cell, steps)
    return prepare(job, ground.env, make_plan(job, ground.env), talk)
