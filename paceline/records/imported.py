"""Imported: what was found in the files of another trainer's run."""

from pydantic import Field

from paceline.records.base import Part, Record


class SourceFile(Part):
    """A file that was read, and what it was taken for."""

    path: str
    kind: str = Field(description="A log by its trainer, metrics, flight recorder, chrome trace.")
    said: str = Field("", description="What was found in it, or why nothing was.")


class Fault(Part):
    """Something that a log says went wrong."""

    kind: str = Field(description="crash, hang, out_of_memory, nan_loss or killed.")
    words: str
    rank: int | None = None
    host: str = ""
    step: int | None = None
    file: str = ""
    is_root: bool = Field(False, description="A launcher says that this one was first.")
    is_echo: bool = Field(False, description="It follows from another rank's end.")


class Imported(Record):
    """A run of another trainer, as far as its files tell it."""

    name: str
    trainer: str = Field(description="torchrun, deepspeed, lightning, hf trainer or unknown.")
    num_ranks: int
    num_steps: int = Field(description="Steps of which a loss or a time is known.")
    last_step: int
    files: list[SourceFile]
    faults: list[Fault] = []
    notes: list[str] = []
