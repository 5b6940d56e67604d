"""Checkpoints of a few small tensors, saved by all ranks in one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import Piece
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.survey import require_sound as require_sound_aloud
from paceline.checkpoint.tensors import TensorFiles
from paceline.config.schema import CheckpointConfig
from paceline.errors import RestoreError
from paceline.records import BestMetric, Manifest
from tests.harness import make_kept

# Each example puts back what it changed.
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def build_saver(root: Path) -> Saver:
    return build_savers(root, 1, "sync")[0]


def build_savers(root: Path, num_ranks: int, mode: str) -> list[Saver]:
    """All ranks in this process, with one store."""
    folder, store = CheckpointFolder(root), dist.HashStore()
    config = CheckpointConfig.model_validate({"mode": mode})
    log = root.parent / "checkpoints.csv"
    writers = [Writer(folder, config, store, rank, num_ranks, 1, log) for rank in range(num_ranks)]
    return [Saver(writer) for writer in writers]


def some_pieces(step: int) -> list[Piece]:
    weight = torch.arange(12.0).reshape(4, 3) + step
    count = torch.tensor(float(step))
    return [
        Piece("model", "weight", (4, 3), 0, weight, (0,)),
        Piece("model", "small", (2,), 0, torch.ones(2, dtype=torch.bfloat16), (0,)),
        Piece("optimizer", "step/weight", (), 0, count, (0,)),
    ]


def save(saver: Saver, step: int, best: BestMetric | None = None) -> None:
    saver.save(make_kept(step, best), some_pieces(step), {"torch_cpu": torch.get_rng_state()})
    saver.wait()


def require_sound(folder: CheckpointFolder, step: int) -> Manifest:
    return require_sound_aloud(folder, step, lambda text: None)


def read(folder: CheckpointFolder, step: int) -> torch.Tensor:
    files = TensorFiles(folder.path(step), require_sound(folder, step))
    return weight_of(files)


def weight_of(files: TensorFiles) -> torch.Tensor:
    rows = files.rows("model", "weight", 0, 4)
    if files.damages:
        raise RestoreError(files.damages)
    return rows
