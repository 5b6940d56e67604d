"""The specification of a sweep: flags, or a YAML file with the same keys.

    spec = read_spec("lm_tiny", ["train.grad_accum=1"], ["strategy.name=ddp,zero1"], given)
    spec = read_spec("my_sweep.yaml", ["sweep.margin=0.05"], [], given)

A YAML file is a sweep, not a recipe, when it has `axes`.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from paceline.config.load import Draft, draft_tree, require_references, validate
from paceline.config.overrides import parse_override
from paceline.config.plain import parse_plain, read_config_text, require_plain
from paceline.config.section import Positive, Section
from paceline.config.typed_only import refuse_words_in_file
from paceline.errors import ConfigError
from paceline.records.swept import Metric, SweptCell
from paceline.records.words import text_cell
from paceline.stats.figures import require_metric
from paceline.stats.timing_points import TAIL_POINTS

PREFIX = "sweep."
Share = Annotated[float, Field(gt=0, lt=1)]
Values = Annotated[list[str | int | float | bool | list[Any]], Field(min_length=1)]
MAX_NAMED = 20
MAX_CELLS = 10_000


class SweepSpec(Section):
    """Hold every word of a sweep. One that has no flag is typed as sweep.WORD=value."""

    recipe: str = Field(description="A recipe's name or a YAML file of a run.")
    overrides: list[str] = Field([], description="key=value for every cell.")
    axes: dict[str, Values] = Field({}, description="A key and the values it takes.")
    cells: dict[str, list[str]] = Field(
        {}, description="Cells by name, each with overrides of its own; beside those of the axes."
    )
    repeats: Positive = Field(3, description="Runs per cell.")
    steps: Positive = Field(60, description="Steps per run.")
    metric: Metric = Field(
        "auto",
        description="What cells are compared by, also val/NAME:min or :max. auto: tokens_per_s, or"
        " samples_per_s.",
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Differences below this share do not matter."
    )
    baseline: str = Field("", description="A cell, or the part of its name that tells it apart.")
    target: str = Field("", description="speedup>=1.08 against the baseline, or METRIC>=VALUE.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Shuffles the order of runs.")
    phases: bool = Field(False, description="Pilot, final and extras instead of one round.")
    pilot_repeats: Positive = Field(
        2, description="Runs per cell in the pilot (A); of 1 comes a shortlist, no verdict."
    )
    finalists: Literal["auto"] | Annotated[int, Field(ge=2)] = Field(
        "auto",
        description="Cells in the final (B): the best so many of the pilot. auto: those that it"
        " could not tell from the best; 2 of a pilot without repeats.",
    )
    tail_lines: Annotated[int, Field(ge=0)] = Field(
        12, description="Lines of a rank's log that are shown when its run fails."
    )
    tail_points: Positive = Field(
        TAIL_POINTS, description="Timing points, from the end, that tail_* columns are the mean of."
    )
    heartbeat_s: Annotated[float, Field(ge=0)] = Field(
        5.0, description="Seconds between lines about the run in work, in driver.log too; 0: none."
    )
    pilot_steps: Literal["auto"] | Positive = Field(
        "auto", description="Steps per run in the pilot (A). auto: a third of steps, at least 20."
    )
    extras: dict[str, list[str]] = Field(
        {"compile": ["train.compile=default"]},
        description="Phase C: overrides to try on the winner, by a name for them.",
    )
    loss_tolerance: Share = Field(
        0.02, description="How far a loss may be from that of cells with the same model and batch."
    )
    stop_on_error: bool = Field(False, description="End the sweep at the first run that fails.")

    @field_validator("metric")
    @classmethod
    def _metric_is_one(cls, text: str) -> str:
        return text if text == "auto" else require_metric(text)


def read_spec(
    source: str, words: Sequence[str], axes: Sequence[str], given: dict[str, Any]
) -> SweepSpec:
    """Read what was asked. `words`: overrides of every cell, and sweep.WORD=value; `given`:
    flags that were set."""
    problems: list[str] = []
    body = _read_file(source) or {"recipe": source, "axes": {}, "overrides": []}
    body["axes"] = {**body["axes"], **_read_axes(axes, problems)}
    own = [word for word in words if word.lstrip("+").startswith(PREFIX)]
    body["overrides"] = [*body["overrides"], *(word for word in words if word not in own)]
    draft = Draft(f"sweep {source}", draft_tree(body, f"sweep {source}"), [], problems)
    for word in own:
        try:
            draft.overrides.append(parse_override(word.lstrip("+").removeprefix(PREFIX)))
        except ValueError as error:
            problems.append(str(error))
    for name, value in given.items():
        draft.tree[name] = value
    spec = validate(draft, SweepSpec)
    _require_sensible(spec)
    return spec


def _read_file(source: str) -> dict[str, Any] | None:
    """Return the words of a sweep's file; None where `source` is a recipe."""
    if not source.endswith((".yaml", ".yml")):
        return None
    text = read_config_text(Path(source))
    body = {"overrides": [], **parse_plain(text, source)}
    require_references(text, source)
    if not {"recipe", "axes", "cells"} & body.keys():
        return None
    recipe = str(body.get("recipe", ""))
    axes = body.setdefault("axes", {}) if "cells" in body else body.get("axes")
    if axes is None or not isinstance(axes, dict):
        raise ConfigError(
            f"{source} has a recipe and no axes, or none that are a map of keys to values\n"
            "hint: axes: {strategy.name: [ddp, zero1]}"
        )
    if ".py:" in recipe:
        raise ConfigError(
            f"{source} names {recipe}; a file may not choose code to run\n"
            f"hint: type it: paceline sweep {recipe} --axis ..."
        )
    problems = [
        f"axes.{key} in {source} is not a list of values\nhint: {key}: [A, B]"
        for key, values in axes.items()
        if not isinstance(values, list) or not values
    ]
    if not isinstance(body["overrides"], list):
        problems.append(f"overrides in {source} is not a list\nhint: overrides: [key=value]")
    else:
        problems += refuse_words_in_file(_words_of(body), source)
    if problems:
        raise ConfigError(problems)
    # The same once more as text: `on` is a word of ours, not a truth value.
    as_typed = yaml.BaseLoader("").construct_document(require_plain(text, source))
    return {**body, "axes": as_typed.get("axes", {})}


