"""Run directories with a checkpoint, as far as `paceline export` reads them, without training."""

import json
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.pieces import named_tensors
from paceline.config.load import dump_config
from paceline.config.schema import LaunchConfig
from paceline.job import load_job
from paceline.launch.base import LaunchOrder, draw_plan
from paceline.records.rundir import RunDir
from paceline.run.rank import TRAIN
from tests.kept import keep, make_run
from tests.machines import machine, plan

LM = [
    "data.source=synthetic", "model.vocab_size=320", "model.dim=32", "model.num_layers=2",
    "model.num_heads=4", "model.num_kv_heads=2", "data.seq_len=64", "launch.device=cpu",
]  # fmt: skip
LLAMA = [
    "model.hf=llama", "data.source=synthetic", "data.seq_len=32", "launch.device=cpu",
    "model.hf_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,"
    " num_key_value_heads: 2, intermediate_size: 48, vocab_size: 320,"
    " max_position_embeddings: 64}",
]  # fmt: skip
MAE = ["launch.device=cpu"]
# Whisper that hears 4 s, with 128 mel bins; and CTC. Their spellings are bytes and letters.
WHISPER = [
    "model.hf_config={vocab_size: 384, d_model: 16, encoder_layers: 1, decoder_layers: 1,"
    " encoder_attention_heads: 2, decoder_attention_heads: 2, encoder_ffn_dim: 32,"
    " decoder_ffn_dim: 32, max_source_positions: 200, max_target_positions: 64,"
    " num_mel_bins: 128}",
    "launch.device=cpu", "data.num_workers=0",
]  # fmt: skip
LETTERS = [
    "model.hf=wav2vec2", "model.hf_config={hidden_size: 16, num_hidden_layers: 1,"
    " num_attention_heads: 2, intermediate_size: 32, conv_dim: [8, 8, 8],"
    " conv_kernel: [20, 8, 4], conv_stride: [10, 8, 4], num_conv_pos_embeddings: 4,"
    " num_conv_pos_embedding_groups: 2, feat_extract_norm: layer}",
    "launch.device=cpu", "data.num_workers=0",
]  # fmt: skip
LORA = ["model.lora_rank=2", "model.lora_targets=[q_proj, v_proj]"]


def make(
    folder: Path, source: str = "lm_tiny", overrides: list[str] = LM, workload: str = "lm",
    data: str = "{}", num_ranks: int = 1,
) -> tuple[RunDir, dict[str, Any]]:  # fmt: skip
    """A run with one checkpoint at step 5, written by `num_ranks` ranks that share its rows."""
    run, tensors = make_run(folder, source, overrides)
    run.data.write_text(data)
    _complete(run, source, overrides, workload)
    keep(run, tensors, 5, num_ranks=num_ranks)
    return run, tensors


def make_speech(
    folder: Path, source: str, overrides: list[str], workload: str, num_ranks: int = 1
) -> tuple[RunDir, dict[str, Any]]:
    """The same of a workload whose model is built with its values, from a corpus."""
    job = load_job(source, overrides)
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    torch.manual_seed(job.config.train.seed)
    tensors = dict(named_tensors(job.workload.build_model(job.config)))
    run = RunDir.create("test", folder)
    run.config.write_text(dump_config(job.config))
    run.data.write_text(json.dumps(dict(job.workload.prepared)))
    _complete(run, source, overrides, workload)
    tensors = {name: value.detach() for name, value in tensors.items()}
    for name, value in tensors.items():
        if "lora_B" in name:  # zero at first: adapters that add nothing prove nothing
            torch.nn.init.normal_(value, std=0.5)
    is_trained = job.config.checkpoint.weights == "trained"
    kept = {name: value for name, value in tensors.items() if "lora" in name or not is_trained}
    keep(run, kept, 5, num_ranks=num_ranks)
    return run, tensors


def _complete(run: RunDir, source: str, overrides: list[str], workload: str) -> None:
    planned = plan(*overrides, source=source)
    planned.save(run.plan)
    machine().save(run.env)
    order = LaunchOrder(LaunchConfig(), planned.crew, machine(), 1, TRAIN, workload)
    draw_plan(order, argv=[], hosts=["box"]).save(run.launch)
