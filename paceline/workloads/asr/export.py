"""Exports a recogniser: Whisper or CTC, whole or its adapters, with its processor.

whole      model.safetensors, config.json, generation_config.json, processor
adapters   adapter_model.safetensors and adapter_config.json, which names the base and its hash
graphs     encoder_model.onnx and decoder_model.onnx, by the names that Optimum has for them;
           of CTC model.onnx
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.logmel import RATE
from paceline.errors import ConfigError, DataError
from paceline.workloads.asr.adapter_part import AdapterPart
from paceline.workloads.asr.decoding import frame_mask
from paceline.workloads.asr.lora import base_hash as hash_base
from paceline.workloads.asr.lora import merge_adapters
from paceline.workloads.asr.model import TEACHER, window_samples
from paceline.workloads.asr.texts import TASKS, LetterSpeller, Speller, WhisperSpeller
from paceline.workloads.exporting import Exported, ExportRequest, Graph, Models, Outputs
from paceline.workloads.hf.model import require_extra
from paceline.workloads.hf.parts import TransformersPart

NO_TIMES, FIRST_TIME = "<|notimestamps|>", "<|0.00|>"
GENERATION = "generation_config.json"
USAGE = """\
from transformers import pipeline

recognise = pipeline("automatic-speech-recognition", "FOLDER")
print(recognise({"raw": waveform, "sampling_rate": 16000})["text"])     # an array of one channel
"""
ADAPTER_USAGE = """\
from peft import PeftModel
from transformers import {kind}

base = {kind}.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "FOLDER")
"""


def export_asr(
    request: ExportRequest, speller: Speller, base: Path | None, base_hash: str
) -> Exported:
    """Hand out a run's model. `base` is the folder that its first weights came from, if any."""
    model: Any = request.model.float()  # a base that was kept in bf16 has room for its sums again
    inputs = _inputs(model, request.batch)
    model.__dict__.pop("rules", None)
    if hasattr(model, TEACHER):
        delattr(model, TEACHER)
    with torch.no_grad():
        wanted = _logits(model, inputs)
    has_adapters = bool(getattr(model, "peft_config", None))
    if has_adapters and request.merge:
        merge_adapters(model)
        del model.peft_config
    is_adapter = has_adapters and not request.merge
    if base is not None and (is_adapter or request.config.checkpoint.weights == "trained"):
        _require_same_base(base, base_hash)
    _set_generation(model, speller, base)
    remarks = []
    if request.merge and not has_adapters:
        remarks.append("--merge changed nothing: the run trained no adapters")

    def graphs(models: Models) -> list[Graph]:
        if is_adapter:
            raise ConfigError("a graph of ONNX has no adapters\nhint: --merge adds them to it")
        return _graphs(models[""], inputs)

    about = {} if base is None else {"base_model": base.name}
    kind = type(model).__name__
    return Exported(
        parts={"": _adapter(request, base, base_hash) if is_adapter else TransformersPart(model)},
        wanted=wanted,
        replay=lambda models: _replay(models[""], inputs),
        graphs=graphs,
        write_beside=lambda folder: _write_processor(model.config, speller, folder),
        library="peft" if is_adapter else "transformers",
        task="automatic-speech-recognition",
        usage=ADAPTER_USAGE.format(kind=kind, base=base) if is_adapter else USAGE,
        about={**about, "base_hash": base_hash, "is_adapter": is_adapter},
        remarks=remarks,
    )


