"""All ranks agree on one checkpoint: the newest whose every byte is as it was written."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.folder import STATE, CheckpointFolder
from paceline.checkpoint.tensors import TensorFiles, rng_file
from paceline.errors import DataError, RestoreError
from paceline.records import Kept, Manifest
from paceline.records.tables import read_checkpoints

LOG = logging.getLogger("paceline")
MAX_STEPS, MAX_NAMED = 64, 8


@dataclass
class Found:
    """A checkpoint that can be trusted; `damages` says what was wrong with newer ones."""

    kept: Kept
    source: TensorFiles
    manifest: Manifest
    damages: list[str] = field(default_factory=list)

    def rng(self, rank: int) -> dict[str, Tensor]:
        """Return the random generators of a rank that took part in writing it."""
        path = self.source.folder / rng_file(rank)
        try:
            if path.name not in self.manifest.files:
                raise OSError("there is no checksum for it")
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise RestoreError(f"{path.parent.name}/{path.name} cannot be read: {error}") from error


def choose_checkpoint(
    folder: CheckpointFolder, device: torch.device, load: Callable[[TensorFiles], None]
) -> Found | None:
    """Load the newest that is sound: None where there never was one, RestoreError where none is.

    A collective. What `load` reads is summed on the way, so that no byte is read twice; where any
    rank finds damage, all continue with the one before, which overwrites whatever was loaded.
    """
    damages: list[str] = []
    steps = _agreed_steps(folder, device)
    for step in steps:
        found, problems = _examine(folder, step)
        if _all_agree(found is not None, device):
            assert found is not None, "this rank is one of all"
            load(found.source)
            problems = found.source.damages[:MAX_NAMED]
            if _all_agree(not problems, device):
                found.damages = damages
                return found
        damages += problems
        for problem in problems:
            LOG.warning("%s", problem)
    if steps:
        raise RestoreError(
            f"no checkpoint in {folder.root} can be trusted"
            + "".join(f"\n  {text}" for text in damages)
            + "\nhint: paceline checkpoints verify RUN_DIR says what is wrong with each of them"
        )
    return None


def _examine(folder: CheckpointFolder, step: int) -> tuple[Found | None, list[str]]:
    """Examine all but the tensors: the manifest, the sizes of this rank's share of the files, and
    what is small and read by this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        manifest = folder.manifest(step)
        share = sorted(manifest.files)[rank::world]
        small = [name for name in (STATE, rng_file(rank)) if name in manifest.files]
        misfits = folder.misfits(step, manifest, share)
        if damages := [*misfits, *folder.damages(step, manifest, small)]:
            return None, damages
        return Found(folder.state(step), TensorFiles(folder.path(step), manifest), manifest), []
    except (RestoreError, DataError) as error:
        return None, error.problems
    except (OSError, RecursionError) as error:
        return None, [f"{folder.path(step).name} cannot be read: {error}"]


def _agreed_steps(folder: CheckpointFolder, device: torch.device) -> list[int]:
    """Return the steps as rank 0 sees them: a shared file system may show others an older
    picture."""
    steps = folder.steps()[:MAX_STEPS] if dist.get_rank() == 0 else []
    told = torch.full((MAX_STEPS,), -1, dtype=torch.int64)
    told[: len(steps)] = torch.tensor(steps, dtype=torch.int64)
    told = told.to(device)
    dist.broadcast(told, src=0)
    return [step for step in told.tolist() if step >= 0]


def _all_agree(is_good: bool, device: torch.device) -> bool:
    """Say whether it is good on every rank. A collective."""
    verdict = torch.tensor(int(is_good), device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def require_never_saved(log: Path, folder: CheckpointFolder) -> None:
    """Refuse to start from the beginning if checkpoints were written and are gone."""
    written = [row.step for row in read_checkpoints(log) if row.is_written]
    if written:
        raise RestoreError(
            f"checkpoints up to step {written[-1]} were written, and {folder.root} holds none\n"
            "hint: bring that folder back, or start a new run"
        )
