"""From what was typed to a frozen `RunConfig`, or to one error that lists every problem.

draft = read_draft("lm_tiny", ["train.steps=50"])     YAML and overrides, nothing trusted yet
config = validate(draft, schema)                      all problems at once, or a config
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from paceline.config.aliases import in_our_words, take_from_file
from paceline.config.describe import (
    allows_word,
    field_at,
    is_open_map,
    is_section,
    nearest_word,
    wants,
)
from paceline.config.overrides import (
    Override,
    apply_override,
    has_place,
    parse_override,
    unknown_key,
)
from paceline.config.plain import (
    Config,
    Loader,
    check_plain,
    iter_nodes,
    line_of,
    read_config_text,
    read_plain,
    require_plain,
    shown,
)
from paceline.config.schema import SECRET_NAME, RunConfig
from paceline.config.section import Section
from paceline.config.typed_only import refuse_in_file
from paceline.errors import ConfigError
from paceline.records.words import did_you_mean

# Keys by which other tools import code that a YAML file names. Ours never does.
INT_BITS = 63
REFERENCE_HINT = "hint: ${train.seed} stands for the value of that key"
IMPORTING_KEYS = frozenset({"_target_", "_component_", "_partial_", "_call_", "class_path"})
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_ENV_REFERENCE = re.compile(r"oc\.env:\s*([^,}\s]+)")


@dataclass
class Draft:
    """What was asked, before it is checked: the recipe's tree and the overrides on it."""

    place: str
    tree: DictConfig
    overrides: list[Override]
    problems: list[str] = field(default_factory=list)
    is_ours: bool = False  # a recipe of ours, or a run.yaml that was written here: as if typed

    def typed(self, key: str) -> Any | None:
        """Return the value that the command line gives `key`, or None when it does not."""
        values = [item.value for item in self.overrides if item.key == key]
        return values[-1] if values else None


def recipe_names() -> list[str]:
    folder = resources.files("paceline.config") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir())


def recipe_text(name: str) -> str:
    if name not in recipe_names():
        guess = _meant_file(name) or did_you_mean(name, recipe_names())
        raise ConfigError(
            f"there is no recipe or file '{name}'\n"
            f"hint: {guess}the recipes are {', '.join(recipe_names())}"
        )
    return (resources.files("paceline.config") / "recipes" / f"{name}.yaml").read_text()


def _meant_file(name: str) -> str:
    """Return the hint for `job:Job` and `job.Job`, as Python writes it, where job.py is there."""
    for sign in ":.":
        head, _, class_name = name.rpartition(sign)
        for file in (f"{head}.py", f"{head.replace('.', '/')}.py"):
            if head and Path(file).is_file():
                return f"did you mean {file}:{class_name}? "
    return ""


def read_draft(source: str | None, overrides: Sequence[str]) -> Draft:
    """Read a recipe's name or a YAML file (None: an empty tree), and parse the overrides."""
    is_file = source is not None and source.endswith((".yaml", ".yml"))
    if source is None:
        place, text = "the defaults", "{}"
    elif is_file:
        place, text = source, read_config_text(Path(source))
    else:
        place, text = f"recipe {source}", recipe_text(source)
    draft = Draft(place, _parse_yaml(text, place), [], is_ours=not is_file)
    if is_file:
        _put_in_our_words(draft)
    for item in overrides:
        try:
            draft.overrides += [parse_override(word) for word in in_our_words(item)]
        except ValueError as error:
            draft.problems.append(str(error))
    return draft


def _put_in_our_words(draft: Draft) -> None:
    """Rename the keys of other trainers in a file. They stay what a file says, and not the command
    line."""
    written: Any = OmegaConf.to_container(draft.tree, resolve=False)
    try:
        renamed = [parse_override(word) for word in take_from_file(written)]
    except ValueError as error:
        draft.problems.append(f"{draft.place}: {error}")
        return
    if renamed:
        draft.tree = draft_tree(written, draft.place)
        for item in renamed:
            OmegaConf.update(draft.tree, item.key, item.value)


