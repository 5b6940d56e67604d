"""heartbeat_rank<r>.jsonl: one list of keys for the rank that writes it and for who reads it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from paceline.records.phases import Phase

TAIL_BYTES = 4096
LINE_BYTES = 128  # all lines are as long: one can be written over another


@dataclass(frozen=True)
class Beat:
    """Where a rank was at `time`. `marks` counts every phase it has entered."""

    time: float = 0.0
    rank: int = 0
    step: int = 0
    phase: str = Phase.START
    marks: int = 0

    def to_line(self) -> str:
        return json.dumps(asdict(self)).ljust(LINE_BYTES - 1) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        """Read a line of any version: a key that is missing has its default."""
        found: dict[str, Any] = json.loads(line)
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})


def last_beat(path: Path) -> Beat:
    """Return the newest whole line; a rank that has not begun has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return Beat.from_line(lines[-1])
    except (OSError, IndexError, ValueError):
        return Beat()


def iter_beats(path: Path) -> Iterator[Beat]:
    """Yield all whole lines; none where the file is absent."""
    if path.is_file():
        with path.open() as file:
            yield from (Beat.from_line(line) for line in file if line.endswith("\n"))
