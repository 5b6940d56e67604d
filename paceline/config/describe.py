"""Describes the schema: every key with its type, default and meaning, and the nearest known key.
Also compares two configs key by key, as trees of plain values such as run.yaml holds."""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from paceline.records import Part
from paceline.records.words import nearest

_SIGNS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}
_NOUNS = {int: "whole number", float: "number", str: "text", bool: "true|false"}
ABSENT = "absent"


class Key(Part):
    """One key of the config, as `paceline recipes --keys` shows it."""

    path: str
    type: str
    default: Any
    meaning: str
    read_by: tuple[str, ...] = Field((), description="Strategies that read it; empty: any run.")


def iter_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a schema, depth first."""
    readers: Mapping[str, tuple[str, ...]] = getattr(schema, "readers", {})
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        if is_section(field.annotation):
            assert isinstance(field.annotation, type)
            yield from iter_keys(field.annotation, f"{path}.")
        else:
            yield Key(
                path=path,
                type=wants(field),
                default="(required)" if field.is_required() else field.get_default(),
                meaning=field.description or "",
                read_by=readers.get(name, ()),
            )


def field_at(schema: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """Return the field a dotted path names, or None when the schema has no such key."""
    field = schema.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    if not is_section(field.annotation):
        return None
    assert isinstance(field.annotation, type)
    return field_at(field.annotation, path[1:])


def is_open_map(field: FieldInfo) -> bool:
    """Tell whether a section takes any key, such as a map of environment variables."""
    return get_origin(field.annotation) is dict


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def allows_word(field: FieldInfo, word: str) -> bool:
    """Tell whether `word` is one of the literals that a field's type allows."""
    parts = [field.annotation, *get_args(field.annotation)]
    return any(get_origin(part) is Literal and word in get_args(part) for part in parts)


def wants(field: FieldInfo) -> str:
    """Describe what a value must be: `auto, or whole number >= 1`."""
    bounds = "".join(_bound(item) for item in field.metadata)
    return _words(field.annotation) + bounds


def nearest_word(field: FieldInfo, value: Any) -> str | None:
    """Return the word that a misspelt one most likely meant, among those that a field's type
    allows."""
    parts = [field.annotation, *get_args(field.annotation)]
    words = [str(w) for part in parts if get_origin(part) is Literal for w in get_args(part)]
    return nearest(str(value), words)


def nearest_key(path: str, schema: type[BaseModel]) -> str | None:
    """Return the known key a misspelt one most likely meant."""
    known = {key.path: key.path.rpartition(".") for key in iter_keys(schema)}
    section, _, leaf = path.rpartition(".")
    beside = {parts[2]: key for key, parts in known.items() if parts[0] == section}
    anywhere = {parts[2]: key for key, parts in known.items()}
    # The last part decides: two keys of one section are alike in most of their letters.
    for leaves in (beside, anywhere):
        close = nearest(leaf, leaves, cutoff=0.65)
        if close is not None:
            return leaves[close]
    return None


def _words(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return ", or ".join(_words(arg) for arg in args)
    if origin is Annotated:
        field_info = [bound for item in args[1:] for bound in getattr(item, "metadata", [item])]
        return _words(args[0]) + "".join(_bound(item) for item in field_info)
    if origin in (list, tuple):
        return f"list of {_words(args[0])}"
    if origin is dict or is_section(annotation):
        return "a map of keys"
    return _NOUNS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bound(item: Any) -> str:
    sign = _SIGNS.get(type(item))
    return f" {sign[0]} {getattr(item, sign[1]):g}" if sign else ""


class Difference(NamedTuple):
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield every dotted key whose values differ, in alphabetical order."""
    old, new = flatten(before), flatten(after)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, ABSENT) != new.get(key, ABSENT):
            yield Difference(key, old.get(key, ABSENT), new.get(key, ABSENT))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn `{"a": {"b": 1}}` into `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
