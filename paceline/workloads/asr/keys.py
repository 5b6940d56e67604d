"""The keys of `workload=asr`: the sections `model`, `data` and `loss`. No torch is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.section import Count, Positive, Seconds, Section
from paceline.data.manifest import AudioData

Share = Annotated[float, Field(ge=0, le=1)]


class AsrModel(Section):
    """The `model` section: one model of transformers, whole or with adapters."""

    hf: str = Field(
        "whisper",
        min_length=1,
        description="A folder, a name on the Hugging Face hub, or an architecture, which has no"
        " weights: whisper; wav2vec2 and its kind are trained by CTC.",
    )
    hf_config: dict[str, Any] = Field(
        {}, description="Keys of the model's own config, over those that it comes with."
    )
    weights: Literal["auto", "load", "random"] = Field(
        "auto", description="auto: load where there are safetensors files, else random."
    )
    language: str = Field(
        "english", min_length=1, description="Whisper: of the transcripts; a name or a code."
    )
    task: Literal["transcribe", "translate"] = Field(
        "transcribe", description="Whisper: translate is into English."
    )
    lora_rank: Literal["off"] | Positive = Field(
        "off",
        description="Train adapters of this rank (LoRA, by peft) and nothing else; off: the whole"
        " model.",
    )
    lora_alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="What adapters add is multiplied with lora_alpha / lora_rank."
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="Before the adapters."
    )
    lora_targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "out_proj"],
        min_length=1,
        description="The linear layers that get one, by the last part of their names.",
    )
    base: Literal["fp32", "bf16", "nf4"] = Field(
        "fp32",
        description="How linear layers below adapters are kept, which are not trained. bf16: with"
        " precision.mode=bf16. nf4: in 4 bits (QLoRA, by bitsandbytes).",
    )
    adapter: str = Field(
        "",
        description="Begin with adapters that were trained before: a folder of peft's, of the same"
        " base model.",
    )
    teacher: str = Field(
        "",
        description="Learn what another Whisper says, too (distillation): a folder, or a name on"
        " the hub, with weights.",
    )


class AsrLoss(Section):
    """The `loss` section."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Whisper: share of the target that is spread over all tokens."
    )
    distill_weight: Share = Field(
        0.5, description="Share of the teacher in the loss; the rest is the transcript's."
    )
    distill_temperature: Annotated[float, Field(gt=0)] = Field(
        2.0, description="What both models' logits are divided by, to compare them."
    )


class AsrData(AudioData):
    """The `data` section."""

    source: str = Field(
        "",
        description="A corpus as it is: a folder of audio files, or a parquet, CSV or JSON table or"
        " a folder of them. It is prepared once, in cache_dir. Unset: root_dir is prepared.",
    )
    columns: dict[str, str] = Field(
        {}, description="Names of a table's columns: data.columns={audio: clip, text: words}."
    )
    max_files: Literal["all"] | Positive = Field(
        "all",
        description="Read only the first tables of each split, or audio files if there are none.",
    )
    cache_dir: str = Field("~/.cache/paceline", description="Where a prepared source is kept.")
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1,
        description="Share of the utterances kept apart for validation, where the corpus has none"
        " of val_splits.",
    )
    min_duration_s: Annotated[float, Field(ge=0)] = Field(
        0.5, description="Shorter utterances are left out."
    )
    max_duration_s: Literal["auto"] | Seconds = Field(
        "auto", description="Longer ones are. auto: what the model hears at once, 30 s of Whisper."
    )
    features: Literal["workers", "device"] = Field(
        "workers", description="Whisper: who computes log-mel features, loaders or the device."
    )
    spec_time_masks: Count = Field(
        0, description="SpecAugment: how many pieces of time are masked in each sample."
    )
    spec_time_width_s: Seconds = Field(1.0, description="The longest of them.")
    spec_mel_masks: Count = Field(
        0, description="SpecAugment: how many bands of the spectrum are masked. Whisper."
    )
    spec_mel_width: Positive = Field(27, description="The most bins of one.")
    max_batch_seconds: Literal["off", "auto"] | Seconds = Field(
        "off",
        description="Seconds of audio in a microbatch, padding too, in place of"
        " train.micro_batch_size. auto: the most that fits into the device's memory, found by trial"
        " before training.",
    )
    eval_max_tokens: Positive = Field(
        225, description="Whisper: the most tokens that an evaluation writes for an utterance."
    )
    eval_beams: Positive = Field(1, description="Whisper: beams of the search; 1 is greedy.")
    num_predictions: Count = Field(
        5, description="Predictions of an evaluation that are shown in the report and the log."
    )

    @model_validator(mode="before")
    @classmethod
    def _seconds_are_lengths(cls, given: Any) -> Any:
        """They are data.batch_length, by another name."""
        seconds = given.get("max_batch_seconds") if isinstance(given, dict) else None
        if seconds == "auto":
            return {**given, "batch_by": "length", "batch_length": "auto"}
        if not isinstance(seconds, int | float) or isinstance(seconds, bool):
            return given
        return {**given, "batch_by": "length", "batch_length": float(seconds)}

    @model_validator(mode="after")
    def _limits_are_a_range(self) -> Self:
        if self.max_duration_s != "auto" and self.min_duration_s > self.max_duration_s:
            raise ValueError(
                f"min_duration_s {self.min_duration_s:g} is more than max_duration_s"
                f" {self.max_duration_s:g}"
            )
        return self
