"""events.jsonl: what happened in a run, a line each, as it was noticed.

Whoever notices something appends: the watcher of the run, a drill that plants a fault. A line is
whole or not there; a reader leaves out what it does not understand, for a crash may have cut it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from paceline.records.base import DAMAGED, Part
from paceline.records.disk import Appender, Losses
from paceline.records.files import open_regular
from paceline.records.moments import wall_time
from paceline.records.words import visible

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")  # from the least on
MAX_LINE = 1 << 16
Evidence = dict[str, Any]  # numbers, texts and lists of them, by name: as JSON holds it


class Event(Part):
    """Something that was noticed at `time`, in seconds since 1970. `kind` is that of the finding
    that it becomes if it stands; `rank` and `step` are None where it is about none."""

    time: float = Field(default_factory=wall_time)
    rank: int | None = None
    step: int | None = None
    kind: str
    severity: Severity = "warning"
    words: str
    evidence: Evidence = {}

    def __str__(self) -> str:
        at = f"step {self.step}: " if self.step is not None else ""
        return visible(f"{at}{self.words}")

    def to_line(self) -> str:
        return json.dumps(self.model_dump(mode="json"), allow_nan=False) + "\n"


class EventLog:
    """Appends events to a file. A disk that takes none costs the events and nothing else."""

    def __init__(self, path: Path, lost: Losses | None = None) -> None:
        self._file = Appender(path, lost)

    def append(self, event: Event) -> None:
        self._file.append(event.to_line().encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def iter_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file in their order; none where it is absent."""
    try:
        file = open_regular(path)
    except OSError:
        return
    with file:
        while line := file.readline(MAX_LINE):
            if line.endswith(b"\n") and (event := parse_event(line)) is not None:
                yield event


def parse_event(line: str | bytes) -> Event | None:
    """Return the event of a line; None where it is none that we wrote."""
    try:
        return Event.model_validate(json.loads(line))
    except (ValidationError, *DAMAGED):
        return None
