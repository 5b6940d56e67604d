"""fp8 by torchao's emulation on CPU: every strategy that takes it against one process, and bf16."""

from pathlib import Path

import pytest

from paceline.records import Audit
from tests.harness import RankEnds, run_each, run_here
from tests.parity import BATCH, SGD, STEPS, assert_same_weights, tiny_model
from tests.skips import needs_torchao

pytestmark = [pytest.mark.slow, needs_torchao]

FP8 = [*tiny_model(), *SGD, *BATCH, "precision.mode=fp8", "precision.fp8_layers=all"]
ROWS = {
    "ddp": ["strategy.name=ddp"],
    "zero2": ["strategy.name=zero2"],
    "zero3, fp8 gathered": ["strategy.name=zero3"],
    "zero3, bf16 gathered": ["strategy.name=zero3", "precision.fp8_all_gather=off"],
    "zero3, rowwise": ["strategy.name=zero3", "precision.fp8_recipe=rowwise"],
}


def assert_near(reference: RankEnds, ends: RankEnds, name: str, rel: float) -> None:
    assert len(ends.rows) == STEPS, name
    for expected, found in zip(reference.rows, ends.rows, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=rel), name
    assert ends.rows[-1].loss < ends.rows[0].loss, f"{name} learned nothing"


def test_fp8_is_the_same_under_every_strategy(tmp_path: Path) -> None:
    alone = ["strategy.name=ddp", "train.micro_batch_size=16"]
    reference = run_here(tmp_path / "alone", "lm_tiny", [*FP8, *alone])
    two = ["train.micro_batch_size=8", "launch.nproc=2"]
    cases = {name: [*FP8, *two, *chosen] for name, chosen in ROWS.items()}
    for name, ends in run_each(tmp_path / "two", "lm_tiny", cases).items():
        assert_near(reference, ends, name, rel=1e-2)
        proofs = {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}
        assert all(p.ok for what, p in proofs.items() if "timeout" not in what), (name, proofs)
        assert proofs["fp8 layers"].effective == "8", name
        if "FSDP gather" in proofs:
            is_small = name in ("zero2", "zero3, fp8 gathered")
            assert ("uint8" in proofs["FSDP gather"].effective) == is_small, name


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        pytest.param("rowwise", marks=pytest.mark.nightly),
        pytest.param("rowwise_gw_hp", marks=pytest.mark.nightly),
    ],
)
def test_losses_stay_with_those_of_bf16(recipe: str, tmp_path: Path) -> None:
    alone = ["strategy.name=ddp", "train.micro_batch_size=16"]
    bf16 = [*tiny_model(), *SGD, *BATCH, *alone, "precision.mode=bf16"]
    wide = run_here(tmp_path / "bf16", "lm_tiny", bf16)
    asked = [*FP8, *alone, f"precision.fp8_recipe={recipe}"]
    small = run_here(tmp_path / "fp8", "lm_tiny", asked)
    assert_near(wide, small, recipe, rel=1e-2)
    with pytest.raises(AssertionError):  # it really rounds
        assert_same_weights(wide, small)
