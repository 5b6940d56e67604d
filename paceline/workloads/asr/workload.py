"""Speech recognition: Whisper or CTC, whole or by adapters, scored by the words that it writes.

paceline train whisper_tiny_made data.root_dir=speech_16k
paceline train whisper_small_lora model.hf=openai/whisper-small data.source=my_parquet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.base import Dataset
from paceline.data.manifest import Utterance
from paceline.records import Finding
from paceline.records.words import count
from paceline.workloads.asr.keys import AsrData, AsrLoss, AsrModel
from paceline.workloads.base import Split, Workload, prepared_path

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.data.spoken import Hearing
    from paceline.workloads.asr.texts import Speller
    from paceline.workloads.exporting import Exported, ExportRequest

# In data.json: whether weights are loaded, from where, and a sum of them.
WEIGHTS, FOLDER, TEACHER_FOLDER, BASE = "hf_weights", "hf_folder", "teacher_folder", "base_hash"


@dataclass(frozen=True)
class Rules:
    """What `loss` and `evaluate` go by, which see the model and not the config: `model.rules`."""

    speller: Speller
    hearing: Hearing
    loss: AsrLoss
    data: AsrData

    def features(self, batch: dict[str, Any]) -> Tensor:
        """Return the log-mel features of a batch, made here where the loaders have not."""
        from paceline.data.spoken import mask_spans

        if "features" in batch:
            found: Tensor = batch["features"]
            return found
        assert self.hearing.extract is not None, "Whisper hears features"
        made = self.hearing.extract(batch["waveforms"])
        mask_spans(made, batch["spans"], self.hearing.masks.num_times)
        return made


class SpeechRecognition(Workload):
    Model = AsrModel
    Data = AsrData
    Loss = AsrLoss
    unit = "tokens"
    attention = "full"
    own_attention = frozenset({"eager"})
    knows_base = True
    preloads = ("paceline.workloads.hf.preloaded",)
    no_pipeline = "an encoder and a decoder that looks at all of it are not one chain of blocks"

    def build_model(self, config: Any) -> nn.Module:
        from paceline.workloads.asr.model import add_teacher, build_asr

        settings, impl = config.model, config.attention.impl
        is_loaded = self.prepared.get(WEIGHTS) == "load"
        folder = prepared_path(self.prepared, FOLDER) if is_loaded else None
        model = build_asr(self.known(config), settings, impl, folder)
        if settings.teacher:
            add_teacher(model, self.teacher(settings), impl, self._teacher_folder(settings))
        rules = Rules(self.speller(config.model), self._hearing(config), config.loss, config.data)
        model.rules = rules  # type: ignore[assignment]
        return model

    def head_dim(self, config: Any) -> int:
        known = self.known(config)
        heads = getattr(known, "encoder_attention_heads", None) or known.num_attention_heads
        return int(known.hidden_size // heads)

    def build_data(self, config: Any, split: Split) -> Dataset:
        from paceline.data.audio import SpeechClips
        from paceline.data.spoken import SpokenTexts
        from paceline.workloads.asr.corpus import ROOT

        found, _ = self._utterances(config, split)
        root, hearing = prepared_path(self.prepared, ROOT), self._hearing(config)
        clips = SpeechClips(root, found, config.data.sample_rate)
        is_masked = split == "train" and bool(hearing.masks)
        lesson = self.speller(config.model).lesson
        return SpokenTexts(clips, lesson, hearing, config.train.seed, is_masked)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, ...]:
        from paceline.workloads.asr.losses import ctc_loss, whisper_loss
        from paceline.workloads.asr.texts import LetterSpeller

        rules = _rules_of(model)
        if isinstance(rules.speller, LetterSpeller):
            return ctc_loss(model, batch, rules.speller.blank_id), self.units(batch)
        total, parts = whisper_loss(model, rules.features(batch), batch, rules.loss)
        return total, self.units(batch), parts

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the loss, and what was said with what the model writes for it, as it is and
        normalised."""
        from paceline.metrics import LOSS, Items
        from paceline.workloads.asr.decoding import write_letters, write_whisper
        from paceline.workloads.asr.losses import hear_frames
        from paceline.workloads.asr.scores import find_normaliser
        from paceline.workloads.asr.texts import LetterSpeller

        rules, data = _rules_of(model), _rules_of(model).data
        speller, normalise = rules.speller, find_normaliser(rules.speller)
        loss_sum, units, *_ = self.loss(model, batch)
        if isinstance(speller, LetterSpeller):
            rows = write_letters(*hear_frames(model, batch))
        else:
            features, most = rules.features(batch), data.eval_max_tokens
            rows = write_whisper(model, features, speller, most, data.eval_beams)
        pairs = [(said, speller.text(ids)) for said, ids in zip(batch["texts"], rows, strict=True)]
        compared = [(normalise(said), normalise(written)) for said, written in pairs]
        return {LOSS: (loss_sum, units), "pairs": Items(pairs), "compared": Items(compared)}

    def metrics(self, found: Any) -> dict[str, float]:
        from paceline.workloads.asr.scores import error_rates

        return error_rates(found["compared"])

    def shown(self, found: Any, config: Any) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = found["pairs"][: config.data.num_predictions]
        return pairs

    def export(self, request: ExportRequest) -> Exported:
        from paceline.workloads.asr.export import export_asr

        settings = request.config.model
        is_loaded = self.prepared.get(WEIGHTS) == "load"
        base = prepared_path(self.prepared, FOLDER) if is_loaded else None
        return export_asr(request, self.speller(settings), base, str(self.prepared.get(BASE, "")))

    def units_per_sample(self, config: Any) -> None:
        return None

    def units(self, batch: dict[str, Any]) -> int:
        """Count the tokens that have a loss: all of a transcript's, and Whisper's end."""
        from paceline.data.spoken import IGNORED

        return int((batch["targets"] != IGNORED).sum())

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        """Find the model's files and the corpus; say what of it cannot be used."""
        from paceline.workloads.asr.checks import require_adapter_fits
        from paceline.workloads.asr.corpus import locate_corpus
        from paceline.workloads.asr.lora import base_hash
        from paceline.workloads.hf.pretrained import choose_weights, find_folder

        settings, prepared = config.model, dict[str, Any]()
        folder, source = choose_weights(settings.weights, settings.hf, find_folder(settings.hf))
        prepared[WEIGHTS] = source
        if folder is not None:
            prepared[FOLDER] = str(folder)
        if source == "load":
            say(f"weights are loaded from {folder}")
        if settings.teacher:
            prepared[TEACHER_FOLDER] = str(self._teacher_folder(settings))
        self.prepared = prepared
        files = folder if source == "load" else None
        prepared[BASE] = base_hash(files, self.known(config).to_dict(), config.train.seed)
        if settings.adapter:
            require_adapter_fits(self, config, prepared[BASE])
        prepared |= locate_corpus(config.data, say)
        for split in ("train", "val") if config.train.eval_every != "off" else ("train",):
            found, left_out = self._utterances(config, split)
            prepared[f"{split}_utterances"] = len(found)
            hours = sum(row.duration_s for row in found) / 3600
            say(f"{split}: {count(len(found), 'utterance')}, {hours:.2f} hours{left_out}")
        return prepared

    def problems(self, config: Any) -> Sequence[Finding]:
        from paceline.workloads.asr.checks import find_problems

        return tuple(find_problems(self, config))

    def known(self, config: Any) -> Any:
        """Return transformers' config of the model."""
        from paceline.workloads.asr.model import load_asr_config

        settings = config.model
        speller, folder = self.speller(settings), self.folder(settings)
        return load_asr_config(settings.hf, settings.hf_config, folder, speller)

    def teacher(self, settings: AsrModel) -> Any:
        """Return transformers' config of the teacher."""
        from paceline.workloads.asr.model import load_asr_config

        folder = self._teacher_folder(settings)
        return load_asr_config(settings.teacher, {}, folder, self.speller(settings))

    def speller(self, settings: AsrModel) -> Speller:
        """Return what turns words into the model's ids and back."""
        from paceline.workloads.asr.model import model_kind
        from paceline.workloads.asr.texts import TOKENIZER_FILES, find_speller
        from paceline.workloads.hf.pretrained import find_files

        folder = self.folder(settings)
        kind = model_kind(settings.hf, folder)
        if folder is not None and not Path(settings.hf).expanduser().is_dir():
            folder = find_files(settings.hf, TOKENIZER_FILES)
        return find_speller(kind, folder, settings.language, settings.task)

    def folder(self, settings: AsrModel) -> Path | None:
        """Return the folder of the model: on ranks it is known; it is found again wherever a plan
        is made before anything is prepared."""
        from paceline.workloads.hf.pretrained import find_folder

        if WEIGHTS in self.prepared:
            return prepared_path(self.prepared, FOLDER) if FOLDER in self.prepared else None
        return find_folder(settings.hf)

    def _teacher_folder(self, settings: AsrModel) -> Path:
        from paceline.errors import DataError
        from paceline.workloads.hf.pretrained import choose_weights, find_folder

        if TEACHER_FOLDER in self.prepared:
            return prepared_path(self.prepared, TEACHER_FOLDER)
        folder, _ = choose_weights("load", settings.teacher, find_folder(settings.teacher))
        if folder is None:
            raise DataError(
                f"model.teacher={settings.teacher} is an architecture, and a teacher needs weights"
                "\nhint: give a folder, or a name on the hub"
            )
        return folder

    def _hearing(self, config: Any) -> Hearing:
        from paceline.data.logmel import HOP, LogMel
        from paceline.data.spoken import Hearing, Masks
        from paceline.workloads.asr.model import window_samples

        data, known = config.data, self.known(config)
        frames = round(data.spec_time_width_s * data.sample_rate / HOP)
        masks = Masks(data.spec_time_masks, frames, data.spec_mel_masks, data.spec_mel_width)
        window = window_samples(known)
        extract = None if window is None else LogMel(known.num_mel_bins, window)
        return Hearing(extract, data.features == "device", masks)

    def _utterances(self, config: Any, split: Split) -> tuple[list[Utterance], str]:
        from paceline.workloads.asr.corpus import Limits, choose_utterances

        limits = Limits.of(self.known(config), self.speller(config.model), config.data)
        return choose_utterances(config.data, split, self.prepared, limits)


def _rules_of(model: nn.Module) -> Rules:
    rules: Any = model.rules
    assert isinstance(rules, Rules), "build_model has set them"
    return rules
