"""The targets of `paceline bench`, pairs of configs in targets/*.yaml; and the arguments of
`paceline bench run`, split into targets and overrides before anything is planned.

zero3 labs/train_distributed:fsdp train.seed=1 zero3:model.dim=256
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.overrides import parse_override
from paceline.config.plain import check_plain, parse_plain
from paceline.config.section import Positive, Section
from paceline.errors import ConfigError
from paceline.records.words import did_you_mean

Device = Literal["cpu", "cuda"]
Goal = Literal["speed", "memory"]
ALL = "all"
RECIPE = "bench.recipe"  # what both sides train, in place of the target's own
# Spellings of the lab in the repository ai-performance-engineering whose pairs these targets repeat
# at equal work (docs/bench.md); its own targets are those of `LAB`.
CHAPTERS = ("labs/train_distributed", "lab_train_distributed", "train_distributed")
LAB = (
    "ddp", "ddp_flash", "ddp_compression", "fsdp", "fsdp_fp8", "symmem_training",
    "zero1", "zero2", "zero3",
    "pipeline_gpipe_2stages", "1f1b_2stages", "dualpipe_2stages", "dualpipev_2stages",
)  # fmt: skip


class Work(Section):
    """Hold what both sides train."""

    recipe: str
    overrides: list[str] = []


class Arm(Section):
    """One side of a pair. Its overrides set keys of `differs` and nothing else."""

    name: str
    overrides: list[str] = []
    cpu: list[str] = []
    cuda: list[str] = []

    def overrides_on(self, device: Device) -> list[str]:
        return [*self.overrides, *(self.cuda if device == "cuda" else self.cpu)]


class Needs(Section):
    """Hold what a machine must have. Without it the target is skipped, and the reason is shown."""

    ranks: Positive = 1
    device: Literal["any", "cuda"] = "any"
    compiler: bool = False
    because: str = ""


class Agreement(Section):
    """Hold how far losses may differ, relative, at the worst step. None: they cannot be
    compared."""

    cpu: Annotated[float, Field(gt=0)] | None = None
    cuda: Annotated[float, Field(gt=0)] | None = None
    because: str


class Target(Section):
    """A baseline, which is the first arm, and what is compared with it."""

    name: str
    title: str
    goal: Goal
    per_device: bool = Field(False, description="Compare the rate per device, not that of all.")
    aliases: list[str] = []
    needs: Needs = Needs()
    work: dict[Device, Work]
    arms: Annotated[list[Arm], Field(min_length=2)]
    differs: dict[str, str] = Field(description="Keys that the sides may differ in, and why.")
    loss: Agreement

    @model_validator(mode="after")
    def _arms_set_what_differs(self) -> Self:
        for arm in self.arms:
            for text in (*arm.overrides, *arm.cpu, *arm.cuda):
                if parse_override(text).key not in self.differs:
                    raise ValueError(f"{arm.name} sets {text}, which is not declared in differs")
        return self

    @property
    def baseline(self) -> str:
        return self.arms[0].name

    def tolerance(self, device: Device) -> float | None:
        return self.loss.cuda if device == "cuda" else self.loss.cpu


@cache
def load_targets() -> dict[str, Target]:
    """Return every target by its name."""
    folder = resources.files("paceline.bench") / "targets"
    files = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
    }
    return {name: parse_target(name, text) for name, text in sorted(files.items())}


def parse_target(name: str, text: str) -> Target:
    place = f"target {name}"
    return check_plain({"name": name, **parse_plain(text, place)}, Target, place)


def find_names(word: str) -> list[str]:
    """Return the targets that a word names: `all`, a target, `labs/train_distributed[:TARGET]`."""
    targets = load_targets()
    if word == ALL:
        return list(targets)
    chapter, colon, name = word.rpartition(":")
    if word.rstrip("/") in CHAPTERS:
        return list(LAB)
    if colon and chapter not in CHAPTERS:
        raise ConfigError(f"there is no chapter '{chapter}'\nhint: {CHAPTERS[0]}:{name}, or {name}")
    aliases = {alias: target.name for target in targets.values() for alias in target.aliases}
    name = aliases.get(name, name)
    if name not in targets:
        guess = did_you_mean(name, [*targets, ALL, *CHAPTERS])
        raise ConfigError(
            f"there is no target '{word}'\nhint: {guess}the targets are {', '.join(targets)}"
        )
    return [name]


@dataclass(frozen=True)
class AskedTargets:
    """Hold each target once, in the order it was named, with the overrides of both its sides."""

    overrides: dict[str, list[str]]

    @property
    def targets(self) -> list[Target]:
        return [load_targets()[name] for name in self.overrides]


def parse_words(words: Sequence[str]) -> AskedTargets:
    """Read the words of the command line. `ConfigError` lists every word that means nothing, or
    that would make the sides of a pair alike."""
    problems: list[str] = []
    names: dict[str, None] = {}
    for word in words:
        if not _is_override(word):
            names |= dict.fromkeys(_collect(word, problems))
    if not names and not problems:
        problems.append("bench run needs a target, or all\nhint: paceline bench list")
    own: dict[str, list[str]] = {name: [] for name in names}
    for word in words:
        if _is_override(word):
            place, text = _split(word)
            for name in _collect(place, problems) if place else names:
                if name in own:
                    own[name].append(text)
                else:
                    problems.append(f"'{word}' is for {name}, which is not among the targets")
    problems += _compared(own)
    if problems:
        raise ConfigError(problems)
    return AskedTargets(own)


def _is_override(word: str) -> bool:
    return "=" in word or _split(word)[1].startswith(("~", "+"))


def _split(word: str) -> tuple[str, str]:
    """Split `TARGET:key=value` into its two parts; `labs/train_distributed:TARGET` has a colon
    too."""
    left, equals, value = word.partition("=")
    place, _, key = left.rpartition(":")
    return place, f"{key}{equals}{value}"


def _collect(word: str, problems: list[str]) -> list[str]:
    try:
        return find_names(word)
    except ConfigError as error:
        problems += error.problems
        return []


def _compared(own: dict[str, list[str]]) -> list[str]:
    """Refuse overrides that would set what a pair compares for both of its sides."""
    problems = []
    for name, texts in own.items():
        for text in texts:
            try:
                key = parse_override(text).key
            except ValueError as error:
                problems.append(str(error))
                continue
            if key in load_targets()[name].differs:
                problems.append(
                    f"{text}: {key} is what {name} compares, so it cannot be set for both sides\n"
                    f"hint: leave it out, or measure it with: paceline sweep RECIPE --axis {key}="
                )
    return list(dict.fromkeys(problems))
