"""A speech encoder that learns the vectors of a frozen text encoder for the same words.

Shape letters: B batch, T samples of audio, F frames (one for about 320 samples), L tokens of text,
H width of the speech encoder, D width of the space that both are drawn in.

    waveforms (B, T) --> wav2vec2 (B, F, H) --> attention pooling (B, H) --> linear (B, D) -> / norm
    tokens (B, L)    --> text encoder, frozen --> its first token (B, D) [--> linear] ---> / norm
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import DataError
from paceline.records import Finding
from paceline.workloads.hf.model import (
    attention_name,
    build_config,
    build_from_config,
    check_keys,
    require_extra,
)
from paceline.workloads.speech_clip.wide_conv import quicken

# Over what the config of an encoder comes with; keys of the user go over these.
SPEECH_DEFAULTS: Mapping[str, Any] = {
    # A rank that leaves a layer out would have no gradient for it, or others would wait for it.
    "layerdrop": 0.0,
    # SpecAugment draws its masks on the host, which then waits for the device in every step.
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
FRAME_MASK = "_get_feature_vector_attention_mask"
MASKED = "paceline_sdpa"  # SDPA with a mask, as transformers is told to call it
# Parameters that a file of weights need not have: they are not used, or have no trained value.
SPARE = ("pooler.", "masked_spec_embed")


class AttentionPooling(nn.Module):
    """Frames to one vector: a small network says how much each of them counts."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(width, width // 2), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width // 2, 1)
        )

    def forward(self, frames_BFH: Tensor, is_real_BF: Tensor) -> Tensor:
        score_BF = self.score(frames_BFH).squeeze(-1).float()
        weight_BF = score_BF.masked_fill(~is_real_BF, -math.inf).softmax(dim=-1)
        return (weight_BF.unsqueeze(1).to(frames_BFH.dtype) @ frames_BFH).squeeze(1)


class SpeechClip(nn.Module):
    """`project_text` None: the space is that of the text encoder. `negatives`, `capacity` and
    `max_scale` are for the loss (negatives.py), which sees the model and not the config."""

    def __init__(self, speech: nn.Module, text: nn.Module, width: int | None, dropout: float):
        super().__init__()
        hidden: int = speech.config.hidden_size  # type: ignore[union-attr,assignment]
        text_hidden: int = text.config.hidden_size  # type: ignore[union-attr,assignment]
        self.speech, self.text = speech, text
        if hasattr(speech, FRAME_MASK):
            # Its own writes a number of the host's into the mask, and waits until that has arrived.
            setattr(speech, FRAME_MASK, partial(_frame_mask, speech.config))
        self.pool = AttentionPooling(hidden, dropout)
        self.project_speech = nn.Linear(hidden, width or text_hidden)
        self.project_text = None if width is None else nn.Linear(text_hidden, width)
        # One row and not a scalar: FSDP cuts parameters along their first axis.
        self.log_scale = nn.Parameter(torch.zeros(1))
        self.text.requires_grad_(False).eval()
        self.max_scale, self.negatives = 100.0, "local"
        self.capacity: int | None = None
        self.train()

    def train(self, mode: bool = True) -> "SpeechClip":
        """The text encoder says the same of the same words, whatever is done with the rest. Nor
        does the stack of layers itself train, only what is in it: it would draw a number per layer
        to see whether LayerDrop, which is refused, leaves it out; a graph would end there, and
        FLOPs could not be counted."""
        super().train(mode)
        self.text.eval()
        if (layers := getattr(self.speech, "encoder", None)) is not None:
            layers.training = False
        return self

    @property
    def scale(self) -> Tensor:
        """What cosines are multiplied with, (1,)."""
        return self.log_scale.float().exp().clamp(max=self.max_scale)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the vectors of speech and of text, (B, D) each, of length 1 and in fp32."""
        heard, read = batch["waveforms"], batch["tokens"]
        return (
            self.embed_speech(heard, _first(batch["num_samples"], heard.shape[1])),
            self.embed_text(read, _first(batch["num_tokens"], read.shape[1])),
        )

    def embed_speech(self, wave_BT: Tensor, is_real_BT: Tensor) -> Tensor:
        """Return the vectors of waveforms (B, D). The mask has 1 for samples that are no filling;
        those come first."""
        frames_BFH = self.speech(wave_BT, attention_mask=is_real_BT.bool()).last_hidden_state
        num_frames_B = num_frames(self.speech.config, is_real_BT.sum(dim=1))
        pooled_BH = self.pool(frames_BFH, _first(num_frames_B, frames_BFH.shape[1]))
        return nn.functional.normalize(self.project_speech(pooled_BH).float(), dim=-1)

    def embed_text(self, tokens_BL: Tensor, is_real_BL: Tensor) -> Tensor:
        """Return the vectors of texts (B, D), as the mask's first tokens say them."""
        with torch.no_grad():
            read = self.text(input_ids=tokens_BL, attention_mask=is_real_BL.long())
        text_BD = read.last_hidden_state[:, 0]
        if self.project_text is not None:
            text_BD = self.project_text(text_BD)
        return nn.functional.normalize(text_BD.float(), dim=-1)


