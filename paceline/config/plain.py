"""Reads YAML from any source into plain values, with the same refusals for every caller.

text = read_config_text(path)       a plain file, or a link to one, in UTF-8
require_plain(text, place)          no tags, no aliases, no endless numbers, keys that are keys
tree = read_plain(path)             both, and then the values, for those who need no more
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from paceline.config.section import Section
from paceline.errors import ConfigError, DataError
from paceline.records.files import read_text

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_DIGITS = 1000  # far beyond what any number of a config needs; python itself stops at 4,300
MAX_SHOWN = 80
STR, INT, FLOAT, BOOL = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool"))
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Config = TypeVar("Config", bound=Section)


class Loader(SafeLoader):  # type: ignore[misc]
    """A safe loader, in C if PyYAML was built with it: reading every run of a sweep costs ten times
    less. A date stays text, as in overrides: no key takes one."""

    yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for letter, found in SafeLoader.yaml_implicit_resolvers.items()
    }


def read_config_text(path: Path) -> str:
    """Return the text of a file that a person named, which may be a link."""
    try:
        return read_text(path, MAX_BYTES, follow=True)
    except DataError as error:
        raise ConfigError(error.problems) from error


def read_plain(path: Path) -> dict[str, Any]:
    """Read a run.yaml as it is, for callers that need a part of it: nothing in it is imported, and
    no reference in it is followed."""
    return parse_plain(read_config_text(path), str(path))


def parse_plain(text: str, place: str) -> dict[str, Any]:
    """Return the values of a map in YAML."""
    root = require_plain(text, place)
    try:
        # From the nodes that were looked at: a long file is not parsed again.
        values = {} if root is None else Loader("").construct_document(root)
        # Through JSON: a key that is a number is its text, as in a config that was checked.
        tree: dict[str, Any] = json.loads(json.dumps(values))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{place} holds what no config does: {error}") from error
    return tree


def check_plain(tree: dict[str, Any], schema: type[Config], place: str) -> Config:
    """Check a config, or a section of one, from what `read_plain` read."""
    try:
        return schema.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(
            [
                f"{'.'.join(map(str, item['loc'])) or 'it'} in {place}: {item['msg']}"
                for item in error.errors()
            ]
        ) from error


def number_at(tree: dict[str, Any], section: str, key: str, place: Path) -> int:
    """Return a whole number from 1 on of a tree that nothing has checked."""
    inside = tree.get(section)
    found = inside.get(key) if isinstance(inside, dict) else None
    if type(found) is not int or found < 1:
        raise ConfigError(
            f"{section}.{key} in {place} is {shown(found)}; it is a whole number >= 1\n"
            "hint: bring back the file that the run wrote"
        )
    return found


def require_plain(text: str, place: str, is_map: bool = True) -> yaml.Node | None:
    """Refuse all but safe YAML: a map, no tags, no aliases (they can blow up), bounded depth and
    numbers, and keys that are words or numbers. All problems of the last sort are named at once.
    Return its nodes; None where it is empty."""
    try:
        _require_events(text, place)
        root: yaml.Node | None = yaml.compose(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not valid YAML: {error}") from error
    if is_map and root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{place} must be a map of keys\nhint: key: value, one on each line")
    if problems := [problem for node in iter_nodes(root) for problem in _odd_node(node, place)]:
        raise ConfigError(problems)
    return root


def _require_events(text: str, place: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{line_of(event, place)} a YAML alias\nhint: write the value out")
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{line_of(event, place)} nested more than {MAX_DEPTH} levels deep\n"
                "hint: no key of a config is"
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ConfigError(
                f"{line_of(event, place)} the YAML tag {tag}\n"
                "hint: plain values only; tags run code"
            )


def iter_nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield every node below and including `root`, keys too; depth is bounded by then."""
    if root is None:
        return
    yield root
    parts = [part for pair in root.value for part in pair] if _is_map(root) else root.value
    for part in parts if isinstance(parts, list) else ():
        yield from iter_nodes(part)


def _is_map(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def _odd_node(node: yaml.Node, place: str) -> Iterator[str]:
    if isinstance(node, yaml.ScalarNode):
        if node.tag in (INT, FLOAT) and len(node.value) > MAX_DIGITS:
            yield (
                f"{line_of(node, place)} a number of {len(node.value)} digits\n"
                "hint: no key takes one; text stands in quotes"
            )
        return
    first: dict[str, yaml.Node] = {}
    for key, _ in node.value if _is_map(node) else ():
        if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
            yield (
                f"{line_of(key, place)} {shown(key.value)} is a key for the second time, after line"
                f" {_line(first[key.value])}\nhint: keep one of them"
            )
        if not isinstance(key, yaml.ScalarNode):
            what = "a map" if _is_map(key) else "a list"
            yield f"{line_of(key, place)} {what} is not a key\nhint: write key: value"
        elif key.tag not in (STR, INT, FLOAT, BOOL):
            hint = "write the key's name; a word that YAML reads otherwise stands in quotes"
            yield f"{line_of(key, place)} {key.value or 'nothing'} is not a key\nhint: {hint}"


def line_of(node: yaml.Node | yaml.Event, place: str) -> str:
    """Return `run.yaml:3:`, where a file's line is known to a reader by its number."""
    return f"{place}:{_line(node)}:"


def _line(node: yaml.Node | yaml.Event) -> int:
    assert node.start_mark is not None, "it was parsed from a text"
    return node.start_mark.line + 1


def shown(value: object) -> str:
    """Return a value as a message shows it: an endless one is cut."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
