"""Strategies, kernels and precisions on a CUDA device: proven, and seen in the audit."""

from pathlib import Path

import pytest
import torch

from paceline.errors import Outcome
from paceline.records import Audit, Proof
from paceline.verify.flow import run_verify
from tests.harness import run_here
from tests.proofs import assert_proven
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    needs_gpu,
]
TINY = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=128", "model.dim=256",
    "model.num_layers=2", "train.eval_every=off", "train.eval_samples=all", "launch.device=cuda",
    "train.steps=5",
]  # fmt: skip


def audit_of(folder: Path, overrides: list[str]) -> dict[str, Proof]:
    ends = run_here(folder, "lm_tiny", [*TINY, *overrides])
    assert ends.verdicts[0].outcome is Outcome.OK
    return {proof.what: proof for proof in Audit.load(ends.run.audit).proofs}


def test_every_strategy_is_proven_on_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    names = ["ddp", "zero1", "zero2", "zero3"]
    report = run_verify(names, ["launch.devices=[0,0]"], tmp_path / "two", print)
    assert report.device == "cuda"
    assert_proven(report, *names)


def test_hybrids_are_proven_on_four_ranks_of_one_gpu(tmp_path: Path) -> None:
    names = ["zero2_hybrid", "zero3_hybrid"]
    report = run_verify(names, ["launch.devices=[0,0,0,0]"], tmp_path / "four", print)
    assert_proven(report, *names)


KERNELS = ("flash", "cudnn", "efficient", "math")
COMPILED = [
    pytest.param("default", impl, marks=[] if impl in ("flash", "math") else [pytest.mark.nightly])
    for impl in KERNELS
]


@pytest.mark.parametrize(("compiled", "impl"), [*(("off", impl) for impl in KERNELS), *COMPILED])
def test_the_kernel_asked_for_is_the_kernel_that_runs(
    compiled: str, impl: str, tmp_path: Path
) -> None:
    asked = [f"attention.impl={impl}", f"train.compile={compiled}", "precision.mode=bf16"]
    proof = audit_of(tmp_path / "run", asked)["attention"]
    as_products = impl == "math" and compiled == "default"
    expected = "math, as " if as_products else f"{impl} x 2"
    assert proof.ok and proof.effective.startswith(expected), proof


def test_flex_attention_runs(tmp_path: Path) -> None:
    proof = audit_of(tmp_path / "run", ["attention.impl=flex", "precision.mode=bf16"])["attention"]
    assert proof.ok, proof


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_precision_is_what_is_computed_in(precision: str, strategy: str, tmp_path: Path) -> None:
    found = audit_of(tmp_path / "run", [f"precision.mode={precision}", f"strategy.name={strategy}"])
    assert found["precision"].ok and found["optimizer"].ok, found


def test_zero3_adds_no_synchronisation_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP may wait where it likes; our own step must not."""
    from paceline.strategies.engine import ModuleEngine

    right = ModuleEngine.step

    def watched(self: ModuleEngine, *args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return right(self, *args)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ModuleEngine, "step", watched)
    audit_of(tmp_path / "run", ["strategy.name=zero3"])


def test_offload_learns_the_same(tmp_path: Path) -> None:
    settings = [*TINY, "strategy.name=zero3", "precision.mode=fp32", "precision.matmul=highest"]
    plain = run_here(tmp_path / "plain", "lm_tiny", settings)
    offloaded = run_here(tmp_path / "offload", "lm_tiny", [*settings, "strategy.offload=true"])
    for a, b in zip(plain.rows, offloaded.rows, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-4)


def test_pipelines_are_proven_on_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    names = ["pipeline_1f1b", "pipeline_zbv", "pipeline_dualpipe"]
    report = run_verify(names, ["launch.devices=[0,0]"], tmp_path / "piped", print)
    assert_proven(report, *names)
