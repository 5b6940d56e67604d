"""Finds what is wrong with the config of a recogniser before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.logmel import RATE
from paceline.errors import DataError
from paceline.records import Finding
from paceline.workloads.asr.keys import AsrModel
from paceline.workloads.asr.lora import require_adapter
from paceline.workloads.asr.model import WHISPER, build_asr, check_asr, window_samples
from paceline.workloads.hf.pretrained import choose_weights
from paceline.workloads.meta import on_meta

if TYPE_CHECKING:
    from paceline.workloads.asr.workload import SpeechRecognition


def find_problems(workload: SpeechRecognition, config: Any) -> Iterator[Finding]:
    """Yield all that is wrong, or has no effect."""
    known = workload.known(config)
    yield from check_asr("model.hf_config", config.model.hf_config, known)
    yield from _spelling_problems(workload, config.model, known)
    yield from _hearing_problems(config, known)
    yield from _adapter_problems(config)
    yield from _weight_problems(workload, config.model)
    if config.model.teacher:
        yield from _teacher_problems(workload, config.model, known)


def _spelling_problems(
    workload: SpeechRecognition, settings: AsrModel, known: Any
) -> Iterator[Finding]:
    needed = workload.speller(settings).num_ids
    if needed > known.vocab_size:
        yield Finding.error(
            "model.hf_config.vocab_size",
            f"{known.vocab_size}, and the tokenizer has {needed} tokens",
            f"set it to {needed} or more",
        )


def _hearing_problems(config: Any, known: Any) -> Iterator[Finding]:
    data = config.data
    if data.sample_rate != RATE:
        yield Finding.error(
            "data.sample_rate",
            f"{data.sample_rate} Hz, and these models hear {RATE}",
            f"set it to {RATE}; data.source is resampled to it",
        )
    window, asked = window_samples(known), data.max_batch_seconds
    if window is not None and isinstance(asked, float) and asked < window / RATE:
        yield Finding.error(
            "data.max_batch_seconds",
            f"{asked:g}, and Whisper hears {window / RATE:g} s of each utterance, silence or not",
            f"set it to a multiple of {window / RATE:g}, or use train.micro_batch_size",
        )
    if known.model_type != WHISPER and data.features == "device":
        yield Finding.error(
            "data.features",
            f"device: {known.model_type} hears waveforms, not log-mel features",
            "take it out",
        )
    if known.model_type != WHISPER and data.spec_mel_masks:
        yield Finding.error(
            "data.spec_mel_masks",
            f"{known.model_type} hears waveforms, which have no mel bins to mask",
            "use data.spec_time_masks",
        )


def _adapter_problems(config: Any) -> Iterator[Finding]:
    settings, mode = config.model, config.precision.mode
    if settings.lora_rank == "off":
        for key in ("base", "adapter"):
            if getattr(settings, key) != AsrModel.model_fields[key].default:
                yield Finding.error(
                    f"model.{key}",
                    f"{getattr(settings, key)}, and there are no adapters: model.lora_rank is off",
                    "set model.lora_rank, such as 16, or take it out",
                )
        return
    if settings.base == "bf16" and mode != "bf16":
        yield Finding.error(
            "model.base",
            f"bf16, and precision.mode is {mode}: its products are of bf16 numbers",
            "set precision.mode=bf16, or model.base=fp32",
        )

    if settings.base == "nf4" and config.checkpoint.weights == "all":
        yield Finding.error(
            "checkpoint.weights",
            "all, and model.base=nf4 is packed by bitsandbytes, for one kind of device",
            "set checkpoint.weights=trained: the base is packed again from its files",
        )


def _weight_problems(workload: SpeechRecognition, settings: AsrModel) -> Iterator[Finding]:
    """Look at a folder's weights while planning; those of the hub are looked at when they are
    here."""
    folder = workload.folder(settings)
    if settings.weights == "load" and folder is None:
        yield Finding.error(
            "model.weights",
            f"load was asked for, and {settings.hf} is an architecture without weights",
            "give model.hf a folder or a name on the hub, or set model.weights=random",
        )
    if settings.weights == "random" or not Path(settings.hf).expanduser().is_dir():
        return
    try:
        choose_weights(settings.weights, settings.hf, folder)
    except DataError as error:
        what, _, hint = str(error).partition("\nhint: ")
        yield Finding.error("model.hf", what, hint, cause="data")


def _teacher_problems(
    workload: SpeechRecognition, settings: AsrModel, known: Any
) -> Iterator[Finding]:
    """A teacher is asked about the same features and tokens, so it must know both."""
    teacher = workload.teacher(settings)
    if known.model_type != WHISPER or teacher.model_type != WHISPER:
        yield Finding.error(
            "model.teacher",
            f"{teacher.model_type} cannot teach {known.model_type} token by token",
            "distillation is between two Whispers",
        )
        return
    for key, what in (
        ("vocab_size", "tokens"),
        ("num_mel_bins", "mel bins"),
        ("max_source_positions", "positions of audio"),
    ):
        ours, theirs = getattr(known, key), getattr(teacher, key)
        if ours != theirs:
            yield Finding.error(
                "model.teacher",
                f"{settings.teacher} has {theirs} {what}, and the model that learns has {ours}",
                f"take a teacher with {ours}",
            )


def require_adapter_fits(workload: SpeechRecognition, config: Any, base: str) -> None:
    """Refuse `model.adapter` where it is of another base or shape, before ranks load it."""
    settings = config.model
    with on_meta():
        model = build_asr(workload.known(config), settings, config.attention.impl)
    require_adapter(model, Path(settings.adapter).expanduser(), base)
