"""Samples of several documents, and of one each: every strategy computes what one process does."""

import json
from pathlib import Path

import pytest
import torch

from paceline.prepare.text import train_bpe
from tests.harness import run_each, run_here
from tests.pipeline_parity import ONE, SGD, assert_same, pipeline
from tests.unit.test_tokenizers import hf_folder, save

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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["data.document_mask=true", "data.pack=padded"])
def test_real_weights_meet_their_own_tokenizer(how: str, tmp_path: Path) -> None:
    """The loss of step 1 is what transformers finds, with its own tokenizer and its own labels, for
    each document by itself; training then lowers it."""
    transformers = pytest.importorskip("transformers")
    texts = [f"Fox {n} sees {'a dog, ' * n}a hen." for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    folder = save(hf_folder(tmp_path / "model", None), train_bpe(iter(texts), 270))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    rows = [[*tokenizer.encode(text), model.config.eos_token_id] for text in texts]
    with torch.no_grad():
        means = [model(input_ids=ids, labels=ids).loss.item() for ids in map(_one, rows)]
    sums = [mean * (len(row) - 1) for mean, row in zip(means, rows, strict=True)]
    # One batch holds all: as one packed sample, or as four padded ones.
    size = [f"data.seq_len={sum(map(len, rows)) - 1}", "train.micro_batch_size=1"]
    size = size if "mask" in how else ["data.seq_len=60", "train.micro_batch_size=4"]
    words = [
        f"model.hf={folder}", f"data.source={tmp_path / 'rows.jsonl'}", "data.val_fraction=0.0",
        f"data.cache_dir={tmp_path}", "train.steps=20", "train.log_every=1", "launch.device=cpu",
        "optim.lr=0.01", "checkpoint.at_end=false", *size, how,
    ]  # fmt: skip
    ends = run_here(tmp_path / "run", "causal_lm", words)
    expected = sum(sums) / sum(len(row) - 1 for row in rows)
    assert ends.rows[0].loss == pytest.approx(expected, rel=1e-4)
    assert ends.rows[-1].loss < ends.rows[0].loss - 0.5


def _one(row: list[int]) -> torch.Tensor:
    return torch.tensor([row])
