"""fp8 by torchao's emulation on CPU: every strategy that takes it against one process, and bf16."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.machine.topology import RankId
from paceline.records import Audit
from paceline.records.rundir import RunDir
from paceline.strategies.clock import HostClock
from paceline.strategies.gather import whole
from tests.harness import RankEnds, build_engine, prepare_run, run_each, run_here, start_ranks
from tests.parity import BATCH, SGD, STEPS, assert_same_weights, tiny_model
from tests.skips import needs_torchao

pytestmark = [pytest.mark.slow, needs_torchao]

FP8 = [*tiny_model(), *SGD, *BATCH, "precision.mode=fp8", "precision.fp8_layers=all"]
ROWS = {
    "ddp": ["strategy.name=ddp"],
    "zero2": ["strategy.name=zero2", "precision.fp8_all_gather=on"],
    "zero3, fp8 gathered": ["strategy.name=zero3", "precision.fp8_all_gather=on"],
    "zero3, bf16 gathered": ["strategy.name=zero3", "precision.fp8_all_gather=off"],
    "zero3, rowwise": ["strategy.name=zero3", "precision.fp8_recipe=rowwise"],
    "pipeline": ["strategy.name=pipeline", "train.micro_batch_size=16"],
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
        assert proofs["fp8 layers"].effective == ("4" if name == "pipeline" else "8"), name
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


class Kept:
    """Weights of an engine as a source, without files."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        return {n: tuple(w.shape) for n, w in self.weights.items()} if section == "model" else {}

    def rows(self, section: str, name: str, first: int, count: int) -> Tensor:
        return self.weights[name][first : first + count]

    def fill(self, section: str, name: str, first: int, out: Tensor) -> None:
        out.copy_(self.rows(section, name, first, len(out)))


def test_weights_that_are_replaced_get_scales_of_their_own(tmp_path: Path) -> None:
    """By their average for an evaluation and back, and by a checkpoint."""
    asked = [*FP8, "launch.nproc=2", "train.micro_batch_size=8", "strategy.name=zero3"]
    asked += [
        "precision.fp8_all_gather=on",
        "optim.ema=0.9",
        "train.eval_every=1",
        "train.eval_ema=true",
    ]
    prepare_run(tmp_path / "run", "lm_tiny", asked)
    start_ranks(RunDir(tmp_path), 2, partial(replace_weights, asked))


def test_layers_know_whether_their_weights_are_gathered_and_freed(tmp_path: Path) -> None:
    asked = [*FP8, "launch.nproc=2", "train.micro_batch_size=8"]
    settings = {name: [*asked, f"strategy.name={name}"] for name in ("ddp", "zero2", "zero3")}
    settings["gathered"] = [*asked, "strategy.name=zero2", "precision.fp8_all_gather=on"]
    for name, overrides in settings.items():
        prepare_run(tmp_path / name, "lm_tiny", overrides)
    start_ranks(RunDir(tmp_path), 2, partial(look_at_layers, settings))


def look_at_layers(settings: dict[str, list[str]], group: RunDir, place: RankId) -> None:
    for name, overrides in settings.items():
        engine: Any
        engine, _ = build_engine(RunDir(group.root / name), "lm_tiny", overrides)
        layers = [m for m in engine.module.modules() if getattr(m, "is_cast_whole", False)]
        freed = {getattr(layer, "is_freed", False) for layer in layers}
        assert freed == {name == "zero3"}, name
        assert {layer.is_gathered for layer in layers} == {name == "gathered"}, name


def replace_weights(asked: list[str], group: RunDir, place: RankId) -> None:
    engine: Any
    engine, batches = build_engine(RunDir(group.root / "run"), "lm_tiny", asked)
    first = Kept(engine.weights())
    engine.forward_backward(batches, 1.0, HostClock())
    engine.step(10.0, HostClock())
    assert_own_scales(engine.module, "after a step")
    with engine.averaged():
        assert_own_scales(engine.module, "averaged")
    assert_own_scales(engine.module, "after the average")
    engine.load(first)
    assert_own_scales(engine.module, "loaded")


def assert_own_scales(module: torch.nn.Module, when: str) -> None:
    layers = [m for m in module.modules() if type(m).__name__ == "Float8Linear"]
    assert layers
    for layer in layers:
        weight: Any = layer.weight
        expected = torch.finfo(torch.float8_e4m3fn).max / whole(weight).abs().max()
        found = weight._local_tensor._precomputed_scale
        assert found.item() == pytest.approx(expected.item()), when
