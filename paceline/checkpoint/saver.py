"""All ranks write one checkpoint together, in the background or at once.

    every rank                       the store                      rank 0
    own_pieces (its fair share)
    files into .tmp-step_N, fsync
    sizes and sums, or an error -->  checkpoint/ATTEMPT/n/RANK -->  hears all ranks
                                                                    one manifest, rename, `latest`
    hears how it ended          <--  checkpoint/ATTEMPT/n/end  <--  "", or what went wrong
                                                                    reads it back, removes old ones

There is a checkpoint of all files or of none. No collective is involved, so all this runs in a
thread while training continues; the step waits only for `_capture`, the copy of the state.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.checkpoint.folder import STATE, CheckpointFolder, Retention
from paceline.checkpoint.pieces import SECTIONS, Piece, own_pieces
from paceline.checkpoint.tensors import SUFFIX, consolidate, rng_file, write_bytes, write_pieces
from paceline.config.schema import CheckpointConfig
from paceline.errors import SaveError
from paceline.records import FileSum, Kept, Manifest, TensorEntry
from paceline.records.disk import Losses
from paceline.records.files import sync_directory
from paceline.records.table_file import TableFile
from paceline.records.tables import CHECKPOINTS, FAILED, WRITTEN

LOG = logging.getLogger("paceline")
POLL_S, MAX_POLL_S = 0.005, 0.1
MAX_NOTES = 8


@dataclass(frozen=True)
class Writer:
    """Who writes where: one rank's part in all saves of one attempt."""

    folder: CheckpointFolder
    config: CheckpointConfig
    store: Store
    rank: int
    world_size: int
    attempt: int
    log: Path  # checkpoints.csv
    lost: Losses = field(default_factory=Losses)


@dataclass
class Save:
    """One checkpoint that is being written."""

    kept: Kept
    pieces: list[Piece]
    rng: dict[str, Tensor]
    started_at: float
    stall_s: float = 0.0
    error: str = ""
    is_written: threading.Event = field(default_factory=threading.Event)
    is_told: bool = False


