"""Speech-text contrastive training: wav2vec2 against a frozen text encoder, symmetric InfoNCE.

paceline train limit_longest_1-3_stage1_bf16 data.root_dir=speech_16k
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.section import Positive, Seconds, Section
from paceline.data.base import Dataset
from paceline.data.manifest import AudioData, Utterance, find_manifest, read_manifest
from paceline.errors import DataError
from paceline.records import Finding
from paceline.records.words import count
from paceline.workloads.base import Split, Workload, prepared_path

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.data.spelling import Spelling
    from paceline.metrics import Items
    from paceline.workloads.exporting import Exported, ExportRequest

ENCODERS = ("speech", "text")


class SpeechClipModel(Section):
    """The `model` section: two encoders of transformers."""

    speech: str = Field(
        "wav2vec2",
        min_length=1,
        description="The speech encoder: a folder, a name on the Hugging Face hub, or an"
        " architecture like wav2vec2, which has no weights.",
    )
    speech_config: dict[str, Any] = Field(
        {}, description="Keys of its own config, over those that it comes with."
    )
    text: str = Field(
        "bert", min_length=1, description="The text encoder, which is not trained: as model.speech."
    )
    text_config: dict[str, Any] = Field({}, description="Keys of its config.")
    weights: Literal["auto", "load", "random"] = Field(
        "auto", description="auto: load where there are safetensors files, else random."
    )
    freeze_features: Literal["auto"] | bool = Field(
        "auto",
        description="Do not train the convolutions of the speech encoder. auto: where its weights"
        " are loaded.",
    )
    projection_dim: Literal["text"] | Positive = Field(
        "text",
        description="Width of the common space. text: the text encoder's, whose vector stays as it"
        " is; a number: both have a linear layer that is trained.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="In the attention pooling."
    )
    scale: Annotated[float, Field(ge=1)] = Field(
        1 / 0.07, description="What cosines are multiplied with at first; it is learned."
    )
    max_scale: Annotated[float, Field(ge=1)] = Field(100.0, description="The most it may become.")
    warm_start: str = Field(
        "",
        description="Begin with what another run has trained: a folder of `paceline checkpoints"
        " convert`.",
    )


class SpeechClipLoss(Section):
    """The `loss` section."""

    negatives: Literal["local", "global"] = Field(
        "local",
        description="What a pair is told apart from. local: the others of its microbatch. global:"
        " those of all ranks too, so that only microbatch x ranks decides.",
    )


class SpeechClipData(AudioData):
    """The `data` section."""

    tokenizer: str = Field(
        "auto",
        description="bytes, a tokenizer.json, a folder that holds a tokenizer, or ORG/NAME on the"
        " hub. auto: that of the text encoder's folder, else bytes.",
    )
    cut_min_s: Seconds = Field(1.0, description="The shortest random piece to train on.")
    cut_max_s: Literal["off"] | Seconds = Field(
        3.0,
        description="The longest; utterances that are shorter are taken whole. off: all are.",
    )
    fixed_slice_s: Literal["off"] | Seconds = Field(
        "off", description="All pieces have this length, to measure speed."
    )
    eval_cut_s: Literal["off"] | Seconds = Field(
        "off", description="Evaluate on so much of an utterance's beginning, and its words."
    )

    @model_validator(mode="after")
    def _cut_is_one(self) -> Self:
        if self.cut_max_s != "off" and self.cut_min_s > self.cut_max_s:
            raise ValueError(
                f"cut_min_s {self.cut_min_s:g} is more than cut_max_s {self.cut_max_s:g}"
            )
        return self


class SpeechText(Workload):
    Model = SpeechClipModel
    Data = SpeechClipData
    Loss = SpeechClipLoss
    unit = "samples"
    attention = "full"
    own_attention = frozenset({"eager"})
    preloads = ("paceline.workloads.hf.preloaded",)
    no_pipeline = (
        "a pipeline cuts each batch into parts, and a pair is told apart from the whole batch"
    )

    def build_model(self, config: Any) -> nn.Module:
        import torch

        from paceline.workloads.speech_clip.model import (
            build_speech_clip,
            load_encoder,
            warm_start,
        )

        settings, impl = config.model, config.attention.impl
        model = build_speech_clip(*self._configs(config), settings, impl)
        model.negatives = config.loss.negatives
        by_length = config.data.batch_by == "length"
        model.capacity = None if by_length else config.train.micro_batch_size
        is_loaded = self._sources(config)
        if settings.freeze_features is True or (
            settings.freeze_features == "auto" and is_loaded["speech"]
        ):
            model.speech.feature_extractor.requires_grad_(False)
        if torch.get_default_device().type == "meta":
            return model
        for name in ENCODERS:
            if self.prepared.get(f"{name}_weights") == "load":
                folder = prepared_path(self.prepared, f"{name}_folder")
                load_encoder(getattr(model, name), folder, impl)
        if settings.warm_start:
            warm_start(model, prepared_path(self.prepared, "warm_start"))
        return model

    def head_dim(self, config: Any) -> int:
        """Return the head's width of the speech encoder, which is the one that is trained."""
        known = self._configs(config)[0]
        return int(known.hidden_size // known.num_attention_heads)

    def build_data(self, config: Any, split: Split) -> Dataset:
        from paceline.data.audio import SpeechClips
        from paceline.data.speech_pairs import SpeechPairs

        data = config.data
        found, _ = self._utterances(config, split)
        root = Path(data.root_dir).expanduser()
        clips = SpeechClips(root, found, data.sample_rate)
        spelling = self._spelling(config)
        return SpeechPairs(clips, spelling, _pieces(data, split), config.train.seed)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, ...]:
        from paceline.workloads.speech_clip.negatives import loss_of

        speech_BD, text_BD = model(batch)
        total, num_right = loss_of(model, speech_BD, text_BD, self.waiting_for_ranks)
        size, waves = len(speech_BD), batch["waveforms"]
        beside = {
            "accuracy": (num_right, size),
            "scale": (model.scale.detach() * size, size),  # type: ignore[operator]
            "padding": (waves.numel() - batch["num_samples"].sum(), waves.numel()),
        }
        return total, size, beside

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the vectors, for recall is a matter of the whole split."""
        from paceline.metrics import Items

        speech_BD, text_BD = model(batch)
        size = len(speech_BD)
        scale = (model.scale * size, size)  # type: ignore[operator]
        found: dict[str, Items | tuple[Any, int]] = {
            "speech": Items(speech_BD),
            "text": Items(text_BD),
            "scale": scale,
        }
        return found

    def metrics(self, found: Any) -> dict[str, float]:
        from paceline.workloads.speech_clip.negatives import retrieval

        return retrieval(found["speech"], found["text"], found["scale"])

    def export(self, request: ExportRequest) -> Exported:
        from paceline.workloads.speech_clip.export import export_speech_clip

        spelling = self._spelling(request.config)
        return export_speech_clip(request, spelling, request.config.data.sample_rate)

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Find the manifest, the encoders' files and the weights to begin with; say what of the
        corpus cannot be used."""
        from paceline.workloads.hf.pretrained import choose_weights, find_folder

        settings, prepared = config.model, dict[str, Any]()
        prepared["manifest"] = str(find_manifest(config.data, os.environ))
        for name in ENCODERS:
            asked = getattr(settings, name)
            folder, source = choose_weights(settings.weights, asked, find_folder(asked))
            prepared[f"{name}_weights"] = source
            if folder is not None:
                prepared[f"{name}_folder"] = str(folder)
            if source == "load":
                say(f"the weights of the {name} encoder are loaded from {folder}")
            elif name == "text":
                say(
                    "the text encoder has random weights and is not trained: what it says of words"
                    " is chance (model.text=google-bert/bert-base-uncased, or a folder)"
                )
        if settings.warm_start:
            prepared["warm_start"] = str(_weights_file(settings.warm_start))
        self.prepared = prepared
        for split in ("train", "val") if config.train.eval_every != "off" else ("train",):
            found, left_out = self._utterances(config, split)
            prepared[f"{split}_utterances"] = len(found)
            hours = sum(row.duration_s for row in found) / 3600
            say(f"{split}: {count(len(found), 'utterance')}, {hours:.2f} hours{left_out}")
        return prepared

    def problems(self, config: Any) -> Sequence[Finding]:
        from paceline.workloads.speech_clip.model import check_encoder

        speech, text = self._configs(config)
        settings = config.model
        return (
            *check_encoder("model.speech_config", settings.speech_config, speech),
            *check_encoder("model.text_config", settings.text_config, text),
            *self._fit_problems(config, speech, text),
        )

    def _fit_problems(self, config: Any, speech: Any, text: Any) -> Iterator[Finding]:
        from paceline.data.tokenizer import is_local
        from paceline.workloads.speech_clip.model import fewest_samples

        data, where = config.data, "data.cut_min_s"
        shortest = data.cut_min_s
        if data.fixed_slice_s != "off":
            shortest, where = data.fixed_slice_s, "data.fixed_slice_s"
        if shortest * data.sample_rate < fewest_samples(speech):
            what = f"{shortest:g} s, and a frame of the speech encoder needs"
            what += f" {fewest_samples(speech) / data.sample_rate:g} s"
            yield Finding.error(where, what, hint="make it longer")
        needed = self._spelling(config).num_ids if is_local(data.tokenizer) else 0
        if needed > text.vocab_size:
            yield Finding.error(
                "model.text_config.vocab_size",
                f"{text.vocab_size}, and the tokenizer has {needed} tokens",
                hint=f"set it to {needed} or more, or choose another data.tokenizer",
            )

    def _utterances(self, config: Any, split: Split) -> tuple[list[Utterance], str]:
        """Return what of a split can be used, and in words how much cannot."""
        from paceline.workloads.speech_clip.model import fewest_samples

        data = config.data
        path = prepared_path(self.prepared, "manifest")
        splits = data.train_splits if split == "train" else data.val_splits
        rows = read_manifest(path, data.sample_rate, splits)
        fewest = fewest_samples(self._configs(config)[0])
        long = [row for row in rows if row.num_samples >= fewest]
        found = [row for row in long if row.transcript]
        if not found:
            raise DataError(
                f"none of the {len(rows)} utterances of {', '.join(splits)} in {path} has a"
                " transcript and makes a frame\n"
                "hint: paceline prepare speech reads transcripts into the manifest"
            )
        reasons = [(len(rows) - len(long), "shorter than a frame")]
        reasons += [(len(long) - len(found), "without a transcript")]
        told = [f"{number} {why}" for number, why in reasons if number]
        return found, f"; left out: {', '.join(told)}" if told else ""

    def _configs(self, config: Any) -> tuple[Any, Any]:
        """Return the configs of both encoders."""
        from paceline.workloads.hf.model import build_config
        from paceline.workloads.hf.pretrained import config_class, read_config
        from paceline.workloads.speech_clip.model import speech_config

        settings = config.model
        found = []
        for name in ENCODERS:
            folder = self._folder(settings, name)
            base: dict[str, Any] = {} if folder is None else read_config(folder)
            found.append((config_class(getattr(settings, name), base), base))
        (speech, speech_base), (text, text_base) = found
        return (
            speech_config(speech, settings.speech_config, speech_base),
            build_config(text, settings.text_config, text_base),
        )

    def _sources(self, config: Any) -> dict[str, bool]:
        """Say for each encoder whether its weights are loaded; before anything is prepared, whether
        they would be."""
        from paceline.workloads.hf.pretrained import choose_weights

        settings, found = config.model, {}
        for name in ENCODERS:
            known = self.prepared.get(f"{name}_weights")
            folder = self._folder(settings, name)
            if known is None and folder is not None:
                _, known = choose_weights(settings.weights, getattr(settings, name), folder)
            found[name] = known == "load"
        return found

    def _folder(self, settings: SpeechClipModel, name: str) -> Path | None:
        from paceline.workloads.hf.pretrained import find_folder

        if f"{name}_weights" in self.prepared:
            is_named = f"{name}_folder" in self.prepared
            return prepared_path(self.prepared, f"{name}_folder") if is_named else None
        return find_folder(getattr(settings, name))

    def _spelling(self, config: Any) -> Spelling:
        from paceline.data.spelling import find_spelling

        _, text = self._configs(config)
        folder = self._folder(config.model, "text")
        return find_spelling(config.data.tokenizer, text.max_position_embeddings, folder)


def _pieces(data: SpeechClipData, split: Split) -> Any:
    """Return which part of an utterance a split takes."""
    from paceline.data.audio import Cut
    from paceline.data.speech_pairs import Pieces

    if split == "val":
        return Pieces(head_s=None if data.eval_cut_s == "off" else data.eval_cut_s)
    by_length = data.num_buckets is not None
    if data.fixed_slice_s != "off":
        return Pieces(Cut(data.fixed_slice_s, data.fixed_slice_s), by_length=by_length)
    cut = None if data.cut_max_s == "off" else Cut(data.cut_min_s, data.cut_max_s)
    return Pieces(cut, by_length=by_length)


def _weights_file(asked: str) -> Path:
    from paceline.workloads.hf.pretrained import SINGLE

    path = Path(asked).expanduser()
    path = path / SINGLE if path.is_dir() else path
    if not path.is_file() or path.suffix != ".safetensors":
        raise DataError(
            f"model.warm_start={asked} has no {SINGLE}\n"
            "hint: paceline checkpoints convert RUN_DIR best --out FOLDER writes one"
        )
    return path.resolve()