def _inputs(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the library's inputs, by its names: real samples, as the run's data made them."""
    if window_samples(model.config) is None:
        waves = batch["waveforms"]
        mask = frame_mask(batch["num_samples"], waves.shape[1])
        return {"input_values": waves, "attention_mask": mask}
    features = model.rules.features(batch)
    return {"input_features": features, "decoder_input_ids": batch["inputs"]}


def _logits(model: Any, inputs: dict[str, Tensor]) -> Outputs:
    more = {"use_cache": False} if "decoder_input_ids" in inputs else {}
    return {"logits": model(**inputs, **more).logits}


def _replay(model: Any, inputs: dict[str, Tensor]) -> Outputs:
    with torch.no_grad():
        return _logits(model, inputs)


def _adapter(request: ExportRequest, base: Path | None, base_hash: str) -> AdapterPart:
    if base is None:
        raise ConfigError(
            "the adapters of this run stand on random weights, which are in no file of their own\n"
            "hint: --merge writes both together"
        )
    is_packed = request.config.model.base == "nf4"
    return AdapterPart(request.model, base, base_hash, is_packed)


def _require_same_base(base: Path, kept: str) -> None:
    """Refuse a folder that has other weights in it than those that the run began with."""
    found = hash_base(base, {}, 0)
    if found != kept:
        raise DataError(
            f"{base} is not the model that the adapters were trained on: {found}, and that one was"
            f" {kept}\nhint: bring it back; --merge needs it only where checkpoints have trained"
            " weights alone"
        )


def _set_generation(model: Any, speller: Speller, base: Path | None) -> None:
    """Tell the library how Whisper is asked: which ids mean languages, tasks and no times. A base
    that came from a folder says it itself."""
    if isinstance(speller, LetterSpeller):
        return
    library = require_extra()
    if base is not None and (base / GENERATION).is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(base)
    else:
        model.generation_config = library.GenerationConfig(**_asked_ids(model.config, speller))
    prompt = speller.library.convert_ids_to_tokens(speller.prompt)
    said = [word.strip("<|>") for word in prompt]
    if getattr(model.generation_config, "is_multilingual", False) and len(said) > 2:
        model.generation_config.language, model.generation_config.task = said[1], said[2]


def _asked_ids(config: Any, speller: WhisperSpeller) -> dict[str, Any]:
    known = speller.library.get_vocab()
    codes = require_extra("transformers.models.whisper.tokenization_whisper").LANGUAGES
    languages = {f"<|{code}|>": known[f"<|{code}|>"] for code in codes if f"<|{code}|>" in known}
    return {
        "decoder_start_token_id": speller.prompt[0],
        "bos_token_id": speller.end_id,
        "eos_token_id": speller.end_id,
        "pad_token_id": speller.end_id,
        "no_timestamps_token_id": known[NO_TIMES],
        "is_multilingual": bool(languages),
        "lang_to_id": languages,
        "task_to_id": {word.strip("<|>"): known[word] for word in TASKS if word in known},
        "return_timestamps": False,
        # Rows of the table that no token has. The library takes ids behind <|notimestamps|> for
        # times, and goes over the same audio for ever where one of them is written.
        "suppress_tokens": list(range(speller.num_ids, config.vocab_size)) or None,
        "max_length": config.max_target_positions,
    }


def _graphs(model: Any, inputs: dict[str, Tensor]) -> list[Graph]:
    if "input_values" in inputs:
        axes = {0: "batch", 1: "samples"}

        def letters(model: Any, waves: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
            return (model(waves, attention_mask=mask).logits,)

        return [
            Graph("model.onnx", model, letters, inputs, ("logits",), dict.fromkeys(inputs, axes))
        ]

    def encode(encoder: Any, features: Tensor) -> tuple[Tensor, ...]:
        return (encoder(features).last_hidden_state,)

    def decode(model: Any, ids: Tensor, heard: Tensor) -> tuple[Tensor, ...]:
        return (model(decoder_input_ids=ids, encoder_outputs=(heard,), use_cache=False).logits,)

    features, ids = inputs["input_features"], inputs["decoder_input_ids"]
    encoder = model.get_encoder()
    with torch.no_grad():
        heard = encoder(features).last_hidden_state
    return [
        Graph(
            file="encoder_model.onnx",
            model=encoder,
            function=encode,
            inputs={"input_features": features},
            outputs=("last_hidden_state",),
            axes={"input_features": {0: "batch"}},
        ),
        Graph(
            file="decoder_model.onnx",
            model=model,
            function=decode,
            inputs={"input_ids": ids, "encoder_hidden_states": heard},
            outputs=("logits",),
            axes={"input_ids": {0: "batch", 1: "tokens"}, "encoder_hidden_states": {0: "batch"}},
        ),
    ]


def _write_processor(config: Any, speller: Speller, folder: Path) -> None:
    """Write how audio becomes inputs, and ids become text."""
    library, window = require_extra(), window_samples(config)
    if window is None:
        extractor = library.Wav2Vec2FeatureExtractor(
            feature_size=1, sampling_rate=RATE, do_normalize=True, return_attention_mask=True
        )
    elif window % RATE:
        raise DataError(
            f"the model hears {window / RATE:g} s at once, and transformers' extractor takes whole"
            " seconds\nhint: model.hf_config.max_source_positions is 50 for each second"
        )
    else:
        extractor = library.WhisperFeatureExtractor(
            feature_size=config.num_mel_bins, sampling_rate=RATE, chunk_length=window // RATE
        )
    speller.processor(extractor).save_pretrained(folder)
