"""The checkpoint folders of a run: how one is created, which can be trusted, which may be deleted.

    .tmp-step_30-2   ranks write and fsync here      step_30    after one rename, with its manifest
    latest, best     name a step, moved after that   prune      only then, and never the last good

What is named `step_<n>` was complete when it got that name; `verify` says whether it still is.
"""

import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from paceline.checkpoint.tensors import TYPES, sum_file, sum_head
from paceline.config.schema import CheckpointConfig
from paceline.errors import ClusterError, ConfigError, DataError, RestoreError
from paceline.records import Kept, Manifest, TensorEntry
from paceline.records.files import read_regular, sync_directory, write_atomic
from paceline.records.rundir import RunDir

STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")  # as `step_name` writes it; fits 64 bits
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MANIFEST, STATE = "manifest.json", "state.json"
LATEST, BEST = "latest", "best"
MAX_POINTER_BYTES = 64  # step_N and a newline are fewer
MAX_DIM = 1 << 62  # torch counts elements in 64 bits
TEMPORARY, REPLACED, DAMAGED = ".tmp-", ".old-", "damaged-"
POINTERS = (f".{LATEST}.", f".{BEST}.")  # how `write_atomic` names what it has not renamed yet


def step_name(step: int) -> str:
    return f"step_{step}"


def seal(manifest: Manifest) -> Manifest:
    """Add the sum over the manifest's own content, so that an edit shows."""
    return manifest.model_copy(update={"seal": _sum(manifest)})


