"""What a sweep was asked: flags, or a YAML file with the same words.

    spec = read_spec("lm_tiny", ["train.grad_accum=1"], ["strategy.name=ddp,zero1"], given)
    spec = read_spec("my_sweep.yaml", ["sweep.margin=0.05"], [], given)

A YAML file is a sweep, and no recipe, when it has `axes`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from pydantic import Field

from paceline.config.load import Draft, read_plain, validate
from paceline.config.overrides import parse_override
from paceline.config.schema import Positive, Section
from paceline.config.typed_only import refuse_words_in_file
from paceline.errors import ConfigError
from paceline.records.swept import Metric

PREFIX = "sweep."
Share = Annotated[float, Field(gt=0, lt=1)]
Values = Annotated[list[str | int | float | bool | list[Any]], Field(min_length=1)]


class SweepSpec(Section):
    """Every word of a sweep. On the command line, without a flag of its own: sweep.WORD=value."""

    recipe: str = Field(description="A recipe's name or a YAML file of a run.")
    overrides: list[str] = Field([], description="key=value for every cell.")
    axes: dict[str, Values] = Field({}, description="A key and the values it takes.")
    repeats: Positive = Field(3, description="Runs of each cell.")
    steps: Positive = Field(60, description="Steps of each run.")
    metric: Literal["auto"] | Metric = Field(
        "auto", description="What cells are compared by. auto: tokens_per_s, or samples_per_s."
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Differences below this share do not matter."
    )
    baseline: str = Field("", description="A cell, or the part of its name that tells it apart.")
    target: str = Field("", description="speedup>=1.08 against the baseline, or METRIC>=VALUE.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Shuffles the order of runs.")
    phases: bool = Field(False, description="Pilot, final and extras instead of one round.")
    pilot_repeats: Annotated[int, Field(ge=2)] = Field(2, description="Runs of a cell in A.")
    pilot_steps: Literal["auto"] | Positive = Field(
        "auto", description="Steps of a run in A. auto: a third of steps, at least 20."
    )
    extras: dict[str, list[str]] = Field(
        {"compile": ["train.compile=default"]},
        description="Phase C: name to the overrides that the winner gets.",
    )
    loss_tolerance: Share = Field(
        0.02, description="How far a cell's loss may be from that of its equals."
    )
    stop_on_error: bool = Field(False, description="End the sweep with the first run that fails.")


def read_spec(
    source: str, words: Sequence[str], axes: Sequence[str], given: dict[str, Any]
) -> SweepSpec:
    """`words`: overrides of every cell, and sweep.WORD=value; `given`: flags that were set."""
    problems: list[str] = []
    body = _read_file(source) or {"recipe": source, "axes": {}, "overrides": []}
    body["axes"] = {**body["axes"], **_read_axes(axes, problems)}
    own = [word for word in words if word.lstrip("+").startswith(PREFIX)]
    body["overrides"] = [*body["overrides"], *(word for word in words if word not in own)]
    draft = Draft(f"sweep {source}", OmegaConf.create(body), [], problems)
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
    """The words of a sweep's file; None where `source` is a recipe."""
    if not source.endswith((".yaml", ".yml")):
        return None
    body = {"overrides": [], **read_plain(Path(source))}
    if "recipe" not in body and "axes" not in body:
        return None
    recipe, axes = str(body.get("recipe", "")), body.get("axes")
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
        f"axes.{key} in {source} is no list of values\nhint: {key}: [A, B]"
        for key, values in axes.items()
        if not isinstance(values, list) or not values
    ]
    if not isinstance(body["overrides"], list):
        problems.append(f"overrides in {source} is no list\nhint: overrides: [key=value]")
    else:
        problems += refuse_words_in_file(_words_of(body), source)
    if problems:
        raise ConfigError(problems)
    # As they stand there: `on` is a word of ours, and no truth value.
    as_typed = yaml.load(Path(source).read_text(), yaml.BaseLoader)  # noqa: S506 (strings only)
    return {**body, "axes": as_typed["axes"]}


def _words_of(body: dict[str, Any]) -> list[str]:
    """Return every override that a sweep's file holds: of all cells, of its axes, of its extras."""
    extras = body.get("extras") or {}
    more = extras.values() if isinstance(extras, dict) else []
    words = [*body["overrides"], *(word for listed in more if listed for word in listed)]
    for key, values in body["axes"].items():
        values = values if isinstance(values, list) else [values]
        words += [f"{key}={shown_value(value)}" for value in values]
    return [str(word) for word in words]


def _read_axes(axes: Sequence[str], problems: list[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in axes:
        key, sign, values = text.partition("=")
        key = key.strip().lstrip("+")
        if not sign or not key:
            problems.append(f"--axis {text} is no KEY=A,B\nhint: --axis strategy.name=ddp,zero1")
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
    """At commas that are not inside brackets: `[0,1],[2,3]` are two values."""
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
    if not spec.axes:
        problems.append("a sweep needs an axis\nhint: --axis train.micro_batch_size=4,8")
    if problems:
        raise ConfigError(problems)


def _same(text: str) -> str | float:
    """0.1 and 1e-1 are one value."""
    try:
        return float(text)
    except ValueError:
        return text


def shown_value(value: Any) -> str:
    """As it is typed after `key=`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(shown_value(item) for item in value)}]"
    return str(value)
