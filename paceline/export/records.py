"""What `paceline export` writes about an export: manifest.json, beside the files it speaks of."""

from typing import Any, ClassVar

from pydantic import Field

from paceline.records.base import Part, Record

MANIFEST = "manifest.json"


class FileHash(Part):
    num_bytes: int
    sha256: str


class Comparison(Part):
    """One output, by the trained model and by what was loaded again. `error` is the largest
    difference over the largest value."""

    output: str
    shape: list[int]
    by: str = Field(description="The library that computed it, with its version.")
    error: float
    limit: float


class ExportManifest(Record):
    SCHEMA: ClassVar[int] = 1

    kind: str = "paceline export"
    format: str
    dtype: str
    is_merged: bool
    workload: str
    run: str = Field(description="The run's name.")
    step: int
    is_best: bool
    is_average: bool
    inputs: str = Field(description="The real inputs that both were asked about.")
    compared: list[Comparison]
    num_tensors: int = Field(description="Tensors that were read back and are equal.")
    about: dict[str, Any] = Field({}, description="What the workload says of its model.")
    versions: dict[str, str]
    fingerprints: dict[str, str] = Field({}, description="Of the run's config, code and data.")
    files: dict[str, FileHash]


class ExportReport(Part):
    """What the verb prints."""

    out: str
    format: str
    dtype: str
    step: int
    says: str
    num_bytes: int
    num_files: int
    num_tensors: int
    inputs: str
    compared: list[Comparison]
    remarks: list[str]
