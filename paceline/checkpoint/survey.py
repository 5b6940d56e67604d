"""Lists the checkpoints of a run and says which can be trusted, for `paceline checkpoints`.

    survey(folder)        a glance at each: manifest and sizes; nothing else is read
    verify_all(folder)    every byte of each

Only the `checkpoint` section of run.yaml is looked at, so no workload is imported.
"""

from collections.abc import Callable
from typing import Any

from paceline.checkpoint.folder import BEST, LATEST, CheckpointFolder
from paceline.config.plain import check_plain, read_plain
from paceline.config.schema import CheckpointConfig
from paceline.errors import ConfigError, DataError, RestoreError
from paceline.records import BestMetric, Kept, Manifest
from paceline.records.base import Part
from paceline.records.rundir import RunDir

LARGE_BYTES = 1 << 28  # a file that takes longer to read than a person waits without a word


class Listed(Part):
    """One checkpoint at a glance; what cannot be known of a damaged one is None."""

    step: int
    path: str
    looks: str
    is_latest: bool
    is_best: bool
    num_bytes: int | None = None
    state: str | None = None
    saved_at: float | None = None
    reason: str | None = None
    strategy: str | None = None
    world_size: int | None = None
    precision: str | None = None
    best: BestMetric | None = None


class Verified(Part):
    """One checkpoint, read to its last byte."""

    step: int
    is_sound: bool
    num_files: int
    num_bytes: int
    problems: list[str]


def open_checkpoints(run: RunDir) -> CheckpointFolder:
    """Return the folder where run.yaml says that this run's checkpoints are."""
    return checkpoints_of(run, read_plain(run.config))


def checkpoints_of(run: RunDir, tree: dict[str, Any]) -> CheckpointFolder:
    section = tree.get("checkpoint", {})
    if not isinstance(section, dict):
        raise ConfigError(f"checkpoint in {run.config} must be a map of keys")
    config = check_plain(section, CheckpointConfig, f"the section checkpoint of {run.config}")
    return CheckpointFolder.of_run(run, config)


def list_steps(folder: CheckpointFolder) -> list[int]:
    """Return the steps, the newest first; raise RestoreError where the folder itself cannot be
    read."""
    try:
        return folder.steps()
    except OSError as error:
        raise RestoreError(f"{folder.root} cannot be read: {error.strerror}") from error


def survey(folder: CheckpointFolder) -> list[Listed]:
    return [_glance(folder, step) for step in list_steps(folder)]


def remarks(folder: CheckpointFolder, steps: list[int]) -> list[str]:
    """Return what a person should know of the folder beside its checkpoints."""
    found = []
    for name in (LATEST, BEST):
        if (step := folder.pointer(name)) is not None and step not in steps:
            found.append(f"{name} names step_{step}, which is not here")
    if steps and folder.pointer(LATEST) is None:
        found.append(f"{LATEST} names no checkpoint")
    found += [
        f"{name} is not a checkpoint: a save that is being written, or was killed; the next attempt"
        " of the run removes it"
        for name in folder.leftovers()
    ]
    return found


def _glance(folder: CheckpointFolder, step: int) -> Listed:
    listed = Listed(
        step=step,
        path=str(folder.path(step)),
        looks="complete",
        is_latest=folder.pointer(LATEST) == step,
        is_best=folder.pointer(BEST) == step,
    )
    try:
        manifest = folder.manifest(step)
        listed = listed.model_copy(update=_of_manifest(manifest))
        if misfits := folder.misfits(step, manifest, manifest.files):
            raise RestoreError(misfits)
        return listed.model_copy(update=_of_state(_read_state(folder, step)))
    except (RestoreError, DataError) as error:
        return listed.model_copy(update={"looks": f"incomplete: {_first_line(error)}"})


def _of_manifest(manifest: Manifest) -> dict[str, Any]:
    is_full = not any(name.startswith("model-rank") for name in manifest.files)
    return {"num_bytes": manifest.num_bytes, "state": "full" if is_full else "sharded"}


def _of_state(kept: Kept) -> dict[str, Any]:
    same = ("saved_at", "reason", "strategy", "world_size", "precision", "best")
    return {name: getattr(kept, name) for name in same}


def verify_all(folder: CheckpointFolder, say: Callable[[str], None]) -> list[Verified]:
    """Read every checkpoint to its last byte, the newest first; raise RestoreError where there is
    none."""
    steps = list_steps(folder)
    if not steps:
        raise RestoreError(no_checkpoints(folder))
    return [_verify(folder, step, say) for step in steps]


def no_checkpoints(folder: CheckpointFolder) -> str:
    return (
        f"there is no checkpoint in {folder.root}\n"
        "hint: checkpoint.every=N writes one every N steps; checkpoint.at_end one at the end"
    )


def _verify(folder: CheckpointFolder, step: int, say: Callable[[str], None]) -> Verified:
    try:
        manifest = require_sound(folder, step, say)
    except (RestoreError, DataError) as error:
        problems = [text.partition("\n")[0] for text in error.problems]
        return Verified(step=step, is_sound=False, num_files=0, num_bytes=0, problems=problems)
    return Verified(
        step=step,
        is_sound=True,
        num_files=len(manifest.files),
        num_bytes=manifest.num_bytes,
        problems=[],
    )


def require_sound(folder: CheckpointFolder, step: int, say: Callable[[str], None]) -> Manifest:
    """Read every byte of one checkpoint, and say which large file is being read."""
    from paceline.records.words import size

    manifest, problems = folder.manifest(step), []
    for name, wanted in manifest.files.items():
        if wanted.num_bytes >= LARGE_BYTES:
            say(f"reading {folder.path(step).name}/{name}, {size(wanted.num_bytes)}")
        problems += folder.damages(step, manifest, [name])
    if problems:
        raise RestoreError(problems)
    _read_state(folder, step)
    return manifest


def _read_state(folder: CheckpointFolder, step: int) -> Kept:
    try:
        return folder.state(step)
    except RecursionError as error:
        raise RestoreError(
            f"{folder.path(step).name} is damaged: its state is nested too deeply"
        ) from error


def _first_line(error: RestoreError | DataError) -> str:
    """Return the first line, which names the file: pydantic says much."""
    return error.problems[0].partition("\n")[0]