class Saver:
    """One save at a time: a second one first waits for the one before it."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        writer.folder.root.mkdir(parents=True, exist_ok=True)
        self._notes: list[str] = []
        self._num_more, self._last_note = 0, ""
        self._log: TableFile | None = None
        self._retention = Retention(writer.folder, writer.config.keep)
        self._staging: dict[tuple[str, str], Tensor] = {}
        self._save: Save | None = None
        self._num_saves = 0
        self._thread: threading.Thread | None = None

    def save(
        self,
        kept: Kept,
        pieces: Sequence[Piece],
        rng: dict[str, Tensor],
        called_at: float | None = None,
    ) -> None:
        """Begin to write; return as soon as training may change the state again. `called_at` is
        when training began to wait for it."""
        called_at = time.perf_counter() if called_at is None else called_at
        self.wait()
        writer = self.writer
        own = own_pieces(pieces, writer.rank, writer.config.state == "full")
        save = Save(kept, own, rng, called_at)
        is_async = writer.config.mode == "async"
        if is_async:  # training will change the tensors while they are written
            save.pieces = self._capture(own)
        self._save = save
        self._num_saves += 1
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint")
        self._thread.daemon = True  # a rank that fails must not wait for it
        # What an asynchronous save costs training ends here; a synchronous one's is set in `_run`.
        save.stall_s = time.perf_counter() - save.started_at
        self._thread.start()
        if not is_async:
            save.is_written.wait()

    @property
    def notes(self) -> list[str]:
        """What a person should know of all saves; the first ones, and the last, if there are many:
        a disk may stay full for days."""
        more = f"{self._num_more} more such notes on checkpoints; the last: {self._last_note}"
        return [*self._notes, more] if self._num_more else list(self._notes)

    def _note(self, text: str) -> None:
        LOG.error("%s", text)
        if len(self._notes) < MAX_NOTES:
            self._notes.append(text)
        else:
            self._num_more, self._last_note = self._num_more + 1, text

    @property
    def failure(self) -> SaveError | None:
        """The error of the last save; None while it runs, or if it succeeded."""
        save = self._save
        if save is None or not save.is_written.is_set() or not save.error:
            return None
        return SaveError(
            f"the checkpoint of step {save.kept.step} could not be written: {save.error}\n"
            "hint: free space there or set checkpoint.dir; checkpoint.on_error=continue trains on"
        )

    def take_news(self) -> int | None:
        """Return the step of a checkpoint that has been completed since the last call."""
        save = self._save
        if save is None or save.is_told or not save.is_written.is_set():
            return None
        save.is_told = True
        return save.kept.step if not save.error else None

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait until nothing is being written; nothing will be."""
        self.wait()
        if self._log is not None:
            self._log.close()

    def hurry(self) -> None:
        """Finish what is being written and leave old checkpoints as they are: the run is to
        stop."""
        self._retention.hurry.set()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Get the memory for copies from a GPU while training continues: to pin it takes most of a
        second per gigabyte, for which the first save would have to wait."""
        own = own_pieces(pieces, self.writer.rank, self.writer.config.state == "full")
        self._thread = threading.Thread(
            target=lambda: [self._staged(piece) for piece in own], name="reserve", daemon=True
        )
        self._thread.start()

    def _capture(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces, so that training may change them; the memory serves every save of this
        attempt."""
        captured = []
        for piece in pieces:
            held = self._staged(piece)
            held.copy_(piece.value.detach(), non_blocking=True)
            captured.append(piece._replace(value=held))
        if any(piece.value.device.type == "cuda" for piece in pieces):
            torch.cuda.current_stream().synchronize()
        return captured

    def _staged(self, piece: Piece) -> Tensor:
        key, value = (piece.section, piece.name), piece.value
        held = self._staging.get(key)
        if held is None or held.shape != value.shape or held.dtype != value.dtype:
            on_gpu = value.device.type == "cuda"
            held = torch.empty(value.shape, dtype=value.dtype, pin_memory=on_gpu)
            self._staging[key] = held
        return held

    def _run(self, save: Save) -> None:
        try:
            save.error = self._write_together(save)
        except BaseException as error:  # a thread's exception would be lost
            save.error = f"{type(error).__name__}: {error}"
        duration_s = time.perf_counter() - save.started_at
        if self.writer.config.mode == "sync":
            save.stall_s = duration_s
        save.is_written.set()
        save.pieces = []  # a synchronous save held the model's own tensors
        if save.error:
            self._note(f"checkpoint of step {save.kept.step} not written: {save.error}")
        if self.writer.rank == 0:
            self._settle(save, duration_s)

    def _settle(self, save: Save, duration_s: float) -> None:
        """Record this save and remove old ones. The checkpoint stays valid whatever goes wrong
        here."""
        try:
            self._record(save, duration_s)
            if not save.error:
                for damage in self._retention.prune(save.kept.step):
                    self._note(damage)
        except Exception as error:
            self._note(f"after the checkpoint of step {save.kept.step}: {_why(error)}")

    def _write_together(self, save: Save) -> str:
        """Write this rank's part and learn how all did; return "", or what went wrong on any
        rank."""
        writer, step = self.writer, save.kept.step
        # By number and not by step, which may be saved twice: an old answer must not be heard. All
        # ranks count alike, for they save at the same steps.
        key = self._key(self._num_saves)
        temporary = writer.folder.temporary(step, writer.attempt)
        try:
            part = self._write_own(save, temporary)
        except Exception as error:  # whatever it is, the others wait for a word
            part = {"error": f"rank {writer.rank}: {_why(error)}"}
        writer.store.set(f"{key}/{writer.rank}", json.dumps(part))
        if writer.rank != 0:
            return str(self._hear(f"{key}/end"))
        outcome = self._publish(save, temporary, key)
        writer.store.set(f"{key}/end", json.dumps(outcome))
        return outcome

    def _key(self, number: int) -> str:
        return f"checkpoint/{self.writer.attempt}/{number}"

    def _write_own(self, save: Save, temporary: Path) -> dict[str, Any]:
        """Write this rank's files; return what the manifest will say of them."""
        writer = self.writer
        # Its parent was there when this attempt began; made anew it might lie under a lost mount.
        temporary.mkdir(exist_ok=True)
        files: dict[str, FileSum] = {}
        tensors: dict[str, dict[str, TensorEntry]] = {}
        for section in SECTIONS:
            own = [piece for piece in save.pieces if piece.section == section]
            name = f"{section}-rank{writer.rank}{SUFFIX}"
            tensors[section] = {}
            if own:
                files[name], tensors[section] = write_pieces(temporary / name, own)
        name = rng_file(writer.rank)
        files[name] = write_pieces(temporary / name, _rng_pieces(save.rng)).sum
        if writer.rank == 0:
            files[STATE] = write_bytes(temporary / STATE, save.kept.to_json().encode())
        sync_directory(temporary)
        return Manifest(step=save.kept.step, files=files, **tensors).model_dump(mode="json")

    def _publish(self, save: Save, temporary: Path, key: str) -> str:
        """On rank 0: hear every rank, then make one checkpoint of all parts, or clear them away."""
        folder = self.writer.folder
        parts = self._hear_all(key)
        errors = [part["error"] for part in parts if "error" in part]
        try:
            if not errors:
                manifest = merge([Manifest.model_validate(part) for part in parts])
                if self.writer.config.state == "full":
                    manifest = consolidate(temporary, manifest)
                folder.publish(temporary, manifest)
                if save.kept.best is not None and save.kept.best.step == save.kept.step:
                    folder.mark_best(save.kept.step)
        except Exception as error:
            errors.append(f"rank 0: {_why(error)}")
        if errors:
            shutil.rmtree(temporary, ignore_errors=True)
        return "; ".join(errors)

    def _hear_all(self, key: str) -> list[Any]:
        """Return what each rank says, and delete it: the store outlives many saves. The answer to
        the save before may go too, for a rank that speaks of this save has heard it."""
        store = self.writer.store
        keys = [f"{key}/{rank}" for rank in range(self.writer.world_size)]
        parts = [self._hear(name) for name in keys]
        for name in [*keys, f"{self._key(self._num_saves - 1)}/end"]:
            store.delete_key(name)
        return parts

    def _hear(self, key: str) -> Any:
        """Return another rank's message. It polls: a store that waits for a key answers no other
        call."""
        pause_s = POLL_S
        while not self.writer.store.check([key]):
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, MAX_POLL_S)
        return json.loads(self.writer.store.get(key))

    def _record(self, save: Save, duration_s: float) -> None:
        writer, kept = self.writer, save.kept
        num_bytes = 0
        if not save.error:
            num_bytes = writer.folder.manifest(kept.step).num_bytes
        if self._log is None:
            self._log = TableFile(writer.log, CHECKPOINTS, lost=writer.lost)
        self._log.add(
            {
                "step": kept.step,
                "reason": kept.reason,
                "mode": writer.config.mode,
                "state": writer.config.state,
                "num_bytes": num_bytes,
                "stall_s": f"{save.stall_s:.4f}",
                "duration_s": f"{duration_s:.4f}",
                "outcome": FAILED if save.error else WRITTEN,
                "error": save.error,
            }
        )
        self._log.flush()


def merge(parts: Sequence[Manifest]) -> Manifest:
    """Merge what every rank has written into one manifest."""
    files: dict[str, FileSum] = {}
    tensors: dict[str, dict[str, TensorEntry]] = {section: {} for section in SECTIONS}
    for part in parts:
        files |= part.files
        for section, found in (("model", part.model), ("optimizer", part.optimizer)):
            for name, entry in found.items():
                before = tensors[section].get(name)
                rows = [*before.parts, *entry.parts] if before else entry.parts
                tensors[section][name] = entry.model_copy(update={"parts": rows})
    return Manifest(step=parts[0].step, files=files, **tensors)


def _rng_pieces(states: dict[str, Tensor]) -> list[Piece]:
    return [
        Piece("model", name, tuple(value.shape), 0, value, ()) for name, value in states.items()
    ]


def _why(error: BaseException) -> str:
    if isinstance(error, OSError):
        place = f" ({Path(error.filename).name})" if isinstance(error.filename, str) else ""
        return f"{error.strerror or error}{place}"
    return f"{type(error).__name__}: {error}"
