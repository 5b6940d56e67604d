"""The base of every record: frozen, checked, a JSON file with a schema number."""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from paceline.errors import DataError
from paceline.records.files import read_regular, write_atomic

MAX_BYTES = 256 << 20  # the manifest of a checkpoint with a million parts is smaller
# What content that no record has may raise: too deep, too long a number, another shape.
DAMAGED = (
    ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError,
)  # fmt: skip


class Part(BaseModel):
    """A piece of a record: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Body = dict[str, Any]  # a record as its JSON says it


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
        try:
            body = json.loads(read_regular(path, MAX_BYTES))
            found = int(body.pop("schema"))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except DAMAGED as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error
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
        except DAMAGED as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error
