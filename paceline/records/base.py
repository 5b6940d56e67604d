"""The base of every record: frozen, checked, a JSON file with a schema number."""

import json
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from paceline.errors import DataError
from paceline.records.files import write_atomic


class Part(BaseModel):
    """A piece of a record: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Record(Part):
    """A part that is a file of its own. Bump SCHEMA when a field changes its meaning."""

    SCHEMA: ClassVar[int] = 1

    def to_json(self) -> str:
        body = {"schema": self.SCHEMA, **self.model_dump(mode="json")}
        return json.dumps(body, indent=2, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record; `DataError` when it is absent, damaged or of another schema."""
        try:
            body = json.loads(path.read_text())
            found = body.pop("schema")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError) as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error
        if found != cls.SCHEMA:
            raise DataError(
                f"{path} has schema {found}, this Paceline reads {cls.SCHEMA}\n"
                "hint: read it with the version that wrote it (env.json names it)"
            )
        try:
            return cls.model_validate(body)
        except ValueError as error:
            raise DataError(f"{path} is damaged: no {cls.__name__} record ({error})") from error
