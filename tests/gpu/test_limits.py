"""What brings a GPU to its limit computes the same: kernels, fp8, chunks, offload, 8 bits,
symmetric memory. That it is faster is in benchmarks/results."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.records import Audit, Plan, Proof
from paceline.verify.flow import run_verify
from tests.gpu.test_strategies import TINY, audit_of
from tests.harness import RankEnds, run_here
from tests.proofs import assert_proven
from tests.skips import needs_flash3, needs_gpu, needs_torchao

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200), needs_gpu]
# A few samples again and again: random tokens can only be learned by heart, and what computes
# wrong gradients does not.
BF16 = [
    *TINY, "precision.mode=bf16", "data.synthetic_samples=8", "train.steps=20",
    "optim.schedule.warmup_steps=2", "optim.lr=1e-3",
]  # fmt: skip
LONG = "data.seq_len=1024"
PLAIN = ["train.kernels=torch", "attention.impl=sdpa"]
SHARED = "launch.env.TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"


def assert_near(plain: RankEnds, other: RankEnds, rel: float) -> None:
    assert plain.rows[-1].loss < (1 - 10 * rel) * plain.rows[0].loss, "it learns nothing"
    for a, b in zip(plain.rows, other.rows, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=rel)


def wrong_in(ends: RankEnds) -> list[Proof]:
    return [p for p in Audit.load(ends.run.audit).proofs if not p.ok and "timeout" not in p.what]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    return run_here(tmp_path_factory.mktemp("plain"), "lm_tiny", [*BF16, *PLAIN])


@pytest.mark.parametrize(
    "settings",
    [
        ["train.kernels=triton"],
        ["train.kernels=triton", "loss.chunk=64", "train.compile=default"],
        ["train.kernels=triton", "strategy.name=zero3"],
        ["train.memory_budget=0.05"],
        ["optim.name=adamw8bit"],
    ],
    ids=" ".join,
)
def test_the_same_is_learned(settings: list[str], plain: RankEnds, tmp_path: Path) -> None:
    ends = run_here(tmp_path / "run", "lm_tiny", [*BF16, *settings])
    assert_near(plain, ends, rel=1e-2)
    assert not wrong_in(ends)


@pytest.fixture(scope="module")
def plain_and_long(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    return run_here(tmp_path_factory.mktemp("long"), "lm_tiny", [*BF16, LONG, *PLAIN])


@pytest.mark.parametrize(
    "settings",
    [["train.activation_checkpointing=full"], [], ["train.compile=default"]],
    ids=" ".join,
)
def test_activations_on_the_host_learn_the_same(
    settings: list[str], plain_and_long: RankEnds, tmp_path: Path
) -> None:
    """With sequences that are long enough for blocks to send what they are given."""
    asked = [*BF16, LONG, "train.activation_offload=true", *settings]
    ends = run_here(tmp_path / "run", "lm_tiny", asked)
    assert_near(plain_and_long, ends, rel=1e-2)
    assert not wrong_in(ends)


@needs_flash3
@pytest.mark.parametrize("compiled", ["off", "default"])
def test_flash3_learns_the_same(compiled: str, plain: RankEnds, tmp_path: Path) -> None:
    """With two heads for each of keys, as in lm_tiny."""
    settings = [f"train.compile={compiled}", "attention.impl=flash3"]
    ends = run_here(tmp_path / "run", "lm_tiny", [*BF16, *settings])
    (proof,) = [p for p in Audit.load(ends.run.audit).proofs if p.what == "attention"]
    assert proof.ok and proof.effective.startswith("flash3 x ")
    assert_near(plain, ends, rel=1e-2)


@needs_flash3
def test_auto_attends_by_flash3(tmp_path: Path) -> None:
    found = audit_of(tmp_path / "run", ["data.seq_len=2048", "precision.mode=bf16"])
    assert found["attention"].ok and found["attention"].requested == "auto, so flash3"


@needs_torchao
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["strategy.name=zero3", "precision.fp8_all_gather=on"],
        *(
            pytest.param([f"precision.fp8_recipe={recipe}"], marks=pytest.mark.nightly)
            for recipe in ("rowwise", "rowwise_gw_hp")
        ),
    ],
    ids=" ".join,
)
def test_products_run_in_fp8(settings: list[str], plain: RankEnds, tmp_path: Path) -> None:
    asked = ["precision.mode=fp8", "precision.fp8_layers=all", "train.compile=default", *settings]
    ends = run_here(tmp_path / "run", "lm_tiny", [*BF16, *asked])
    (found,) = [p for p in Audit.load(ends.run.audit).proofs if p.what == "precision"]
    assert found.ok and "products with scales" in found.effective
    assert_near(plain, ends, rel=3e-2)


@pytest.mark.serial  # ranks that share a GPU with other tests wait for each other in turns
def test_symmetric_memory_is_proven_on_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    names = ["ddp", "zero2", "zero3"]
    asked = ["launch.devices=[0,0]", "strategy.exchange=symmetric", SHARED]
    report = run_verify(names, asked, tmp_path / "two", print)
    assert_proven(report, *names)


@pytest.mark.serial
def test_products_in_parts_are_right_through_symmetric_memory() -> None:
    """The operations alone, on two ranks of one GPU, again and again in the same buffers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fused_ranks"], timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("right") == 2, done.stdout + done.stderr


@pytest.mark.serial
@pytest.mark.nightly  # ranks that share a GPU wait for each other in turns of its scheduler
@pytest.mark.timeout(900)
def test_products_in_parts_are_proven_on_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """Through symmetric memory, on a stream beside the products."""
    names = ["zero2", "zero3"]
    asked = ["launch.devices=[0,0]", "strategy.exchange=fused", SHARED]
    report = run_verify(names, asked, tmp_path / "two", print)
    assert_proven(report, *names)
    plans = [Plan.load(path) for path in (tmp_path / "two").rglob("plan.json")]
    assert "fused" in {plan.exchange_by.value for plan in plans}
