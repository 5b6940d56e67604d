"""How ranks share the work: `base` is the seam, one idea a file, `REGISTRY` the list.

A new strategy is one file, one line here, one row in tests/ranks/test_parity.py. Its file says all
else: its keys, its mesh, the cases that prove it. Nothing here loads torch.
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from pydantic import Field, create_model

from paceline.config.schema import RunConfig, StrategyConfig
from paceline.errors import ConfigError
from paceline.strategies.base import Strategy

# In the order in which they are listed and proven. Other packages bring theirs as entry points of
# GROUP, each MODULE:OBJECT as here.
REGISTRY: tuple[str, ...] = (
    "paceline.strategies.ddp:SINGLE",
    "paceline.strategies.ddp:DDP",
    "paceline.strategies.zero:ZERO1",
    "paceline.strategies.zero:ZERO2",
    "paceline.strategies.zero:ZERO3",
    "paceline.strategies.zero:ZERO2_HYBRID",
    "paceline.strategies.zero:ZERO3_HYBRID",
    "paceline.strategies.pipeline.strategy:PIPELINE",
    "paceline.strategies.deepspeed.strategy:DEEPSPEED",
)
GROUP = "paceline.strategies"


@cache
def all_strategies() -> dict[str, Strategy]:
    """Load every strategy, by its name; `ConfigError` where two have one name."""
    found: dict[str, Strategy] = {}
    owners: dict[str, str] = {}
    brought = [point.value for point in entry_points(group=GROUP)]
    for place in (*REGISTRY, *dict.fromkeys(brought)):
        strategy = _load(place)
        for name in (strategy.name, *strategy.aliases):
            if name in owners:
                raise ConfigError(f"{place} and {owners[name]} are both a strategy '{name}'")
            owners[name] = place
        found[strategy.name] = strategy
    return found


def find_strategy(name: str) -> Strategy:
    """Return the strategy of a name or an alias."""
    return all_strategies()[aliases().get(name, name)]


def aliases() -> dict[str, str]:
    """Return the other names that strategies have: `{"fsdp": "zero3"}`."""
    return {other: known.name for known in all_strategies().values() for other in known.aliases}


def lossy_keys() -> frozenset[str]:
    """Return the keys that change the gradients, so that a run with another value is a different
    training."""
    own = [key for known in all_strategies().values() for key in known.lossy]
    return frozenset(f"strategy.{key}" for key in ("sync_batchnorm", *own))


def most_sharding(config: RunConfig) -> Strategy:
    """Return the first of the strategies that hold least per rank: those that shard weights too."""
    return max(all_strategies().values(), key=lambda known: known.zero_stage(config) or 0)


@cache
def strategy_section() -> type[StrategyConfig]:
    """Return the section `strategy` of a run: the keys of all strategies side by side, each with
    the type and default that its own section gives it."""
    found = all_strategies()
    sections = list(dict.fromkeys(known.Settings for known in found.values()))
    _require_one_meaning(sections)
    # A section that another one extends comes with that one.
    last = [s for s in sections if not any(s is not t and issubclass(t, s) for t in sections)]
    names: Any = Literal[(*found, *aliases())]
    lines = (", ".join((n, *known.aliases)) + f": {known.summary}" for n, known in found.items())
    about = "\n  ".join(("How ranks share the work.", *lines))
    default = StrategyConfig.model_fields["name"].default
    fields: dict[str, Any] = {"name": (names, Field(default, description=about))}
    section = _extend(tuple(reversed(last)), fields)
    section.readers = {
        key: tuple(name for name, known in found.items() if key in known.Settings.model_fields)
        for key in section.model_fields
        if key not in StrategyConfig.model_fields
    }
    return section


def _extend(
    bases: tuple[type[StrategyConfig], ...], fields: dict[str, Any]
) -> type[StrategyConfig]:
    return create_model("StrategyConfig", __base__=bases, **fields)


def _load(place: str) -> Strategy:
    module, _, attribute = place.partition(":")
    try:
        strategy = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the strategy at {place} cannot be loaded: {error}\n"
            "hint: fix or uninstall the package that provides it"
        ) from error
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{place} is not a Strategy: it is {type(strategy).__name__}")
    return strategy


def _require_one_meaning(sections: Iterable[type[StrategyConfig]]) -> None:
    """Let two strategies share a key only if it takes the same values and has the same default."""
    known: dict[str, tuple[type, Any]] = {}
    problems = []
    for section in sections:
        for key, field in section.model_fields.items():
            shape = (field.annotation, field.default, field.metadata)
            owner, other = known.setdefault(key, (section, shape))
            if shape != other:
                problems.append(
                    f"strategy.{key} is one thing in {owner.__name__} and another in"
                    f" {section.__name__}\nhint: one name, one meaning: rename it in one of them"
                )
    if problems:
        raise ConfigError(problems)
