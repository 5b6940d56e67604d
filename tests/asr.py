"""A small recogniser for the small corpus: what tests of asr begin with."""

from pathlib import Path
from typing import Any

import torch

from paceline.job import load_job
from tests.speech_clip import corpus

RECIPE = "whisper_tiny_made"
# Nothing in it draws random numbers; it hears 5 s.
WHISPER = [
    "model.hf_config={vocab_size: 384, d_model: 16, encoder_layers: 2, decoder_layers: 1,"
    " encoder_attention_heads: 2, decoder_attention_heads: 2, encoder_ffn_dim: 24,"
    " decoder_ffn_dim: 24, max_source_positions: 250, max_target_positions: 96, num_mel_bins: 20}",
    "data.eval_max_tokens=6", "data.num_workers=0", "launch.device=cpu",
]  # fmt: skip
CTC = [
    "model.hf=wav2vec2", "~model.hf_config",
    "model.hf_config={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,"
    " intermediate_size: 32, conv_dim: [8, 8, 8], conv_kernel: [20, 8, 4], conv_stride: [10, 8, 4],"
    " num_conv_pos_embeddings: 4, num_conv_pos_embedding_groups: 2, feat_extract_norm: layer,"
    " hidden_dropout: 0.0, attention_dropout: 0.0, feat_proj_dropout: 0.0, activation_dropout: 0.0,"
    " final_dropout: 0.0}",
    "data.num_workers=0", "launch.device=cpu",
]  # fmt: skip
# Weights so large that a model which has learned nothing writes something.
LOUD = "model.hf_config.init_std=0.6"
LORA = ["model.lora_rank=2", "model.lora_dropout=0.0"]


def tiny(*more: str) -> list[str]:
    return [*WHISPER, f"data.root_dir={corpus()}", *more]


def tiny_ctc(*more: str) -> list[str]:
    return [*CTC, f"data.root_dir={corpus()}", *more]


def save_whisper(folder: Path, **keys: Any) -> Path:
    """A folder of a small Whisper, as `save_pretrained` writes it."""
    job = load_job(RECIPE, tiny(*(f"model.hf_config.{key}={value}" for key, value in keys.items())))
    torch.manual_seed(3)
    model: Any = job.workload.build_model(job.config)
    del model.rules
    model.save_pretrained(folder)
    job.workload.speller(job.config.model).library.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder
