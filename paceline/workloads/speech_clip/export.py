"""Exports a speech encoder and its text encoder.

    speech/, text/        models of transformers, each with what its inputs are made by
    head.safetensors      from their outputs to the common space: pooling, projections, scale
    speech.onnx           waveforms and their mask to vectors of length 1; text.onnx the same of ids

`load_speech_clip(folder)` puts the parts together again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.spelling import Spelling
from paceline.records.base import load_map
from paceline.records.files import write_atomic
from paceline.workloads.exporting import (
    Exported,
    ExportRequest,
    Graph,
    Models,
    Outputs,
    first_mask,
)
from paceline.workloads.hf.model import require_extra
from paceline.workloads.hf.parts import ModulePart, TransformersPart
from paceline.workloads.hf.spelling import byte_tokenizer, save_definition
from paceline.workloads.speech_clip.model import SpeechClip

HEAD = "head"
USAGE = """\
from paceline.workloads.speech_clip.export import load_speech_clip
from transformers import AutoFeatureExtractor, AutoTokenizer

model = load_speech_clip("FOLDER")
extract = AutoFeatureExtractor.from_pretrained("FOLDER/speech")
tokenizer = AutoTokenizer.from_pretrained("FOLDER/text")
heard = extract(waveform, sampling_rate=RATE, return_tensors="pt")     # one channel
read = tokenizer("words that were said", return_tensors="pt")
speech = model.embed_speech(heard.input_values, heard.attention_mask)
text = model.embed_text(read.input_ids, read.attention_mask)
print(speech @ text.T)                                                 # a cosine
"""


class Head(nn.Module):
    """What stands behind the two encoders. It has SpeechClip's names."""

    def __init__(self, model: SpeechClip) -> None:
        super().__init__()
        self.pool, self.project_speech = model.pool, model.project_speech
        self.project_text, self.log_scale = model.project_text, model.log_scale


def export_speech_clip(request: ExportRequest, spelling: Spelling, sample_rate: int) -> Exported:
    model: Any = request.model
    batch = {name: value for name, value in request.batch.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        speech_BD, text_BD = model(batch)
    width = None if model.project_text is None else model.project_text.out_features

    def replay(models: Models) -> Outputs:
        with torch.no_grad():
            speech, text = _together(models, width)(batch)
        return {"speech": speech, "text": text}

    def write_beside(folder: Path) -> None:
        body = {"model_type": "paceline-speech_clip", "projection_dim": width}
        write_atomic(folder / "config.json", json.dumps(body, indent=2) + "\n")
        _write_extractor(folder / "speech", sample_rate)
        _write_spelling(folder / "text", spelling)

    return Exported(
        parts={
            "speech": TransformersPart(model.speech),
            "text": TransformersPart(model.text),
            "": ModulePart(Head(model), HEAD),
        },
        wanted={"speech": speech_BD, "text": text_BD},
        replay=replay,
        graphs=lambda models: _graphs(_together(models, width), batch),
        write_beside=write_beside,
        library="transformers",
        task="feature-extraction",
        usage=USAGE.replace("RATE", str(sample_rate)),
    )


def load_speech_clip(folder: str | Path) -> SpeechClip:
    """Return the model of a folder that `paceline export` has written as safetensors."""
    place = Path(folder)
    width = load_map(place / "config.json").get("projection_dim")
    library = require_extra()
    encoders = {
        name: library.AutoModel.from_pretrained(
            place / name, local_files_only=True, use_safetensors=True
        )
        for name in ("speech", "text")
    }
    model = SpeechClip(encoders["speech"], encoders["text"], width, dropout=0.0)
    state = require_extra("safetensors.torch").load_file(place / f"{HEAD}.safetensors")
    Head(model).load_state_dict(state)
    return model.eval()


def _together(models: Models, width: int | None) -> SpeechClip:
    head: Any = models[""]
    model = SpeechClip(models["speech"], models["text"], width, dropout=0.0)
    model.pool, model.project_speech = head.pool, head.project_speech
    model.project_text, model.log_scale = head.project_text, head.log_scale
    return model.eval()


def _graphs(model: SpeechClip, batch: dict[str, Tensor]) -> list[Graph]:
    heard = {"input_values": batch["waveforms"]}
    heard["attention_mask"] = first_mask(batch["num_samples"], batch["waveforms"].shape[1])
    read = {"input_ids": batch["tokens"]}
    read["attention_mask"] = first_mask(batch["num_tokens"], batch["tokens"].shape[1])
    return [
        _graph("speech", model, SpeechClip.embed_speech, heard, "samples"),
        _graph("text", model, SpeechClip.embed_text, read, "tokens"),
    ]


def _graph(
    name: str,
    model: SpeechClip,
    embed: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    axis: str,
) -> Graph:
    return Graph(
        file=f"{name}.onnx",
        model=model,
        function=lambda *given: (embed(*given),),
        inputs=inputs,
        outputs=(f"{name}_vectors",),
        axes=dict.fromkeys(inputs, {0: "batch", 1: axis}),
    )


def _write_extractor(folder: Path, sample_rate: int) -> None:
    """Write how a waveform becomes inputs: mean 0 and variance 1, zeros behind the shorter ones."""
    kind = require_extra().Wav2Vec2FeatureExtractor
    kind(
        feature_size=1, sampling_rate=sample_rate, do_normalize=True, return_attention_mask=True
    ).save_pretrained(folder)


def _write_spelling(folder: Path, spelling: Spelling) -> None:
    tokenizer = spelling.tokenizer
    if tokenizer.is_bytes:
        byte_tokenizer(has_begin=True).save_pretrained(folder)
    else:
        save_definition(tokenizer.definition, tokenizer.end_id, folder)
