"""Legs of a chain: each loads the checkpoint of the one before, writes its own, and then takes a
step: one that had put a number in the wrong place, and found it there again, would step elsewhere.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import SECTIONS
from paceline.checkpoint.restore import choose_checkpoint
from paceline.checkpoint.saver import Saver, Writer
from paceline.checkpoint.tensors import TensorFiles
from paceline.config.schema import CheckpointConfig
from paceline.data.rng import capture_rng
from paceline.machine.topology import RankId
from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.strategies.base import Engine
from paceline.strategies.clock import HostClock
from tests.harness import build_engine, make_kept, prepare_run, start_ranks
from tests.saved import require_sound

SAMPLES, STEPS = 8, 3
CPU = torch.device("cpu")
COMMON = ["optim.name=adamw", "launch.device=cpu", "data.num_workers=0"]


class Leg(NamedTuple):
    strategy: str
    num_ranks: int
    more: tuple[str, ...] = ()
    state: str = "sharded"

    @property
    def settings(self) -> list[str]:
        batch = [f"train.micro_batch_size={SAMPLES // self.num_ranks}", "train.grad_accum=1"]
        ranks = [f"launch.nproc={self.num_ranks}", f"strategy.name={self.strategy}"]
        return [*COMMON, *batch, *ranks, *self.more]


def run_chain(root: Path, job: str, groups: list[list[Leg]], start: Path) -> dict[Leg, Path]:
    folders: dict[Leg, Path] = {}
    for number, legs in enumerate(groups):
        made = run_legs(root / str(number), job, legs, start)
        folders |= dict(zip(legs, made, strict=True))
        start = made[-1]
    return folders


def run_legs(root: Path, job: str, legs: list[Leg], start: Path | None = None) -> list[Path]:
    """Each leg from the checkpoint of the one before; without a `start` the first one trains."""
    folders = [root / f"{number}-{leg.strategy}" for number, leg in enumerate(legs)]
    for folder, leg in zip(folders, legs, strict=True):
        prepare_run(folder, job, leg.settings)
    work = partial(_take_legs, job, legs, [start, *folders])
    start_ranks(RunDir(root), legs[0].num_ranks, work)
    return folders


def _take_legs(
    job: str, legs: list[Leg], folders: list[Path | None], group: RunDir, place: RankId
) -> None:
    for leg, before, folder in zip(legs, folders, folders[1:], strict=False):
        assert folder is not None
        dp = Plan.load(RunDir(folder).plan).batch.dp
        engine, batches = build_engine(RunDir(folder), job, leg.settings)
        if before is None:
            for _ in range(STEPS):
                _step(engine, batches, dp)
        else:
            kept = CheckpointFolder(before / "checkpoints")
            found = choose_checkpoint(kept, CPU, engine.load)
            assert found is not None and not found.damages
        saver = Saver(_writer(folder, place, leg.state))
        saver.save(make_kept(STEPS), engine.pieces(), capture_rng(CPU))
        saver.wait()
        if saver.failure is not None:
            raise saver.failure
        _step(engine, batches, dp)
        weights = engine.weights()
        if place.rank == 0:
            torch.save(weights, folder / "next.pt")


def _writer(folder: Path, place: RankId, state: str) -> Writer:
    return Writer(
        CheckpointFolder(folder / "checkpoints"),
        CheckpointConfig.model_validate({"mode": "sync", "state": state}),
        dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store()),
        place.rank,
        place.world_size,
        1,
        folder / "checkpoints.csv",
    )


def _step(engine: Engine, batches: list[object], dp: int) -> None:
    engine.forward_backward(batches, dp / SAMPLES, HostClock())
    assert not engine.step(0.01, HostClock()).skipped


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by section and name."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    files = TensorFiles(checkpoints.path(STEPS), require_sound(checkpoints, STEPS))
    return {
        f"{section}:{name}": files.rows(section, name, 0, (*shape, 1)[0])
        for section in SECTIONS
        for name, shape in files.shapes(section).items()
    }


def assert_same_bits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape), name
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, found[name]))
        assert torch.equal(a, b), name


def assert_goes_on_alike(expected: Path, found: Path) -> None:
    """The step after the checkpoint ends at the same weights."""
    first, second = (torch.load(folder / "next.pt") for folder in (expected, found))
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def assert_same_state(expected: Path, found: Path) -> None:
    assert_same_bits(read_all(expected), read_all(found))
    assert_goes_on_alike(expected, found)
