"""Two configs key by key: which have another value. Trees of plain values, as a run.yaml holds."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ABSENT = "absent"


class Difference(NamedTuple):
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """Every dotted key whose value is another one, in the order of the alphabet."""
    old, new = flatten(before), flatten(after)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, ABSENT) != new.get(key, ABSENT):
            yield Difference(key, old.get(key, ABSENT), new.get(key, ABSENT))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
