"""The keys of the speech runbook's commands, and the lines that its diagnosis reads."""

from pathlib import Path

import pytest

from paceline.config.aliases import in_our_words
from paceline.errors import ConfigError
from paceline.foreign.progress import Progress
from paceline.job import load_job
from paceline.records.phases import Phase
from paceline.records.tables import Cell
from paceline.records.timing_ranks import Spreads, step_line, timing_line
from tests.machines import plan

# As they stand in the runbook.
ASKED = [
    "++dataset.root_dir=/code/data/LibriSpeech_16k_trim",
    "++dataset.manifest_path=/code/data/manifest_16k_trim.tsv",
    "++dataset.use_trim=false",
    "++dataset.offline_trimmed=true",
    "deepspeed_config_yaml.zero_optimization.stage=1",
    "deepspeed_config_yaml.train_micro_batch_size_per_gpu=160",
    "++train.data.num_workers=6",
    "++train.data.prefetch_factor=4",
    "++train.enable_cuda_sync_timing=false",
    "++train.timing_rank_scope=all",
]


def test_the_commands_of_the_runbook_are_understood() -> None:
    config = load_job("+experiment=limit_longest_1-3_stage1_bf16", ASKED).config
    assert config.data.model_dump()["root_dir"] == "/code/data/LibriSpeech_16k_trim"
    assert config.data.model_dump()["manifest_path"] == "/code/data/manifest_16k_trim.tsv"
    assert (config.strategy.name, config.strategy.model_dump()["stage"]) == ("deepspeed", 1)
    assert (config.train.micro_batch_size, config.data.num_workers) == (160, 6)
    assert (config.data.prefetch, config.observe.timing_ranks) == (4, "all")


def test_what_is_not_done_here_is_refused_and_what_is_ours_is_left_alone() -> None:
    with pytest.raises(ConfigError, match="(?s)use_trim=true.*prepare speech --trim.*hint"):
        load_job("limit_longest_1-3_stage1_bf16", ["++dataset.use_trim=true"])
    with pytest.raises(ConfigError, match="unknown key dataset.rootdir"):
        load_job("limit_longest_1-3_stage1_bf16", ["dataset.rootdir=x"])
    for text in ("train.steps=5", "~model.hf_config", "data.root_dir=dataset.root_dir=x"):
        assert in_our_words(text) == [text]


# As the stub's own page has it, with paths that are there.
STUB = """
dist: {cpu_only: False, backend: nccl, dtype: bfloat16, sharding_stage: zero3}
dataset: {batch_size: 256, num_workers: 1}
model: {hf_config: {hidden_size: 1280, num_hidden_layers: 32, num_attention_heads: 16}}
optim: {lr: 0.0003, weight_decay: 0.05, grad_clip: 0.0}
lr_scheduler: {total_iterations: 1000000, warmup_iterations: 10}
misc: {peak_flops_per_sec: 312.0e+12, compiles_model: True}
checkpoint:
  {state_dict_type: full, chkpt_saving_iterations: 100, directory: chkpts, prefix: dummy-0.1}
"""


def test_the_yaml_of_the_stub_is_trained_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "stub.yaml"
    file.write_text(STUB)
    config = load_job(str(file), ["train.steps=7"]).config
    assert (config.workload, config.name, config.strategy.name) == ("mae", "dummy-0.1", "zero3")
    assert (config.launch.device, config.launch.backend) == ("auto", "nccl")
    assert (config.precision.mode, config.optim.clip, config.train.steps) == ("bf16", "off", 7)
    assert (config.train.micro_batch_size, config.data.num_workers) == (256, 1)
    assert config.optim.schedule.warmup_steps == 10
    assert (config.observe.peak_flops, config.train.compile) == (312e12, "default")
    kept = config.checkpoint
    assert (kept.state, kept.every, kept.dir) == ("full", 100, "chkpts")
    assert load_job(str(file), []).config.train.steps == 1_000_000
    file.write_text(STUB + "seg: {size: 3}\ndata: {root_dir: x}\n")
    with pytest.raises(ConfigError, match="(?s)data.root_dir.*seg"):
        load_job(str(file), [])
    file.write_text("workload: speech_clip\ndataset: {root_dir: x, use_trim: true}\n")
    with pytest.raises(ConfigError, match="dataset.use_trim=true' cannot be had"):
        load_job(str(file), [])


def test_the_line_of_a_step_has_speed_flops_and_memory() -> None:
    """At each optimizer step, with train.log_every=1; `paceline import` reads it back."""
    decided = plan("launch.nproc=2", "train.steps=8")
    cells: dict[str, Cell] = {
        "step": 4, "loss": 3.21, "lr": 3e-4, "grad_norm": 1.2, "step_s": 0.5, "samples_per_s": 32.0,
        "tokens_per_s": 4096.0, "skipped": False, "overflowed": False, "warmup": False,
        "val_loss": 3.3, "train/x": None, "val/x": 0.25,
    }  # fmt: skip
    line = step_line(cells, decided, 3 * 2**29, 2**31)
    rate = (decided.flops_per_sample.value or 0.0) * 16 / 1e12
    assert line == (
        "step 4/8 loss 3.2100 val_loss 3.3000 val/x 0.2500 lr 0.0003 grad_norm 1.2 step_s 0.5"
        f" tokens/s 4096.0 tflops_per_rank {rate:.3g} peak_gib 1.50 reserved_gib 2.00"
    )
    read = Progress()
    read.read(line, 0)
    assert (read.rows[4]["loss"], read.rows[4]["tokens_per_s"]) == (3.21, 4096)
    bare = step_line(cells | {"tokens_per_s": None}, decided, None, 2**30)
    assert "samples/s 32.0 " in bare and bare.endswith("rss_gib 1.00"), "a CPU has no such count"


def test_the_lines_of_all_ranks_and_their_spread() -> None:
    phases = {Phase.DATA: 0.001, Phase.FORWARD: 0.08, Phase.BACKWARD: 0.1, Phase.OPTIMIZER: 0.01}
    first = timing_line(50, 0, 3.21, phases, 0.2)
    assert first == (
        "TimingRank step=50 rank=0 loss=3.2100 data_wait=1.00 preprocess=0.00 fwd=80.00"
        " bwd=100.00 step=10.00 iter=200.00"
    )
    late = timing_line(50, 1, 3.0, phases | {Phase.DATA: 0.031, Phase.BACKWARD: 0.07}, 0.2)
    spreads = Spreads(2)
    assert list(spreads.note(f"2026 INFO {first}")) == list(spreads.note("step 50 loss 3")) == []
    assert list(spreads.note(late)) == [
        "TimingSpread step=50 ranks=2 data_wait=30.00 fwd=0.00 bwd=30.00 step=0.00 iter=0.00"
        " slowest=1"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "TimingRank step=1 rank=0 loss=0.5 fwd=80.12ms bwd=90ms",
        "TimingRank step=1 rank=0 loss=0.5 fwd=80.12 bwd=90",
        "TimingRank step=1 rank=0 loss=0.5 took 3 s",
        f"TimingRank step={'9' * 5000} rank=0 loss=0.5 fwd=1",
        timing_line(1, 7, 0.5, {}, 0.2),
    ],
)
def test_a_line_of_the_job_that_looks_like_ours_is_just_a_line(line: str) -> None:
    spreads = Spreads(1)
    assert list(spreads.note(line)) == []
    assert len(list(spreads.note(timing_line(1, 0, 0.5, {}, 0.2)))) == 1
