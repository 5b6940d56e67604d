"""Speech recognition models: built from a config or loaded, with adapters and a teacher.

    known = load_asr_config("whisper", {}, None, speller)     transformers' config
    model = build_asr(known, config.model, "sdpa")            random weights, adapters, frozen base
    load_asr(model, folder, "sdpa")                           before adapters are put in

Whisper turns log-mel features (B, M, F) and tokens (B, L) into logits (B, L, V); those with CTC
turn waveforms (B, T) into logits for each frame. The model is transformers' own class in all cases:
with adapters some of its linear layers are peft's, and `teacher` is one more child.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.records import Finding
from paceline.workloads.asr.lora import add_adapters, keep_base, load_adapter, pack_base
from paceline.workloads.asr.texts import LetterSpeller, Speller, WhisperSpeller
from paceline.workloads.hf.model import build_config, build_from_config, check_keys
from paceline.workloads.hf.pretrained import config_class, read_config
from paceline.workloads.speech_clip.model import SPARE, SPEECH_DEFAULTS, load_encoder

WHISPER = "whisper"
# Those of transformers that hear waveforms and say something of each frame.
CTC = ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio")
AUTO = {WHISPER: "AutoModelForSpeechSeq2Seq"}
HOP, RATE = 160, 16000  # samples per frame of log-mel features, and per second
FRAMES_PER_POSITION = 2  # Whisper's second convolution has a stride of 2
HEAD = ("lm_head.",)  # of CTC: pretrained encoders come without one
TEACHER = "teacher"


def load_asr_config(
    name: str, given: Mapping[str, Any], folder: Path | None, speller: Speller
) -> Any:
    """Return the model's config: what it comes with, what the speller decides where it comes with
    nothing, the user's keys."""
    base: dict[str, Any] = {} if folder is None else read_config(folder)
    kind = config_class(name, base)
    if kind.model_type not in (WHISPER, *CTC):
        raise ConfigError(
            f"model.hf={name} is a {kind.model_type}, which cannot be trained to recognise speech"
            f" here\nhint: use {WHISPER}, or one of {', '.join(CTC)}"
        )
    ours = {} if kind.model_type == WHISPER else dict(SPEECH_DEFAULTS)
    if folder is None:
        ours |= _ids_of(speller)
    return build_config(kind, {**ours, **given}, base)


def _ids_of(speller: Speller) -> dict[str, Any]:
    """Return the keys of a config that depend on how words are spelled."""
    if isinstance(speller, LetterSpeller):
        return {"vocab_size": speller.num_ids, "pad_token_id": speller.blank_id}
    assert isinstance(speller, WhisperSpeller)
    end = {f"{kind}_token_id": speller.end_id for kind in ("bos", "eos", "pad")}
    return {**end, "decoder_start_token_id": speller.prompt[0], "begin_suppress_tokens": []}


def model_kind(name: str, folder: Path | None) -> str:
    """Return the model_type, as transformers calls it."""
    return str(name if folder is None else read_config(folder).get("model_type", name))


def build_asr(known: Any, settings: Any, impl: str, folder: Path | None = None) -> nn.Module:
    """Build the model on torch's default device, its base loaded from `folder` or random, with the
    adapters that `settings`, the `model` section, asks for. What is not trained is frozen."""
    model = build_from_config(AUTO.get(known.model_type, "AutoModelForCTC"), known, impl)
    is_meta = torch.get_default_device().type == "meta"
    if folder is not None and not is_meta:
        load_asr(model, folder, impl)
    if settings.lora_rank == "off":
        return model
    if settings.base == "nf4":
        pack_base(model)
    add_adapters(model, settings)
    if known.model_type != WHISPER:
        model.get_submodule("lm_head").requires_grad_(True)  # no base has learned these letters
    keep_base(model, settings.base)
    if settings.adapter and not is_meta:
        load_adapter(model, Path(settings.adapter).expanduser())
    return model


def load_asr(model: nn.Module, folder: Path, impl: str) -> None:
    """Give the model the weights of a folder, of safetensors files alone."""
    load_encoder(model, folder, impl, spare=(*SPARE, *HEAD, "proj_out."))


def add_teacher(model: nn.Module, known: Any, impl: str, folder: Path) -> None:
    """Put a second Whisper beside the model, which is never trained."""
    teacher = build_from_config(AUTO[WHISPER], known, impl)
    if torch.get_default_device().type != "meta":
        load_asr(teacher, folder, impl)
    model.add_module(TEACHER, teacher.requires_grad_(False).eval())


def window_samples(known: Any) -> int | None:
    """Return how many samples Whisper hears at once, filled up with silence; None of CTC, which
    hears what there is."""
    if known.model_type != WHISPER:
        return None
    return int(known.max_source_positions * FRAMES_PER_POSITION * HOP)


def check_asr(where: str, given: Mapping[str, Any], known: Any) -> Iterator[Finding]:
    """Yield what is wrong with the keys of the model's config."""
    for finding in check_keys(given, type(known)):
        yield finding.model_copy(update={"where": f"{where}.{finding.where.rpartition('.')[2]}"})
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(known, key, 0.0):
            yield Finding.error(
                f"{where}.{key}",
                f"{getattr(known, key):g}: ranks would leave out different layers, and wait"
                " for each other",
                hint=f"set {where}.{key}=0; dropout inside the layers is free",
            )
    for key in ("apply_spec_augment", "mask_time_prob"):
        if known.model_type == WHISPER and getattr(known, key, 0) and key in given:
            yield Finding.error(
                f"{where}.{key}",
                "SpecAugment is drawn by the loaders, from the seed and the place in the run",
                hint="set data.spec_time_masks and data.spec_mel_masks instead",
            )
