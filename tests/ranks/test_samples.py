"""Texts at evaluations: the same on any ranks and strategy, and training does not notice."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.records.texts import Sample, read_samples
from paceline.report.html import render_html
from paceline.report.markdown import render_markdown
from paceline.report.story import last_samples, read_story
from tests.harness import run_each, run_here
from tests.machines import plan
from tests.reported import write_run
from tests.skips import needs_deepspeed

SMALL = [
    "data.val_fraction=0.3", "data.seq_len=32", "model.dim=32", "model.num_layers=2",
    "train.steps=4", "train.eval_every=2", "train.eval_samples=4", "train.log_every=1",
    "launch.device=cpu", "train.micro_batch_size=4", "optim.name=sgd",
]  # fmt: skip
PROMPTS = ["train.sample_prompts=[the quick brown,'']", "train.sample_tokens=9"]
TWO = ["launch.nproc=2", "train.micro_batch_size=2"]
CASES = {
    "ddp": [],
    "zero3": ["strategy.name=zero3"],
    "averaged": ["attention.impl=math", "optim.ema=0.9", "train.eval_ema=true"],
}


@pytest.fixture
def small(corpus: Path, tmp_path: Path) -> list[str]:
    return [*SMALL, f"data.source={corpus}", f"data.cache_dir={tmp_path / 'cache'}"]


def texts(samples: list[Sample]) -> list[tuple[int, str, str]]:
    return [(sample.step, sample.prompt, sample.text) for sample in samples]


@pytest.mark.slow
def test_ranks_write_what_one_process_writes(small: list[str], tmp_path: Path) -> None:
    alone = run_here(tmp_path / "alone", "lm_tiny", [*small, *PROMPTS])
    wanted = texts(read_samples(alone.run.texts))
    assert [(step, prompt) for step, prompt, _ in wanted] == [
        (2, "the quick brown"), (2, ""), (4, "the quick brown"), (4, ""),
    ]  # fmt: skip
    assert all(text for *_, text in wanted)
    cases = {name: [*small, *PROMPTS, *TWO, *more] for name, more in CASES.items()}
    for name, ends in run_each(tmp_path, "lm_tiny", cases).items():
        found = texts(read_samples(ends.run.texts))
        assert found == wanted or name == "averaged", name
        assert [step for step, *_ in found] == [2, 2, 4, 4]
        losses = [row.loss for row in ends.rows]
        assert losses == pytest.approx([row.loss for row in alone.rows], rel=1e-5)
    without = run_here(tmp_path / "without", "lm_tiny", small)
    assert [row.loss for row in without.rows] == [row.loss for row in alone.rows]
    assert not without.run.texts.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["zero3", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_models_of_transformers_write_on_several_ranks(
    name: str, small: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    keys = [word for word in small if not word.startswith("model.")]
    keys += [
        "train.compile=off", "model.hf=llama",
        "model.hf_config.hidden_size=16", "model.hf_config.num_hidden_layers=1",
        "model.hf_config.num_attention_heads=2", "model.hf_config.num_key_value_heads=2",
        "model.hf_config.intermediate_size=16", "model.hf_config.vocab_size=320",
    ]  # fmt: skip
    alone = run_here(tmp_path / "alone", "tinyllama_fsdp", [*keys, *PROMPTS, "strategy.name=ddp"])
    more = [*keys, *PROMPTS, *TWO, f"strategy.name={name}"]
    ends = run_each(tmp_path, "tinyllama_fsdp", {"two": more})["two"]
    assert texts(read_samples(ends.run.texts)) == texts(read_samples(alone.run.texts))


def test_a_prompt_that_does_not_fit_ends_the_run_before_it_begins(
    small: list[str], tmp_path: Path
) -> None:
    long = "a" * 40
    with pytest.raises(ConfigError, match="a prompt has 40 tokens, and the model sees 32"):
        run_here(tmp_path / "run", "lm_tiny", [*small, f"train.sample_prompts=[{long}]"])


def test_what_cannot_write_is_refused_while_planning() -> None:
    def said(*overrides: str, source: str = "lm_tiny") -> list[tuple[str, str]]:
        found = plan("train.sample_prompts=[a]", *overrides, source=source).findings
        return [(f.severity, f.what) for f in found if f.where == "train.sample_prompts"]

    assert said("train.eval_every=10") == []
    [(severity, what)] = said("train.eval_every=off")
    assert severity == "warning" and "no effect" in what
    [(severity, what)] = said("strategy.name=pipeline", "launch.nproc=2", "strategy.microbatches=8")
    assert severity == "error" and "a pipeline runs a batch" in what
    pytest.importorskip("transformers")
    [(severity, what)] = said("train.eval_every=10", source="mae_tiny")
    assert severity == "error" and "generates no text" in what
    idle = plan("train.sample_tokens=9").findings
    assert [f.where for f in idle if "sample" in f.where] == ["train.sample_tokens"]


def test_a_resumed_run_has_one_text_for_each_step(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    lines = [Sample(step=step, prompt="a", text=text).model_dump_json() for step, text in
             [(2, "one"), (4, "old"), (4, "new")]]  # fmt: skip
    path.write_text("\n".join([*lines, "[1]", lines[0][:9]]))
    assert texts(read_samples(path)) == [(2, "a", "one"), (4, "a", "new")]
    assert read_samples(tmp_path / "gone") == []


def test_texts_are_in_the_report_and_act_on_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = [
        Sample(step=2, prompt="once", text=" early"),
        Sample(step=4, prompt="a|b", text="<script>x</script>\n# not a title\x1b[31m"),
    ]
    run.texts.write_text("".join(sample.model_dump_json() + "\n" for sample in found))
    told = read_story(run)
    assert [sample.step for sample in last_samples(told)] == [4]
    page, summary = render_html(told), render_markdown(told)
    assert "Samples" in page and " early" in page and "step 2" in page
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "## Samples of step 4" in summary and "early" not in summary
    assert "\n# not a title" not in summary and "<script>" not in summary
    assert "Samples" not in render_html(replace(told, samples=()))