def validate(draft: Draft, schema: type[Config]) -> Config:
    """Apply the overrides and check every key; `ConfigError` lists all that is wrong."""
    problems = list(draft.problems)
    for override in draft.overrides:
        try:
            apply_override(draft.tree, override, schema)
        except (ValueError, OmegaConfBaseException) as error:
            problems.append(str(error))
    problems += _forbidden(draft)
    tree = _resolve(draft, problems)
    if not draft.is_ours:
        problems += refuse_in_file(tree, draft.place, lambda path: _overridden(path, draft))
    try:
        # As JSON: strict about numbers, yet a list may fill a tuple and text a path or an enum.
        config = schema.model_validate_json(json.dumps(_with_words(tree, schema)))
        problems += _too_large(tree, draft)
    except ValidationError as error:
        problems += _explain(error, draft, schema)
        # That a value is wrong is known, even where none of our words for it fits.
        raise ConfigError(problems or f"{draft.place}: {error}") from error
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Section) -> str:
    """Return the text of run.yaml: every key with the value that was used."""
    return yaml.dump(
        config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True
    )


def load_config(path: Path, schema: type[RunConfig]) -> RunConfig:
    """Read back what `dump_config` wrote; no interpolation, no overrides."""
    return check_plain(read_plain(path), schema, str(path))


def _parse_yaml(text: str, place: str) -> DictConfig:
    require_plain(text, place)
    require_references(text, place)
    return draft_tree(text, place)


def draft_tree(source: str | dict[str, Any], place: str) -> DictConfig:
    """Return a map that overrides can be applied to, from its text or its values."""
    try:
        tree = OmegaConf.create(source)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{place} is not valid YAML: {first}") from error
    assert isinstance(tree, DictConfig), "a map was read"
    return tree


def require_references(text: str, place: str) -> None:
    """Refuse references that cannot be read, whatever they refer to, each with its line."""
    if problems := list(_broken_references(text, place)):
        raise ConfigError(problems)


def _broken_references(text: str, place: str) -> Iterator[str]:
    for node in iter_nodes(yaml.compose(text, Loader)) if "${" in text else ():
        if isinstance(node, yaml.ScalarNode) and "${" in node.value:
            try:
                OmegaConf.create([node.value])
            except OmegaConfBaseException:
                yield (
                    f"{line_of(node, place)} {shown(node.value)} is not a reference\n"
                    f"{REFERENCE_HINT}"
                )


def _forbidden(draft: Draft) -> Iterator[str]:
    """Yield keys that import code, and references to secrets, wherever they are."""
    for path, value in _leaves(OmegaConf.to_container(draft.tree, resolve=False)):
        if IMPORTING_KEYS.intersection(path):
            key = ".".join(path)
            yield f"{key} in {draft.place} would import code that a file names: refused"
        for name in _ENV_REFERENCE.findall(value) if isinstance(value, str) else []:
            if name.startswith("${"):
                yield f"{'.'.join(path)} computes the name of a variable: write the name out"
            if SECRET_NAME.search(name):
                yield (
                    f"{'.'.join(path)} reads the secret {name}; configs are written to the run"
                    " directory\nhint: let your code read it from the environment"
                )


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list) and tree:
        for value in tree:
            yield from _leaves(value, path)
    else:
        yield path, tree


def _too_large(tree: Any, draft: Draft) -> Iterator[str]:
    """Yield numbers that no computer counts with; keys without an upper bound would take them."""
    for path, value in _leaves(tree):
        if isinstance(value, int) and value.bit_length() > INT_BITS:
            yield (
                f"{'.'.join(path)} in {_place(path, draft)} is a number of {len(str(abs(value)))}"
                f" digits\nhint: whole numbers are below 2**{INT_BITS}"
            )


def _resolve(draft: Draft, problems: list[str]) -> Any:
    try:
        return OmegaConf.to_container(draft.tree, resolve=True)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        problems.append(
            f"{error.full_key or 'a value'} in {draft.place}: {first}\n{REFERENCE_HINT}"
        )
        return OmegaConf.to_container(draft.tree, resolve=False)


