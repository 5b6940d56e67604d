"""What any strategy wrote on any number of ranks, any other reads: every number, bit for bit.

Each leg of a chain loads the checkpoint of the one before, writes its own, and then takes a step:
one that had put a number in the wrong place, and found it there again, would step elsewhere.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import SECTIONS, moment_name
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
from paceline.strategies.stored import SCALER
from tests.conftest import needs_deepspeed
from tests.harness import build_engine, make_kept, prepare_run, start_ranks

# Sizes that nothing divides, a tied weight, buffers, a frozen weight, and weights with fewer rows
# than there are ranks.
JOB = """
import torch
from torch import nn
from paceline import Workload

class Data:
    fingerprint = "odd"
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": (torch.arange(5) * (index + 3)) % 13}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
    def forward(self, x): return x + torch.tanh(self.inner(self.norm(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.wide = nn.Linear(7, 301)
        self.back = nn.Linear(301, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor([0.7]))
        self.three = nn.Parameter(torch.tensor([[0.1], [-0.2], [0.3]]))
        self.still = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.head = nn.Linear(7, 13)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
    def forward(self, x):
        if self.training: self.seen.add_(1)
        h = self.embed(x)
        for block in self.blocks: h = block(h)
        h = h + self.back(torch.tanh(self.wide(h))) * self.gain + (self.three * self.still.T).mean()
        return self.head(h)

class Odd(Workload):
    def build_model(self, config): return Net()
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch):
        y = model(batch["x"])
        target = batch["x"].roll(1, 1)
        return nn.functional.cross_entropy(y.flatten(0, 1).float(), target.flatten(),
                                           reduction="sum") / 5, len(y)
"""
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


# Each group of legs shares a process group, to be quick.
ZERO3, ZERO1, DDP = Leg("zero3", 4), Leg("zero1", 2), Leg("ddp", 4)
HYBRID = Leg("zero3_hybrid", 4, ("strategy.shard_size=2",))
FULL = [Leg("ddp", 2, state="full"), Leg("zero3", 2, state="full")]
NATIVE = [[ZERO3], [Leg("zero3", 2), ZERO1, *FULL], [Leg("zero2", 4), HYBRID, DDP], [Leg("ddp", 1)]]
OFFLOAD = "+strategy.deepspeed_config.zero_optimization.offload_optimizer.device=cpu"
SMALL = "+strategy.deepspeed_config.zero_optimization.stage3_param_persistence_threshold=100"
DEEPSPEED = [
    [
        *(Leg("deepspeed", 2, (f"strategy.stage={stage}",)) for stage in range(4)),
        Leg("deepspeed", 2, ("strategy.stage=3", SMALL)),
        Leg("deepspeed", 2, ("strategy.stage=2", OFFLOAD)),
        Leg("deepspeed", 2, ("strategy.stage=3", OFFLOAD)),
        Leg("ddp", 2),
    ],
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("job") / "odd_job.py"
    file.write_text(JOB)
    return f"{file}:Odd"


@pytest.fixture(scope="module")
def first(job: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by ddp on 2 ranks."""
    root = tmp_path_factory.mktemp("first")
    return run_legs(root, job, [Leg("ddp", 2)])[0]


@pytest.fixture(scope="module")
def native(job: str, first: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Leg, Path]:
    """What each of our strategies made of it."""
    return run_chain(tmp_path_factory.mktemp("native"), job, NATIVE, first)


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
    files = TensorFiles(checkpoints.path(STEPS), checkpoints.require_sound(STEPS))
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


def assert_holds_all(found: dict[str, Tensor]) -> None:
    """Tied once, frozen without moments, buffers, a count of steps for each weight."""
    weights = {name for name in found if name.startswith("model:")}
    assert "model:embed.weight" in weights and "model:head.weight" not in weights
    assert int(found["model:seen"]) == STEPS
    trained = {n.removeprefix("model:") for n in weights} - {"seen", "mask", "still"}
    slots = ("exp_avg", "exp_avg_sq", "step")
    moments = {f"optimizer:{moment_name(name, slot)}" for name in trained for slot in slots}
    assert {name for name in found if name.startswith("optimizer:")} == moments
    assert all(float(found[name]) == STEPS for name in moments if ":step/" in name)


def test_all_state_is_there(first: Path) -> None:
    assert_holds_all(read_all(first))


@pytest.mark.parametrize("leg", [leg for legs in NATIVE for leg in legs], ids=str)
def test_every_strategy_of_ours(leg: Leg, first: Path, native: dict[Leg, Path]) -> None:
    assert_same_state(first, native[leg])


@needs_deepspeed
def test_deepspeed_and_back(job: str, first: Path, tmp_path: Path) -> None:
    for folder in run_chain(tmp_path, job, DEEPSPEED, first).values():
        assert_same_state(first, folder)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", range(4))
def test_what_deepspeed_trained_is_read_by_others(job: str, stage: int, tmp_path: Path) -> None:
    deepspeed = Leg("deepspeed", 2, (f"strategy.stage={stage}",))
    trained = run_legs(tmp_path / "a", job, [deepspeed])[0]
    assert_holds_all(read_all(trained))
    assert_same_state(trained, run_legs(tmp_path / "b", job, [ZERO3], trained)[0])


FP16 = ("precision.mode=fp16", "precision.loss_scale=512.0")


@pytest.mark.slow
@needs_deepspeed
def test_the_loss_scale_survives(job: str, tmp_path: Path) -> None:
    """Each leg begins with the default scale, and must take the one that was saved."""
    start = run_legs(tmp_path / "0", job, [Leg("ddp", 2, FP16)])[0]
    others = [Leg("zero3", 2, FP16[:1]), Leg("deepspeed", 2, (*FP16[:1], "strategy.stage=2"))]
    for folder in run_legs(tmp_path / "1", job, others, start):
        found = read_all(folder)
        assert float(found[f"optimizer:{moment_name(SCALER, 'value')}"]) == 512
        assert int(found[f"optimizer:{moment_name(SCALER, 'good_steps')}"]) == STEPS
        assert_same_bits(read_all(start), found)


@pytest.mark.parametrize("leg", FULL, ids=str)
def test_full_is_one_file_of_each_kind(leg: Leg, first: Path, native: dict[Leg, Path]) -> None:
    step = native[leg] / "checkpoints" / f"step_{STEPS}"
    assert {path.name for path in step.iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "rng-rank0.safetensors",
        "rng-rank1.safetensors", "state.json", "manifest.json",
    }  # fmt: skip
    assert_same_bits(weights_of(first), load_file(step / "model.safetensors"))


def weights_of(folder: Path) -> dict[str, Tensor]:
    found = read_all(folder)
    return {name[6:]: value for name, value in found.items() if name.startswith("model:")}


@pytest.mark.parametrize("leg", [DDP, ZERO3, HYBRID], ids=str)
def test_torch_itself_reads_the_parts(
    leg: Leg, first: Path, native: dict[Leg, Path], tmp_path: Path
) -> None:
    """By its reader of sharded safetensors: the header says which rows a part has."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    step = native[leg] / "checkpoints" / f"step_{STEPS}"
    for part in step.glob("model-rank*.safetensors"):
        shutil.copy(part, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    expected = weights_of(first)
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert_same_bits(expected, found)


@pytest.mark.parametrize("leg", [DDP, ZERO1, ZERO3, HYBRID], ids=str)
def test_ranks_write_fair_shares_and_every_byte_once(
    leg: Leg, first: Path, native: dict[Leg, Path]
) -> None:
    checkpoints = CheckpointFolder(native[leg] / "checkpoints")
    step, manifest = checkpoints.path(STEPS), checkpoints.manifest(STEPS)
    written = []
    for rank in range(leg.num_ranks):
        files = [load_file(step / f"{section}-rank{rank}.safetensors") for section in SECTIONS]
        written.append(sum(value.nbytes for file in files for value in file.values()))
    total = sum(value.nbytes for value in read_all(first).values())
    assert sum(written) == total
    assert max(written) < 2 * total / leg.num_ranks
    for name, entry in {**manifest.model, **manifest.optimizer}.items():
        assert sum(part.num_rows for part in entry.parts) == (*entry.shape, 1)[0], name
