"""A small corpus, prepared, and a small model for it: what tests of speech_clip begin with."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from paceline.prepare.speech import SpeechRequest, prepare
from paceline.prepare.speech_audio import Sound
from tests.speech_signals import CORPUS

RECIPE = "limit_longest_1-3_stage1_bf16"
# 320 samples to a frame, layers whose statistics are a frame's own, nothing that is drawn.
TINY = [
    "model.speech_config={hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,"
    " intermediate_size: 32, conv_dim: [8, 8, 8], conv_kernel: [20, 8, 4], conv_stride: [10, 8, 4],"
    " num_conv_pos_embeddings: 4, num_conv_pos_embedding_groups: 2, feat_extract_norm: layer,"
    " hidden_dropout: 0.0, attention_dropout: 0.0, feat_proj_dropout: 0.0,"
    " activation_dropout: 0.0}",
    "model.text_config={vocab_size: 258, hidden_size: 12, num_hidden_layers: 1,"
    " num_attention_heads: 2, intermediate_size: 24, max_position_embeddings: 96,"
    " initializer_range: 0.5}",
    "model.dropout=0.0", "launch.device=cpu", "data.num_workers=0", "precision.mode=auto",
]  # fmt: skip


@cache
def corpus() -> Path:
    """The fixture, prepared once per process."""
    root = Path(mkdtemp(prefix="speech_clip-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    prepare(SpeechRequest(CORPUS, root, Sound(trim=True)), lambda text: None, lambda progress: None)
    return root


def tiny(*more: str) -> list[str]:
    return [*TINY, f"data.root_dir={corpus()}", *more]
