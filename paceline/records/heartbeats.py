"""heartbeat_rank<r>.jsonl: one list of keys for the rank that writes it and its readers."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self, cast

from paceline.errors import DataError
from paceline.records.files import open_regular
from paceline.records.phases import Phase

TAIL_BYTES = 4096
LINE_BYTES = 128  # all lines are as long: one can be written over another
MAX_SAID = 120


@dataclass(frozen=True)
class Beat:
    """Where a rank was at `time`. `marks` counts every phase it has entered; for `still_s` it has
    entered none, which is 0 up to the end of the first step it takes: that one may compile. None:
    a version up to 0.6 did not say."""

    time: float = 0.0
    rank: int = 0
    step: int = 0
    phase: str = Phase.START
    marks: int = 0
    still_s: float | None = None

    def to_line(self) -> str:
        return json.dumps(asdict(self)).ljust(LINE_BYTES - 1) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Self:
        """Read a line of any version: a key that is missing has its default. `ValueError` where
        it is not one that `to_line` wrote."""
        try:
            found = json.loads(line)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError("it is not a map of keys")
        known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        if odd := [name for name, value in known.items() if not _fits(value, getattr(cls, name))]:
            raise ValueError(f"{odd[0]} has a value that it never has")
        return cls(**known)


def _fits(value: object, default: object) -> bool:
    if isinstance(default, str):
        return isinstance(value, str)
    if default is None and value is None:
        return True
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def last_beat(path: Path) -> Beat:
    """Return the newest whole line; a rank that has not begun has none, nor has what is not a plain
    file."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return Beat.from_line(lines[-1])
    except (OSError, DataError, IndexError, ValueError):
        return Beat()


def iter_beats(path: Path) -> Iterator[Beat]:
    """Yield all whole lines; none where the file is absent. `DataError` names a damaged one."""
    if path.is_file():
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _whole_beat(path, number, line)


def _whole_beat(path: Path, number: int, line: bytes) -> Beat:
    try:
        return Beat.from_line(line)
    except ValueError as error:
        raise DataError(
            f"{path}:{number} is not a heartbeat: {str(error)[:MAX_SAID]}\n"
            "hint: delete that line; it says only when the run started"
        ) from error
