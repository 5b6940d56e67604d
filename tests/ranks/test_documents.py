"""Samples of several documents, and of one each: every strategy computes what one process does."""

import json
from pathlib import Path

import pytest

from tests.harness import run_each, run_here
from tests.pipeline_parity import ONE, SGD, assert_same, pipeline

SMALL = [
    "data.seq_len=24", "data.val_fraction=0.2", "model.dim=32", "model.num_layers=4",
    "train.eval_every=2", "train.eval_samples=all",
]  # fmt: skip
EACH = ["train.micro_batch_size=8", "launch.nproc=2"]
CASES = {
    "ddp": [*EACH, "strategy.name=ddp"],
    "zero3": [*EACH, "strategy.name=zero3"],
    "pipeline": pipeline("1f1b"),
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("data.document_mask=true", marks=pytest.mark.slow),
        pytest.param("data.pack=padded", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_equal_one(how: str, tmp_path: Path) -> None:
    """Rows of JSONL, of unequal length and shorter than a sample: microbatches differ in targets,
    and a sample has a whole document and parts of others."""
    rows = [json.dumps({"text": "ab cd " * (n % 5) + str(n)}) for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    text = [f"data.source={tmp_path / 'rows.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}"]
    words = [*SGD, *SMALL, *text, how]
    reference = run_here(tmp_path / "one", "lm_tiny", [*words, *ONE])
    cases = {name: [*words, *more] for name, more in CASES.items()}
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        assert_same(reference, ends, name)
    other = run_here(tmp_path / "other", "lm_tiny", [*SGD, *SMALL, *text, *ONE])
    assert other.rows[0].grad_norm != pytest.approx(reference.rows[0].grad_norm, rel=0.01)
