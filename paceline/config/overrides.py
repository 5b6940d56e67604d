"""Overrides as Hydra users write them: `a.b=c` and `++a.b=c` set, `+a.b=c` adds, `~a.b` drops."""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from yaml import YAMLError

from paceline.config.describe import field_at, is_open_map, nearest_key
from paceline.config.plain import require_plain, shown
from paceline.errors import ConfigError

_SHAPE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w.\-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Override:
    text: str
    action: Literal["set", "add", "drop"]
    path: tuple[str, ...]
    value: Any = None
    raw: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)


def parse_override(text: str) -> Override:
    """Read one override; `ValueError` says what is wrong with it."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how python takes other bytes
        raise ValueError(f"override {text!r} is not text in UTF-8\nhint: type it in UTF-8")
    found = _SHAPE.fullmatch(text)
    if not found:
        raise ValueError(
            f"'{text}' is not an override\nhint: write key=value, as in train.steps=50"
        )
    sign, key, value = found["sign"], found["key"], found["value"]
    path = tuple(key.split("."))
    if not all(path):
        raise ValueError(f"'{text}' has an empty part in its key")
    if sign == "~":
        return Override(text, "drop", path)
    if value is None:
        raise ValueError(f"'{text}' has no value\nhint: write {key}=VALUE")
    action: Literal["set", "add"] = "add" if sign == "+" else "set"
    return Override(text, action, path, _parse_value(text, value), value)


def apply_override(tree: DictConfig, override: Override, schema: type[BaseModel]) -> None:
    """Change `tree` in place; `ValueError` when the schema has no place for it."""
    field = field_at(schema, override.path)
    if not has_place(schema, override.path):
        raise ValueError(unknown_key(override.key, f"override '{override.text}'", schema))
    if override.action == "drop":
        _drop(tree, override)
    elif override.action == "add" and field is not None:
        raise ValueError(
            f"'{override.text}' adds a key that the schema already has\n"
            f"hint: write {override.text.lstrip('+')}; + is for the open maps only"
        )
    else:
        # A variable of the environment is text: NAME=1e5 and NAME=true stay as they were typed.
        is_text = _under_open_map(schema, override.path, of=str) and "${" not in override.raw
        value = override.raw if is_text else override.value
        OmegaConf.update(tree, override.key, value, merge=False, force_add=True)


def has_place(schema: type[BaseModel], path: tuple[str, ...]) -> bool:
    return field_at(schema, path) is not None or _under_open_map(schema, path)


def unknown_key(key: str, place: str, schema: type[BaseModel]) -> str:
    close = nearest_key(key, schema)
    hint = f"did you mean {close}?" if close else "`paceline recipes --keys RECIPE` lists every key"
    return f"unknown key {key} in {place}\nhint: {hint}"


def _parse_value(text: str, value: str) -> Any:
    if not value:
        return ""
    try:
        require_plain(value, f"override '{shown(text)}'", is_map=False)
        tree = OmegaConf.from_dotlist([f"v={value}"])
    except ConfigError as error:
        raise ValueError(str(error)) from error
    except (YAMLError, ValueError, OmegaConfBaseException) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"the value of '{shown(text)}' cannot be read: {first}") from error
    # Interpolations are resolved later, when the whole tree is there.
    return OmegaConf.to_container(tree, resolve=False)["v"]  # type: ignore[index,call-overload]


def _under_open_map(schema: type[BaseModel], path: tuple[str, ...], of: type | None = None) -> bool:
    found = (field_at(schema, path[:length]) for length in range(1, len(path)))
    maps = [field for field in found if field is not None and is_open_map(field)]
    return any(of is None or get_args(field.annotation)[1] is of for field in maps)


def _drop(tree: DictConfig, override: Override) -> None:
    parent = OmegaConf.select(tree, ".".join(override.path[:-1])) if override.path[1:] else tree
    if not isinstance(parent, DictConfig) or override.path[-1] not in parent:
        raise ValueError(f"'{override.text}' drops a key that the recipe does not set")
    del parent[override.path[-1]]
