"""Strategies train a model with native sparse attention as one process does, recomputing blocks."""

from pathlib import Path

import pytest

from tests.proofs import verify

SPARSE = [
    "attention.impl=nsa", "attention.nsa.l=4", "attention.nsa.d=2", "attention.nsa.l_sel=8",
    "attention.nsa.n_sel=3", "attention.nsa.w=6", "train.activation_checkpointing=full",
    "launch.nproc=2",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "pipeline"])
def test_sparse_attention_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    report = verify([strategy], SPARSE, tmp_path / "run")
    assert report.exit_code == 0 and any(proof.checks for proof in report.proofs)
