"""A pipeline computes what one process computes: every way to cut a model, its weights and its
batch. SGD in fp32, as in test_parity.py; several runs share a group of processes, to be quick."""

from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError
from tests.harness import RankEnds, run_each, run_here
from tests.pipeline_parity import ONE, SGD, assert_same, nightly, pipeline, slow

LM = [
    *SGD, "data.source=synthetic", "data.synthetic_samples=256", "data.seq_len=16", "model.dim=32",
    "model.num_layers=5", "train.eval_every=off",
]  # fmt: skip
UNTIED = [*LM, "model.tied=false"]
INNERS = ["ddp", "zero2", "zero3"]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    return run_here(tmp_path_factory.mktemp("untied") / "run", "lm_tiny", [*UNTIED, *ONE])


def test_every_step_is_clipped(untied: RankEnds) -> None:
    assert min(row.grad_norm for row in untied.rows) > 0.4


@pytest.mark.parametrize("inner", [slow("ddp"), nightly("zero2"), slow("zero3")])
def test_two_pipelines_of_two_ranks(inner: str, untied: RankEnds, tmp_path: Path) -> None:
    more = [*UNTIED, f"strategy.inner={inner}"]
    cases = {s: [*more, *pipeline(s, ranks=4, dp=2)] for s in ("1f1b", "zbv", "dualpipe")}
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        assert_same(untied, ends, name)


@pytest.mark.nightly
@pytest.mark.parametrize("inner", INNERS)
def test_two_pipelines_of_every_other_schedule(
    inner: str, untied: RankEnds, tmp_path: Path
) -> None:
    more = [*UNTIED, f"strategy.inner={inner}"]
    others = ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "dualpipev")
    cases = {s: [*more, *pipeline(s, ranks=4, dp=2, accum=2)] for s in others}
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        assert_same(untied, ends, name)


@pytest.mark.slow
def test_accumulation_recomputation_and_splits(untied: RankEnds, tmp_path: Path) -> None:
    full, selective = (f"train.activation_checkpointing={kind}" for kind in ("full", "selective"))
    cases = {
        "accumulation": pipeline("dualpipe", accum=2),
        "many microbatches": [*pipeline("1f1b"), "strategy.microbatches=16"],
        "selective": [*pipeline("1f1b", accum=4), "strategy.microbatches=2", selective],
        "full": [*pipeline("zbv"), full],
        "layers": [*pipeline("gpipe"), "strategy.split=layers"],
        "listed": [*pipeline("interleaved_zb"), "strategy.split=[1,1,2,1]"],
        **{name: pipeline(name) for name in ("interleaved_1f1b", "looped_bfs", "dualpipev")},
    }
    ended = run_each(tmp_path, "lm_tiny", {name: [*UNTIED, *c] for name, c in cases.items()})
    for name, ends in ended.items():
        assert_same(untied, ends, name)


@pytest.mark.slow
def test_accumulation_of_three(tmp_path: Path) -> None:
    three = ["train.global_batch_size=12", *UNTIED]
    reference = run_here(tmp_path / "one", "lm_tiny", [*three, "train.micro_batch_size=12"])
    cases = {
        s: [*three, *pipeline(s), "train.micro_batch_size=4", "train.grad_accum=auto"]
        for s in ("1f1b", "dualpipe")
    }
    for name, ends in run_each(tmp_path / "two", "lm_tiny", cases).items():
        assert_same(reference, ends, name)


def test_tied_weights_are_summed_wherever_they_are_read(tmp_path: Path) -> None:
    """V: first and last stage are on one rank. dualpipe: each holder has copies, too."""
    reference = run_here(tmp_path / "one", "lm_tiny", [*LM, "model.tied=true", *ONE])
    cases = {s: [*LM, "model.tied=true", *pipeline(s)] for s in ("1f1b", "zbv", "dualpipe")}
    for name, ends in run_each(tmp_path / "two", "lm_tiny", cases).items():
        assert_same(reference, ends, name)


