"""The base of all sections of a config, and the kinds of numbers that keys have."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """The base of all sections, strict and frozen: `"4"` is not a 4, a misspelt key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    # Who reads a key, where not everybody who could does: strategies by their names.
    readers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
