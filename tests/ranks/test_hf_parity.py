"""Models of transformers: every strategy computes what one process computes, from random weights
and from loaded ones, and no rank ever holds a whole model to get there."""

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from tests.harness import RankEnds, prepare_run, run_each, run_here, run_ranks

pytest.importorskip("transformers")
slow, nightly = pytest.mark.slow, pytest.mark.nightly

STEPS = 6
SGD = [
    "optim.name=sgd", "optim.lr=0.2", "optim.weight_decay=0.01", "optim.schedule.warmup_steps=1",
    f"train.steps={STEPS}", "train.global_batch_size=8", "data.num_workers=0",
    "data.synthetic_samples=64", "launch.device=cpu", "train.compile=off",
]  # fmt: skip
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 321, "max_position_embeddings": 64,
}  # fmt: skip
TWO_RANKS = {
    "ddp": ["strategy.name=ddp"],
    "zero2": ["strategy.name=zero2"],
    "zero3": ["strategy.name=zero3"],
    "zero3, logits in chunks": ["strategy.name=zero3", "loss.chunk=7"],
}
DEEP = 12  # layers that make a model much larger than its largest module
BUFFERS = 4096  # bytes of what is not sharded: rotary frequencies, scalars
FOUR_RANKS = ["strategy.name=zero3_hybrid", "strategy.shard_size=2"]


def small_llama(hf: str, tied: bool = False) -> list[str]:
    """321 rows and 2 key heads: not every tensor is cut evenly."""
    keys = [f"model.hf_config.{key}={value}" for key, value in LLAMA.items()]
    tie = f"model.hf_config.tie_word_embeddings={str(tied).lower()}"
    return [f"model.hf={hf}", "data.seq_len=16", *keys, tie]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("llama"), LLAMA)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def save_llama(folder: Path, config: dict[str, int]) -> Path:
    """Random weights in several files, as transformers saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder, max_shard_size="60KB")
    return folder


JOBS = [
    pytest.param("mae", marks=nightly),
    pytest.param("llama", marks=nightly),
    "llama, tied",
    pytest.param("llama, loaded", marks=nightly),
]
_REFERENCES: dict[str, RankEnds] = {}


def arguments(job: str, saved: Path) -> tuple[str, list[str]]:
    if job == "mae":
        return "mae_tiny", SGD
    hf = str(saved) if job == "llama, loaded" else "llama"
    return "tinyllama_fsdp", [*SGD, *small_llama(hf, tied=job == "llama, tied")]


@pytest.fixture
def reference(job: str, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    if job not in _REFERENCES:
        source, overrides = arguments(job, saved)
        one = [*overrides, "strategy.name=ddp", "train.micro_batch_size=8"]
        _REFERENCES[job] = run_here(tmp_path_factory.mktemp("reference") / "run", source, one)
    return _REFERENCES[job]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_equal_one(job: str, reference: RankEnds, saved: Path, tmp_path: Path) -> None:
    source, overrides = arguments(job, saved)
    two = [*overrides, "train.micro_batch_size=4", "launch.nproc=2"]
    cases = {
        row: [*two, *more]
        for row, more in TWO_RANKS.items()
        if job != "mae" or "loss.chunk=7" not in more
    }
    for row, ends in run_each(tmp_path, source, cases).items():
        assert_same(reference, ends, row)


@pytest.mark.parametrize(
    "job", [pytest.param("mae", marks=nightly), pytest.param("llama, loaded", marks=nightly)]
)
def test_four_ranks_equal_one(job: str, reference: RankEnds, saved: Path, tmp_path: Path) -> None:
    """Two copies, each cut in two."""
    source, overrides = arguments(job, saved)
    four = [*overrides, *FOUR_RANKS, "train.micro_batch_size=2", "launch.nproc=4"]
    assert_same(reference, run_ranks(tmp_path / "run", source, four), job)


def assert_same(reference: RankEnds, ends: RankEnds, name: str) -> None:
    losses = [(a.loss, b.loss) for a, b in zip(reference.rows, ends.rows, strict=True)]
    assert len(losses) == STEPS and losses[-1][0] < losses[0][0]
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5), name
    assert ends.rows[0].grad_norm == pytest.approx(reference.rows[0].grad_norm, rel=1e-5), name
    expected_state = reference.states[0].weights
    for state in ends.states:
        assert set(state.weights) == set(expected_state), name
        for key, weight in expected_state.items():
            torch.testing.assert_close(
                state.weights[key], weight, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
            )


def test_loaded_weights_are_where_training_starts(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, overrides = arguments("llama, loaded", saved)
    still = [*overrides, "optim.lr=1e-12", "train.steps=1", "train.micro_batch_size=8"]
    state = run_here(tmp_path / "run", source, [*still, "strategy.name=zero3"]).states[0].weights
    files = [load_file(path) for path in saved.glob("*.safetensors")]
    for name, weight in {k: v for file in files for k, v in file.items()}.items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("job", ["llama", "llama, loaded", "mae"])
def test_no_rank_holds_a_whole_model(job: str, tmp_path: Path) -> None:
    """One rank of 8, in one process with a fake group: while it is built it holds its shard, one
    module, and that module's values on their way in. Never the model."""
    saved = save_llama(tmp_path / "deep", LLAMA | {"num_hidden_layers": DEEP})
    source, overrides = arguments(job, saved)
    deep = f"model.hf_config.num_hidden_layers={DEEP}"
    eight = ["strategy.name=zero3", "train.micro_batch_size=1", "launch.nproc=8"]
    held = build_one_of_eight(tmp_path / "run", source, [*overrides, deep, *eight])
    assert held.peak <= held.shard + 2 * held.largest + BUFFERS, held
    assert held.peak < held.model / 2, held


@dataclass
class Held:
    """Bytes: the whole model, this rank's shard, the largest module, the most at any time."""

    model: int
    shard: int
    largest: int
    peak: int


def build_one_of_eight(folder: Path, source: str, overrides: list[str]) -> Held:
    job, plan, _ = prepare_run(folder, source, overrides)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with TensorBytes() as watch:
            parts = EngineParts(job.config, plan, job.workload, torch.device("cpu"))
            engine = find_strategy("zero3").build(parts)
    finally:
        dist.destroy_process_group()
    with torch.device("meta"):
        whole = job.workload.build_model(job.config)
    sizes = [[p.nbytes for p in m.parameters(recurse=False)] for m in whole.modules()]
    return Held(
        model=sum(p.nbytes for p in whole.parameters()),
        shard=engine.held().parameters,
        largest=max(sum(own) for own in sizes),
        peak=watch.peak,
    )


class TensorBytes(TorchDispatchMode):
    """Bytes of all tensors with memory that operations have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
                continue
            # A DTensor claims the size of the whole; its memory is that of its part.
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
