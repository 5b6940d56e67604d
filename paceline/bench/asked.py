"""The words of `paceline bench run` as targets and overrides, before anything is planned.

zero3 labs/train_distributed:fsdp train.seed=1 zero3:model.dim=256
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.target import Target, find_names, load_targets
from paceline.config.overrides import parse_override
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """Each target once, in the order it was named, with the overrides of both its sides."""

    overrides: dict[str, list[str]]

    @property
    def targets(self) -> list[Target]:
        return [load_targets()[name] for name in self.overrides]


def parse_words(words: Sequence[str]) -> Asked:
    """`ConfigError` lists every word that means nothing, or that would unmake a pair."""
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
    return Asked(own)


def _is_override(word: str) -> bool:
    return "=" in word or _split(word)[1].startswith(("~", "+"))


def _split(word: str) -> tuple[str, str]:
    """`TARGET:key=value` as its two parts; `labs/train_distributed:TARGET` holds a colon too."""
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
    """What a pair compares cannot be set for both its sides."""
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
                    f"{text}: {key} is what {name} compares, so both sides cannot be given one\n"
                    f"hint: leave it out, or measure it with: paceline sweep RECIPE --axis {key}="
                )
    return list(dict.fromkeys(problems))
