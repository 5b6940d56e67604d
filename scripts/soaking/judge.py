"""Was anything lost? The faulted run against the clean one, and what it has left on disk."""

import csv
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.survey import require_sound
from paceline.errors import RestoreError
from paceline.records.rundir import RunLock
from paceline.records.tables import read_training
from soaking.program import Program

COLUMNS = ("step", "loss", "grad_norm", "val_loss")


def problems(clean: Program, faulted: Program, steps: int) -> Iterator[str]:
    """What is not as it should be; nothing: every promise was kept."""
    yield from _same_rows(clean.run.training, faulted.run.training, steps)
    for rank in range(clean.ranks):
        taken = [_text(program.run.samples(rank)) for program in (clean, faulted)]
        if taken[0] != taken[1]:
            yield f"rank {rank} took other samples: {faulted.run.samples(rank)}"
        if rank == 0 and not taken[0]:
            yield "the clean run has not kept which samples it took"
    if left := faulted.processes():
        yield f"orphans: {', '.join(map(str, left))}"
    yield from _left_over(faulted)
    yield from _unsound(faulted)


def _same_rows(clean: Path, faulted: Path, steps: int) -> Iterator[str]:
    """As text: what was written of two equal numbers is equal."""
    ours, theirs = (_rows(path) for path in (clean, faulted))
    if len(ours) != steps or len(theirs) != steps:
        yield f"{len(ours)} rows in the clean run, {len(theirs)} in the faulted one, not {steps}"
    apart = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    if apart:
        a, b = apart[0]
        yield f"{len(apart)} rows differ, first {dict(zip(COLUMNS, a, strict=True))} and then {b}"


def _text(path: Path) -> str:
    """Return what a file says; nothing where it is not: a later stage of a pipeline takes none."""
    return path.read_text() if path.exists() else ""


def _rows(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [tuple(row[name] for name in COLUMNS) for row in csv.DictReader(file)]


def _left_over(program: Program) -> Iterator[str]:
    """Temporary folders of saves, and temporary files of anything that is written atomically."""
    for path in program.run.root.rglob("*"):
        is_temporary = path.name.startswith(".") or path.name.endswith(".tmp")
        if is_temporary and path.name != RunLock.NAME:
            yield f"left behind: {path.relative_to(program.run.root)}"


def _unsound(program: Program) -> Iterator[str]:
    kept = program.checkpoints.steps()
    if len(kept) < 2:
        yield f"only {len(kept)} checkpoints are kept"
    for step in kept:
        try:
            require_sound(program.checkpoints, step, lambda text: None)
        except RestoreError as error:
            yield f"a kept checkpoint is not sound: {error}"


def ettr(program: Program, through_step: int, wall_s: float) -> float:
    """Productive time over wall time; productive is the time of steps that stand, each once."""
    rows = read_training(program.run.training)
    return sum(row.step_s for row in rows if row.step <= through_step) / wall_s