def _sum(manifest: Manifest) -> str:
    body = manifest.model_dump(mode="json", exclude={"seal"})
    return xxhash.xxh3_64(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _named_by_tensors(manifest: Manifest) -> set[str]:
    tensors = (*manifest.model.values(), *manifest.optimizer.values())
    return {part.file for entry in tensors for part in entry.parts}


def _impossible_tensors(manifest: Manifest) -> list[str]:
    tensors = (*manifest.model.items(), *manifest.optimizer.items())
    return [name for name, entry in tensors if not _is_possible(entry, manifest)]


def _is_possible(entry: TensorEntry, manifest: Manifest) -> bool:
    """Tell whether a tensor can be what the manifest says: nothing of it is read, and no memory is
    taken for it, before that is known."""
    if entry.dtype not in TYPES or not all(0 <= size < MAX_DIM for size in entry.shape):
        return False
    num_rows = entry.shape[0] if entry.shape else 1
    row_bytes = math.prod(entry.shape[1:]) * TYPES[entry.dtype].itemsize
    # Parts may be fewer than the rows, which is said where they are read, but never more than fit.
    return num_rows * row_bytes <= manifest.num_bytes and all(
        0 <= part.row <= num_rows and 0 <= part.num_rows <= num_rows and 0 <= part.offset < MAX_DIM
        for part in entry.parts
    )


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run."""

    root: Path

    @classmethod
    def of_run(cls, run: RunDir, config: CheckpointConfig) -> "CheckpointFolder":
        """Return the folder in the run directory, or under `checkpoint.dir` by the run's own
        name."""
        if config.dir == "run":
            return cls(run.root / "checkpoints")
        try:
            return cls(Path(config.dir).expanduser().absolute() / run.root.name)
        except RuntimeError as error:  # ~somebody whom this machine does not know
            raise ConfigError(f"checkpoint.dir={config.dir}: {error}") from error

    def path(self, step: int) -> Path:
        return self.root / step_name(step)

    def steps(self) -> list[int]:
        """Return the step of every checkpoint there is, the newest first, damaged ones too."""
        try:
            entries = list(os.scandir(self.root))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RestoreError(f"{self.root} cannot be read: {error.strerror}") from error
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        found = [STEP.fullmatch(name) for name in names]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def pointer(self, name: str) -> int | None:
        """Return the step that `latest` or `best` names."""
        try:
            text = read_regular(self.root / name, MAX_POINTER_BYTES).decode(errors="replace")
            match = STEP.fullmatch(text.strip())
            return int(match[1]) if match else None
        except (OSError, ValueError, DataError):  # absent, too many digits, or not a plain file
            return None

    def manifest(self, step: int) -> Manifest:
        """Return what a checkpoint should be; raise RestoreError where even that cannot be
        believed."""
        folder = self.path(step)
        try:
            manifest = Manifest.load(folder / MANIFEST)
        except DataError as error:
            raise RestoreError(f"{folder.name} is incomplete: {error}") from error
        if manifest.seal != _sum(manifest) or manifest.step != step:
            raise RestoreError(f"{folder.name} is damaged: its {MANIFEST} was changed")
        if odd := [name for name in manifest.files if not PLAIN_NAME.fullmatch(name)]:
            raise RestoreError(
                f"{folder.name} is damaged: {odd[0]!r} is not a name of a file of ours"
            )
        # Only what stands among the files is summed: nothing else may ever be opened.
        if unsummed := {STATE, *_named_by_tensors(manifest)} - manifest.files.keys():
            raise RestoreError(
                f"{folder.name} is damaged: there is no checksum for {min(unsummed)!r}"
            )
        if impossible := _impossible_tensors(manifest):
            raise RestoreError(
                f"{folder.name} is damaged: {impossible[0]!r} has a shape or type that no tensor"
                " has"
            )
        return manifest

    def state(self, step: int) -> Kept:
        return Kept.load(self.path(step) / STATE)

    def damages(self, step: int, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Return what is wrong with these files; each is read to its end."""
        return [text for name in names if (text := self._damage(step, name, manifest))]

    def misfits(self, step: int, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Return what is visibly wrong: files that are missing, or have another size or head."""
        return [text for name in names if (text := self._misfit(step, name, manifest))]

    def _misfit(self, step: int, name: str, manifest: Manifest) -> str:
        path, wanted = self.path(step) / name, manifest.files[name]
        try:
            if path.is_symlink() or not path.is_file():
                return f"{path.parent.name}/{name} is missing"
            size = path.stat().st_size
            if size != wanted.num_bytes:  # before the head: that is as long as a manifest says
                return f"{path.parent.name}/{name} has {size} bytes, and had {wanted.num_bytes}"
            head = sum_head(path, wanted.head_bytes) if wanted.head_bytes else wanted.head_xxh3
        except OSError as error:
            return f"{path.parent.name}/{name} cannot be read: {error.strerror}"
        if head != wanted.head_xxh3:
            return f"{path.parent.name}/{name} has changed: its header is damaged"
        return ""

    def _damage(self, step: int, name: str, manifest: Manifest) -> str:
        if misfit := self._misfit(step, name, manifest):
            return misfit
        path, wanted = self.path(step) / name, manifest.files[name].xxh3
        try:
            found = sum_file(path).xxh3
        except OSError as error:
            return f"{path.parent.name}/{name} cannot be read: {error.strerror}"
        if found != wanted:
            return f"{path.parent.name}/{name} has changed: checksum {found}, was {wanted}"
        return ""

    # How one comes to be

    def temporary(self, step: int, attempt: int) -> Path:
        return self.root / f"{TEMPORARY}{step_name(step)}-{attempt}"

    def publish(self, temporary: Path, manifest: Manifest) -> None:
        """Turn a folder that every rank has written into a checkpoint that is there for good."""
        seal(manifest).save(temporary / MANIFEST)
        final = self.path(manifest.step)
        replaced = self.root / f"{REPLACED}{final.name}"
        if final.exists():  # a damaged one, or one of steps that were taken again
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(final, replaced)
        os.rename(temporary, final)
        sync_directory(self.root)
        write_atomic(self.root / LATEST, f"{final.name}\n")
        shutil.rmtree(replaced, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Rename a checkpoint that is not used, so that later ones are not taken for its
        successors."""
        for number in range(1000):
            aside = self.root / (f"{DAMAGED}{step_name(step)}" + (f"-{number}" if number else ""))
            if not aside.exists():
                with suppress(OSError):
                    os.rename(self.path(step), aside)
                return

    def mark_best(self, step: int) -> None:
        write_atomic(self.root / BEST, f"{step_name(step)}\n")

    def leftovers(self) -> list[str]:
        """Return the remains of saves that were killed, and what a live one is writing."""
        with suppress(FileNotFoundError):
            names = (entry.name for entry in os.scandir(self.root))
            return sorted(name for name in names if name.startswith((TEMPORARY, REPLACED)))
        return []

    def sweep(self) -> list[str]:
        """Remove the remains of a save that was killed, as far as the disk allows; no rank may be
        writing."""
        swept = []
        with suppress(OSError):
            for entry in list(os.scandir(self.root)):
                if entry.name.startswith((TEMPORARY, REPLACED)):
                    self._put_back(entry)
                    shutil.rmtree(entry.path, ignore_errors=True)
                    swept.append(entry.name)
                elif entry.name.startswith(POINTERS) and entry.is_file(follow_symlinks=False):
                    Path(entry.path).unlink(missing_ok=True)
                    swept.append(entry.name)
        return swept

    def _put_back(self, entry: "os.DirEntry[str]") -> None:
        """Give a replaced checkpoint its name back, when the kill came before its successor had
        it."""
        final = self.root / entry.name.removeprefix(REPLACED)
        if entry.name.startswith(REPLACED) and not final.exists():
            os.rename(entry.path, final)

    def require_unused(self) -> None:
        """Refuse a folder with checkpoints: a new run has none, so they are another's."""
        if steps := self.steps():
            raise ConfigError(
                f"{self.root} holds checkpoints up to step {steps[0]}, and this run is new\n"
                "hint: set another checkpoint.dir or --out; to continue that run: --resume"
            )

    def require_writable(self) -> None:
        """Test that the folder can be written to, before any rank starts."""
        try:
            if self.root.is_symlink():
                raise ClusterError(
                    f"{self.root} is a link to {self.root.resolve()}; checkpoints are not written"
                    " through links\nhint: set checkpoint.dir to the place itself"
                )
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f"{TEMPORARY}write-test"
            probe.mkdir(exist_ok=True)
            write_atomic(probe / "test", "test")
            shutil.rmtree(probe)
            sync_directory(self.root.parent)  # the folder itself must survive a power cut too
        except OSError as error:
            raise ClusterError(
                f"checkpoints cannot be written to {self.root}: {error.strerror}\n"
                "hint: make it writable, or set checkpoint.dir to a place that is"
            ) from error


class Retention:
    """Which old checkpoints may go: never one of the `keep` newest that were read back and found
    sound, never the best one. Reading takes time; once `hurry` is set there is none left."""

    def __init__(self, folder: CheckpointFolder, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.hurry = threading.Event()
        self._sound: set[int] = set()

    def prune(self, newest: int) -> list[str]:
        """Remove old checkpoints after `newest` was written; return what was found damaged on the
        way."""
        damages: list[str] = []
        kept = 0
        self._sound.discard(newest)  # it may have taken another's place
        for step in (s for s in self.folder.steps() if s <= newest):
            if self.hurry.is_set():
                break
            if kept >= self.keep and step != self.folder.pointer(BEST):
                shutil.rmtree(self.folder.path(step), ignore_errors=True)
                self._sound.discard(step)
                continue
            problems = [] if step in self._sound else self._examine(step)
            damages += problems
            kept += not problems
        return damages

    def _examine(self, step: int) -> list[str]:
        """Return what is wrong with a checkpoint, every byte of it read."""
        try:
            manifest = self.folder.manifest(step)
        except RestoreError as error:
            return error.problems
        for name in manifest.files:
            if self.hurry.is_set():
                return []  # not known; nothing will be removed for it
            if problems := self.folder.damages(step, manifest, [name]):
                return problems
        self._sound.add(step)
        return []