def _words_of(body: dict[str, Any]) -> list[str]:
    """Return every override that a sweep's file holds: of all cells, of its axes, of its extras."""
    extras = body.get("extras") or {}
    more = extras.values() if isinstance(extras, dict) else []
    listed = [words for words in more if isinstance(words, list)]  # others are refused later
    cells = body.get("cells") or {}
    listed += [w for w in cells.values() if isinstance(w, list)] if isinstance(cells, dict) else []
    words = [*body["overrides"], *(word for words in listed for word in words)]
    for key, values in body["axes"].items():
        values = values if isinstance(values, list) else [values]
        words += [f"{key}={shown_value(value)}" for value in values]
    return [str(word) for word in words]


def _read_axes(axes: Sequence[str], problems: list[str]) -> dict[str, list[Any]]:
    """Read `KEY=A,B` of each --axis; what is wrong is added to `problems`."""
    found: dict[str, list[Any]] = {}
    for text in axes:
        key, sign, values = text.partition("=")
        key = key.strip().lstrip("+")
        if not sign or not key:
            problems.append(f"--axis {text} is not KEY=A,B\nhint: --axis strategy.name=ddp,zero1")
        elif not all(split_values(values)):
            problems.append(
                f"--axis {text} is empty, or has an empty value\nhint: --axis {key}=A,B"
            )
        elif key in found:
            problems.append(f"two axes on {key}\nhint: give all its values in one --axis")
        else:
            found[key] = split_values(values)
    return found


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets: `[0,1],[2,3]` are two values."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _require_sensible(spec: SweepSpec) -> None:
    problems = []
    set_already = {word.lstrip("+~").partition("=")[0] for word in spec.overrides}
    for key, values in spec.axes.items():
        shown = [shown_value(value) for value in values]
        same = [_same(text) for text in shown]
        twice = sorted({text for text in shown if same.count(_same(text)) > 1})
        problems += [f"axis {key} has {text} twice" for text in twice]
        if key in set_already:
            problems.append(f"{key} is an axis and is set for every cell too\nhint: drop one")
        if key == "train.steps":
            problems.append("train.steps cannot be an axis: runs of other lengths do not compare")
    if "train.steps" in set_already:
        problems.append("train.steps is what --steps sets\nhint: --steps N")
    if "train.epochs" in set_already | set(spec.axes):
        problems.append("train.epochs: the runs of a sweep are as long as --steps says")
    if (num_cells := math.prod(map(len, spec.axes.values()))) > MAX_CELLS:
        problems.append(
            f"the axes make {num_cells} cells; {MAX_CELLS} are the most that are planned\n"
            "hint: drop values, or sweep over some of the axes first"
        )
    if len(spec.cells) == 1 and not spec.axes:
        problems.append("one cell has nothing to be compared with\nhint: name another one")
    if not spec.axes and not spec.cells:
        problems.append("a sweep needs an axis\nhint: --axis train.micro_batch_size=4,8")
    problems += [
        f"cell {name} sets train.steps, which --steps sets for all\nhint: drop it"
        for name, words in spec.cells.items()
        if any(word.lstrip("+").startswith("train.steps=") for word in words)
    ]
    if problems:
        raise ConfigError(problems)


def _same(text: str) -> str | float:
    """Return a value so that equal ones are equal: 0.1 and 1e-1 are one value."""
    try:
        return float(text)
    except ValueError:
        return text


def shown_value(value: Any) -> str:
    """Write a value as it is typed after `key=`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(shown_value(item) for item in value)}]"
    return str(value)


def draw_cells(spec: SweepSpec) -> list[SweptCell]:
    """Return the cells that have names, then every combination of the axes, the last axis
    fastest."""
    short = short_keys(spec.axes)
    cells = [
        SweptCell(name=text_cell(name), settings={"cell": name}, overrides=words)
        for name, words in spec.cells.items()
    ]
    for values in product(*spec.axes.values()) if spec.axes else ():
        settings = {key: shown_value(value) for key, value in zip(spec.axes, values, strict=True)}
        name = ",".join(f"{short[key]}={text}" for key, text in settings.items())
        cells.append(
            SweptCell(
                name=text_cell(name),  # as a manifest keeps it
                settings=settings,
                overrides=[f"{key}={text}" for key, text in settings.items()],
            )
        )
    return cells


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key has."""
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
    """Return the cell of that name, or the only one that has all of its `key=value` parts."""
    wanted = {part.strip() for part in split_values(asked)}
    exact = [cell for cell in cells if cell.name == asked]
    fitting = exact or [cell for cell in cells if wanted <= _words(cell)]
    names = "\n".join(f"  {cell.name}" for cell in (fitting or cells)[:MAX_NAMED])
    if not fitting:
        raise ConfigError(f"'{asked}' is not a cell; the cells are\n{names}")
    if len(fitting) > 1:
        raise ConfigError(f"'{asked}' fits {len(fitting)} cells\n{names}")
    if fitting[0].refusal:
        raise ConfigError(f"{fitting[0].name} cannot run: {fitting[0].refusal}")
    return fitting[0]


def _words(cell: SweptCell) -> set[str]:
    return {*split_values(cell.name), *cell.overrides}