@pytest.mark.nightly
def test_tied_weights_of_two_pipelines(tmp_path: Path) -> None:
    reference = run_here(tmp_path / "one", "lm_tiny", [*LM, "model.tied=true", *ONE])
    cases = {
        s: [*LM, "model.tied=true", *pipeline(s, ranks=4, dp=2)]
        for s in ("interleaved_1f1b", "dualpipev", "dualpipe")
    }
    for name, ends in run_each(tmp_path / "four", "lm_tiny", cases).items():
        assert_same(reference, ends, name)


def test_tied_weights_cannot_be_sharded(tmp_path: Path) -> None:
    sharded = [*LM, "model.tied=true", *pipeline("1f1b", ranks=4, dp=2), "strategy.inner=zero3"]
    with pytest.raises(ConfigError, match=r"strategy.inner=ddp, or untie them"):
        run_each(tmp_path, "lm_tiny", {"sharded": sharded})


@pytest.mark.slow
def test_an_incomplete_batch_is_evaluated(tmp_path: Path, corpus: Path) -> None:
    """11 samples are one batch of 8 and one of 3; training goes on after it, with its own sizes."""
    text = [
        *UNTIED, f"data.source={corpus}", f"data.cache_dir={tmp_path / 'cache'}",
        "data.val_fraction=0.3", "train.eval_every=2", "train.eval_samples=11",
    ]  # fmt: skip
    reference = run_here(tmp_path / "one", "lm_tiny", [*text, *ONE])
    assert [row.step for row in reference.rows if row.val_loss is not None] == [2, 4]
    cases = {s: [*text, *pipeline(s, accum=2)] for s in ("1f1b", "zbv", "dualpipe")}
    for name, ends in run_each(tmp_path / "two", "lm_tiny", cases).items():
        assert_same(reference, ends, name)


@pytest.mark.slow
def test_pipelines_with_unequal_batches_evaluate_as_many_passes(
    tmp_path: Path, corpus: Path
) -> None:
    """19 samples are 8, 8 and 3: the second pipeline has none left for the last turn, and must
    gather the weights of its stages as often as the first."""
    text = [
        *UNTIED, f"data.source={corpus}", f"data.cache_dir={tmp_path / 'cache'}",
        "data.val_fraction=0.3", "train.eval_every=2", "train.eval_samples=19",
    ]  # fmt: skip
    reference = run_here(tmp_path / "one", "lm_tiny", [*text, *ONE])
    cases = {
        inner: [*text, *pipeline("1f1b", ranks=4, dp=2), f"strategy.inner={inner}"]
        for inner in ("zero2", "zero3")
    }
    for name, ends in run_each(tmp_path / "four", "lm_tiny", cases).items():
        assert_same(reference, ends, name)


@pytest.mark.nightly
def test_half_precision_computes_nearly_the_same(untied: RankEnds, tmp_path: Path) -> None:
    cases = {
        f"{s}, {mode}, {inner}": [
            *UNTIED, *pipeline(s, ranks=4, dp=2), f"precision.mode={mode}",
            f"strategy.inner={inner}",
        ]
        for s, mode, inner in (
            ("1f1b", "bf16", "ddp"),
            ("dualpipe", "bf16", "zero2"),
            ("zbv", "bf16", "zero3"),
            ("1f1b", "fp16", "zero3"),
            ("dualpipe", "fp16", "ddp"),
        )
    }  # fmt: skip
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        for expected, found in zip(untied.rows, ends.rows, strict=True):
            assert found.loss == pytest.approx(expected.loss, rel=1e-2), name
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-2), name
        assert ends.rows[0].loss != untied.rows[0].loss, f"{name} was computed in fp32"
        assert {w.dtype for w in ends.states[0].weights.values()} == {torch.float32}


@pytest.mark.nightly
def test_compiled_stages(untied: RankEnds, tmp_path: Path) -> None:
    compiled = [*UNTIED, *pipeline("1f1b"), "train.compile=default"]
    ends = run_each(tmp_path, "lm_tiny", {"compiled": compiled})["compiled"]
    assert_same(untied, ends, "compiled")
