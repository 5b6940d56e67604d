"""The base of every record: frozen, checked, a JSON file with a schema number."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.errors import DataError
from paceline.records.files import read_regular, write_atomic

MAX_SAID = 3
MAX_BYTES = 256 << 20  # the manifest of a checkpoint with a million parts is smaller
# What content that no record has may raise: too deep, too long a number, another shape.
DAMAGED = (
    ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError,
)  # fmt: skip


class Part(BaseModel):
    """A piece of a record: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Body = dict[str, Any]  # a record as its JSON says it


def load_map(
    path: Path, lacks: str = "no map of keys", number: Callable[[str], float] = float
) -> Body:
    """Read a file of JSON with a map of keys in it; `DataError` when it is absent, damaged or not a
    plain file: `lacks` says what it should have been. `number` makes a float of its text."""
    try:
        raw = read_regular(path, MAX_BYTES)
        body = json.loads(raw, parse_float=number, parse_constant=number)
        if b"\\ud" in raw.lower():  # half a character, perhaps, which no file can hold again
            json.dumps(body, ensure_ascii=False).encode()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except DAMAGED as error:
        raise damaged(path, lacks, error) from error
    if not isinstance(body, dict):
        raise damaged(path, lacks, f"it is a {type(body).__name__}")
    return body


def damaged(path: Path, lacks: str, why: object) -> DataError:
    """Return the error about a file that exists and is not what it should be."""
    return DataError(
        f"{path} is damaged: {lacks} ({why})\n"
        "hint: bring back the file that the run wrote, or leave this run out"
    )


def _finite(text: str) -> float:
    """Records have no other numbers: `to_json` writes none."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


class Record(Part):
    """A part that is a file of its own.

    Bump SCHEMA when a field is added without a default, goes, or changes its meaning, and write
    `update_to_N(body)`, which makes schema N of what schema N - 1 wrote: files of every version
    are read. tests/data/runs holds runs of all of them.
    """

    SCHEMA: ClassVar[int] = 1

    def to_json(self) -> str:
        body = {"schema": self.SCHEMA, **self.model_dump(mode="json")}
        return json.dumps(body, indent=2, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record of this schema or an older one; `DataError` when it is absent, damaged, not
        a plain file, or newer than this Paceline."""
        lacks = f"no {cls.__name__} record"
        body = load_map(path, lacks, number=_finite)
        found = body.pop("schema", None)
        if type(found) is not int:
            raise damaged(path, lacks, "it has no schema number")
        later = range(found + 1, cls.SCHEMA + 1)
        if found > cls.SCHEMA or not all(hasattr(cls, f"update_to_{n}") for n in later):
            raise DataError(
                f"{path} has schema {found}, this Paceline reads {cls.SCHEMA}\n"
                "hint: read it with the version that wrote it (env.json names it)"
            )
        try:
            for number in later:
                body = getattr(cls, f"update_to_{number}")(body)
            return cls.model_validate(body)
        except ValidationError as error:
            raise damaged(path, lacks, _in_short(error)) from error
        except DAMAGED as error:
            raise damaged(path, lacks, repr(error)) from error


def _in_short(error: ValidationError) -> str:
    found = error.errors(include_input=False, include_url=False)
    told = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found[:MAX_SAID]]
    more = f"; {len(found) - MAX_SAID} more" if len(found) > MAX_SAID else ""
    return "; ".join(told) + more
