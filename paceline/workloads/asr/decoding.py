"""Turns speech into ids: Whisper by transformers' own `generate`, CTC by the likeliest letters.

All ranks decode at the same time, each its own utterances. Where weights are sharded every rank is
needed for every token, so none stops before all have: `synced_gpus`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.workloads.asr.texts import WhisperSpeller
from paceline.workloads.hf.model import require_extra

# Kernels that take a mask are needed too, whatever `attention.impl` has left.
KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
# Of a model's generation_config.json: which tokens are never written, or not at first.
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")


@torch.no_grad()
def write_whisper(
    model: Any, features_BMF: Tensor, speller: WhisperSpeller, max_tokens: int, num_beams: int = 1
) -> list[list[int]]:
    """Return the ids that the model writes for each utterance, after the prompt."""
    library, prompt = require_extra(), speller.prompt
    room = int(model.config.max_target_positions) - len(prompt)
    own = {key: getattr(model.generation_config, key, None) for key in SUPPRESSED}
    asked = library.GenerationConfig(
        max_new_tokens=min(max_tokens, room),
        do_sample=False,
        num_beams=num_beams,
        eos_token_id=speller.end_id,
        pad_token_id=speller.end_id,
        decoder_start_token_id=prompt[0],
        **{key: list(ids) for key, ids in own.items() if ids},
    )
    prompts = torch.tensor([prompt] * len(features_BMF), device=features_BMF.device)
    kept, model.generation_config = model.generation_config, asked  # else its own fill the gaps
    try:
        # Not Whisper's own: that one is for long recordings, and goes over each in several passes.
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(KERNELS):
            rows = library.GenerationMixin.generate(
                model,
                inputs=features_BMF,
                attention_mask=torch.ones_like(features_BMF[:, 0], dtype=torch.int64),
                decoder_input_ids=prompts,
                generation_config=asked,
                synced_gpus=dist.is_initialized() and dist.get_world_size() > 1,
            )
    finally:
        model.generation_config = kept
    return [row[len(prompt) :].tolist() for row in rows]


def write_letters(logits_BFV: Tensor, num_frames_B: Tensor) -> list[list[int]]:
    """Return the likeliest letter of every frame of each utterance."""
    ids_BF = logits_BFV.argmax(dim=-1)
    return [row[:size].tolist() for row, size in zip(ids_BF, num_frames_B.tolist(), strict=True)]


def frame_mask(num_samples_B: Tensor, size: int) -> Tensor:
    """Return 1 for each sample of a waveform that is not padding, (B, size)."""
    return (torch.arange(size, device=num_samples_B.device) < num_samples_B[:, None]).long()


def no_dropout(module: nn.Module) -> nn.Module:
    """Put a module that is never trained into eval mode, where something else has changed it."""
    return module.eval() if module.training else module