def _with_words(tree: Any, schema: type[BaseModel]) -> Any:
    """Give switches that are words their word back: YAML reads a bare `off` as false."""
    if not isinstance(tree, dict):
        return tree
    words, changed = {True: "on", False: "off"}, {}
    for key, value in tree.items():
        field = schema.model_fields.get(key)
        if field is not None and is_section(field.annotation):
            assert isinstance(field.annotation, type)
            value = _with_words(value, field.annotation)
        elif field is not None and isinstance(value, bool) and allows_word(field, words[value]):
            value = words[value]
        changed[key] = value
    return changed


def _explain(error: ValidationError, draft: Draft, schema: type[BaseModel]) -> Iterator[str]:
    """Say pydantic's errors in our words, one for each key however many types its value missed."""
    seen: set[tuple[str, ...]] = set()
    for item in error.errors():
        path = _real_path(item["loc"], schema)
        if path in seen:
            continue
        seen.add(path)
        key, place = ".".join(path), _place(path, draft)
        known = field_at(schema, path)
        inside = item["loc"][len(path) :]  # of a list, where every item has keys
        if len(inside) > 1 and isinstance(inside[0], int):
            says = {"extra_forbidden": "is not a key there", "missing": "is required"}
            what = says.get(item["type"], f"is {item['input']!r}: {item['msg']}")
            yield f"{key}[{inside[0]}].{inside[1]} in {place} {what}"
        elif item["type"] == "extra_forbidden":
            if not _is_reported(path, draft, schema):
                yield unknown_key(key, place, schema)
        elif item["type"] == "missing":
            yield f"{key} is required and {draft.place} does not set it"
        elif item["type"] == "value_error":
            said = item["msg"].removeprefix("Value error, ")
            yield f"{key} in {_typed_places(path, said, draft) or place}: {said}"
        elif known is not None:
            close = nearest_word(known, item["input"])
            hint = f"\nhint: did you mean {close}?" if close else ""
            yield f"{key}={shown(item['input'])} in {place}; it wants {wants(known)}{hint}"
        else:
            yield f"{key} in {place}: {item['msg']}"


def _real_path(loc: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, ...]:
    """Return the key an error is about; pydantic appends the tried type's name to it."""
    path = tuple(str(part) for part in loc)
    for length in range(1, len(path)):
        known = field_at(schema, path[:length])
        if known is not None and not is_section(known.annotation) and not is_open_map(known):
            return path[:length]
    return path


def _is_reported(path: tuple[str, ...], draft: Draft, schema: type[BaseModel]) -> bool:
    """Tell whether the override that set an unknown key names it, and so was refused by itself:
    one with a value that holds an unknown key was not."""
    setting = [item for item in draft.overrides if item.path == path[: len(item.path)]]
    return any(not has_place(schema, item.path) for item in setting)


def _overridden(path: tuple[str, ...], draft: Draft) -> bool:
    return any(item.path == path[: len(item.path)] for item in draft.overrides)


def _typed_places(path: tuple[str, ...], said: str, draft: Draft) -> str:
    """Return where keys inside `path` were typed that a message names in its first line: what is
    wrong with a section is often two of its keys together."""
    words = set(re.findall(r"\w+", said.partition("\n")[0]))
    texts = {item.key: item.text for item in draft.overrides if _is_inside(item.path, path, words)}
    places = " and ".join(f"'{shown(text)}'" for text in texts.values())
    return f"override{'s' if len(texts) > 1 else ''} {places}" if places else ""


def _is_inside(typed: tuple[str, ...], path: tuple[str, ...], words: set[str]) -> bool:
    length = len(path)
    return len(typed) > length and typed[:length] == path and typed[length] in words


def _place(path: tuple[str, ...], draft: Draft) -> str:
    for item in reversed(draft.overrides):
        if item.path == path[: len(item.path)]:
            return f"override '{shown(item.text)}'"
    return draft.place
