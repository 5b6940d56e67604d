"""All ranks go on from one checkpoint, also where only one of them has met the damage."""

from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.restore import choose_checkpoint
from paceline.checkpoint.tensors import TensorFiles
from paceline.machine.topology import RankId
from paceline.records.rundir import RunDir
from tests.harness import start_ranks
from tests.kept import flip_bit
from tests.saved import build_saver, save


def read_own(rank: int, source: TensorFiles) -> None:
    """Rank 0 reads the weights, rank 1 the optimizer's state: as ranks that shard, each its own."""
    if rank == 0:
        source.rows("model", "weight", 0, 4)
    else:
        source.rows("optimizer", "step/weight", 0, 1)


def choose(root: Path, run: RunDir, place: RankId) -> None:
    found = choose_checkpoint(
        CheckpointFolder(root), torch.device("cpu"), partial(read_own, place.rank)
    )
    assert found is not None and found.kept.step == 1, f"rank {place.rank} took another"
    assert bool(found.damages) == (place.rank == 1)


@pytest.mark.slow
def test_damage_that_one_rank_has_met_counts_for_all(tmp_path: Path) -> None:
    saver = build_saver(tmp_path / "checkpoints")
    save(saver, 1)
    save(saver, 2)
    folder = saver.writer.folder
    flip_bit(folder.path(2) / "optimizer-rank0.safetensors", -1)
    start_ranks(RunDir(tmp_path / "ranks"), 2, partial(choose, folder.root))