def _frame_mask(config: Any, size: int, is_real_BT: Tensor, add_adapter: Any = None) -> Tensor:
    """Return which of `size` frames lie whole within an utterance, (B, size)."""
    return _first(num_frames(config, is_real_BT.sum(dim=-1)), size)


def _first(count_B: Tensor, size: int) -> Tensor:
    """Return a mask (B, size): True for the first `count` of each row."""
    return torch.arange(size, device=count_B.device) < count_B.unsqueeze(1)


def num_frames(config: Any, num_samples: Any) -> Any:
    """Return how many frames lie whole within so many samples: a number, or a tensor of them."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        num_samples = (num_samples - kernel) // stride + 1
    return num_samples


def fewest_samples(config: Any) -> int:
    """Return the fewest samples that make a frame."""
    needed = 1
    for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
        needed = (needed - 1) * stride + kernel
    return needed


def build_speech_clip(speech: Any, text: Any, settings: Any, impl: str) -> SpeechClip:
    """Build it from the configs of both encoders, with random weights."""
    width = None if settings.projection_dim == "text" else settings.projection_dim
    hears = quicken(keep_masks(build_from_config("AutoModel", speech, impl)))
    reads = keep_masks(build_from_config("AutoModel", text, impl))
    model = SpeechClip(hears, reads, width, settings.dropout)
    with torch.no_grad():
        model.log_scale.fill_(math.log(settings.scale))
    model.max_scale = settings.max_scale
    return model


def keep_masks(encoder: nn.Module) -> nn.Module:
    """Let attention by SDPA always have its mask. transformers leaves it out where nothing is
    padded, and to know that the host waits for the device, twice in every step; nor could FLOPs be
    counted, on tensors that have shapes and no values."""
    if encoder.config._attn_implementation == "sdpa":  # type: ignore[union-attr]
        transformers = require_extra()
        sdpa = require_extra("transformers.integrations.sdpa_attention").sdpa_attention_forward
        transformers.AttentionInterface.register(MASKED, sdpa)
        transformers.AttentionMaskInterface.register(MASKED, _whole_mask)
        encoder.config._attn_implementation = MASKED  # type: ignore[union-attr]
    return encoder


def _whole_mask(*args: Any, **more: Any) -> Any:
    make_mask = require_extra("transformers.masking_utils").sdpa_mask
    return make_mask(*args, **{**more, "allow_is_bidirectional_skip": False})


def load_encoder(model: nn.Module, folder: Path, impl: str, spare: tuple[str, ...] = SPARE) -> None:
    """Give an encoder the weights of a folder, as transformers reads them: files of a larger model
    have them under other names. Those that are `spare` need not be there."""
    kind: Any = type(model)
    read, info = kind.from_pretrained(
        folder,
        config=model.config,
        dtype=torch.float32,
        attn_implementation=attention_name(impl),
        output_loading_info=True,
        local_files_only=True,
        use_safetensors=True,
    )
    missing = [name for name in info["missing_keys"] if not name.startswith(spare)]
    wrong = [str(name) for name in info["mismatched_keys"]]
    if missing or wrong:
        raise DataError(
            f"the weights in {folder} do not fit {kind.__name__}: {len(missing)} missing, as"
            f" {missing[:3]}; {len(wrong)} of another shape, as {wrong[:3]}\n"
            "hint: take the keys that change its shape out of the config"
        )
    model.load_state_dict(read.state_dict())


def warm_start(model: SpeechClip, file: Path) -> None:
    """Begin where another training has ended, with all that was trained there. The text encoder is
    this model's own: it was never trained, and must be the same."""
    safetensors = require_extra("safetensors.torch")
    found: dict[str, Tensor] = safetensors.load_file(file)
    wanted = {k: v for k, v in model.state_dict().items() if not k.startswith("text.")}
    own = {k: v for k, v in model.state_dict().items() if k.startswith("text.")}
    missing = sorted(wanted.keys() - found.keys())
    misfits = [k for k in wanted.keys() & found.keys() if wanted[k].shape != found[k].shape]
    others = [k for k in own.keys() & found.keys() if not torch.equal(own[k].cpu(), found[k])]
    if missing or misfits or others:
        raise DataError(
            f"model.warm_start={file} is of another model: {len(missing)} tensors are missing"
            f" {missing[:3]}, {len(misfits)} have another shape {misfits[:3]}, and"
            f" {len(others)} of the text encoder are not the same {others[:3]}\n"
            "hint: give both runs the same model.speech, model.text and their configs"
        )
    model.load_state_dict({k: found[k] for k in wanted}, strict=False)


def check_encoder(where: str, given: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Yield the keys of an encoder's config that do not exist, or cannot be used here."""
    for finding in check_keys(given, type(config)):
        yield finding.model_copy(update={"where": f"{where}.{finding.where.rpartition('.')[2]}"})
    if getattr(config, "layerdrop", 0.0) > 0:
        yield Finding.error(
            f"{where}.layerdrop",
            f"{config.layerdrop:g}: ranks would leave out different layers, and wait for each"
            " other",
            hint=f"set {where}.layerdrop=0; dropout inside the layers is free",
        )


def speech_config(kind: Any, given: Mapping[str, Any], base: Mapping[str, Any]) -> Any:
    """Return the config of the speech encoder: what it comes with, our defaults, the user's
    keys."""
    return build_config(kind, {**SPEECH_DEFAULTS, **given}, base)
