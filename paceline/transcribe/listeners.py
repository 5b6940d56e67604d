"""Speech models behind one interface.

    listener.cut(samples)          the pieces of a recording that it hears one by one
    listener.write(pieces)         for each piece its segments: text, with seconds in the piece

    TimedWhisper       Whisper that writes times: whole recordings, as transformers goes over them,
                       each window from the last time that it has written
    WindowedWhisper    Whisper without times: pieces cut where it is quiet, one segment each
    Letters            CTC: the same

The last two do not know who computes: torch (`ids_by_torch`, `logits_by_torch`), or onnxruntime
from what `paceline export --format onnx` wrote (`ids_by_graphs`, `logits_by_graph`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.data.extras import require_extra
from paceline.data.logmel import RATE, LogMel
from paceline.transcribe.pieces import Samples, cut_quietly
from paceline.workloads.asr.decoding import write_letters, write_whisper
from paceline.workloads.asr.model import window_samples
from paceline.workloads.asr.texts import LetterSpeller, Speller, WhisperSpeller
from paceline.workloads.exporting import first_mask
from paceline.workloads.speech_clip.model import fewest_samples, num_frames

LETTERS_S = 30  # CTC hears any length; its memory grows with the square
QUIET = 1e-7  # what Hugging Face's extractor adds to a variance
FIRST_TIME = "<|0.00|>"


class Segment(NamedTuple):
    start_s: float
    end_s: float
    text: str


class Listener(Protocol):
    @property
    def speller(self) -> Speller: ...

    def cut(self, samples: Samples) -> list[tuple[int, int]]: ...

    def write(self, pieces: Sequence[Samples]) -> list[list[Segment]]: ...


@dataclass(frozen=True)
class WindowedWhisper:
    """`decode` returns the ids that follow the prompt, for features (B, M, F)."""

    config: Any
    speller: WhisperSpeller
    decode: Callable[[Tensor], list[list[int]]]

    @property
    def extract(self) -> LogMel:
        window = window_samples(self.config)
        assert window is not None, "Whisper has a window"
        return LogMel(self.config.num_mel_bins, window)

    def cut(self, samples: Samples) -> list[tuple[int, int]]:
        return cut_quietly(samples, self.extract.window, RATE)

    def write(self, pieces: Sequence[Samples]) -> list[list[Segment]]:
        extract = self.extract
        features = torch.cat([extract(torch.from_numpy(piece)[None]) for piece in pieces])
        texts = [self.speller.text(ids) for ids in self.decode(features)]
        return [_whole(piece, text) for piece, text in zip(pieces, texts, strict=True)]


@dataclass(frozen=True)
class Letters:
    """`logits` are (B, F, V) of waveforms (B, T) and their masks."""

    config: Any
    speller: LetterSpeller
    logits: Callable[[Tensor, Tensor], Tensor]

    def cut(self, samples: Samples) -> list[tuple[int, int]]:
        return cut_quietly(samples, LETTERS_S * RATE, RATE)

    def write(self, pieces: Sequence[Samples]) -> list[list[Segment]]:
        least = fewest_samples(self.config)
        waves = [_normalised(np.pad(p, (0, max(0, least - len(p))))) for p in pieces]
        lengths = torch.tensor([len(wave) for wave in waves])
        waves_BT = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
        logits_BFV = self.logits(waves_BT, first_mask(lengths, waves_BT.shape[1]))
        rows = write_letters(logits_BFV, num_frames(self.config, lengths))
        texts = [self.speller.text(row) for row in rows]
        return [_whole(piece, text) for piece, text in zip(pieces, texts, strict=True)]


@dataclass(frozen=True)
class TimedWhisper:
    """`extractor` is transformers' own: it takes recordings of any length. `asked` has language and
    task, where the model knows them."""

    model: Any
    speller: WhisperSpeller
    extractor: Any
    asked: dict[str, str]

    def cut(self, samples: Samples) -> list[tuple[int, int]]:
        return [(0, len(samples))]

    @torch.no_grad()
    def write(self, pieces: Sequence[Samples]) -> list[list[Segment]]:
        is_short = max(map(len, pieces)) <= self.extractor.n_samples
        made = self.extractor(
            list(pieces),
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            truncation=False,
            padding="max_length" if is_short else "longest",
        )
        like = next(self.model.parameters())
        found = self.model.generate(
            made.input_features.to(like.device, like.dtype),
            attention_mask=made.attention_mask.to(like.device),
            return_timestamps=True,
            return_segments=True,
            **self.asked,
        )
        return [
            list(self._iter_segments(row, len(piece) / RATE))
            for piece, row in zip(pieces, found["segments"], strict=True)
        ]

    def _iter_segments(self, row: Sequence[dict[str, Any]], end_s: float) -> Iterator[Segment]:
        """Yield what has words in it and begins before the recording ends: its last window is
        filled up with silence, and of that the model may say anything."""
        first = self.speller.library.convert_tokens_to_ids(FIRST_TIME)
        for each in row:
            text = self.speller.text([x for x in each["tokens"].tolist() if x < first])
            if text and float(each["start"]) < end_s:
                yield Segment(float(each["start"]), min(float(each["end"]), end_s), text)


def _whole(piece: Samples, text: str) -> list[Segment]:
    """Return the one segment of a piece; none where nothing was said."""
    return [Segment(0.0, len(piece) / RATE, text)] if text else []


def _normalised(wave: Samples) -> Tensor:
    """Give a waveform mean 0 and variance 1, as training did."""
    tensor = torch.from_numpy(wave)
    return (tensor - tensor.mean()) / (tensor.var(correction=0) + QUIET).sqrt()


def ids_by_torch(model: Any, speller: WhisperSpeller) -> Callable[[Tensor], list[list[int]]]:
    like = next(model.parameters())

    def decode(features_BMF: Tensor) -> list[list[int]]:
        given = features_BMF.to(like.device, like.dtype)
        return write_whisper(model, given, speller, model.config.max_target_positions)

    return decode


def logits_by_torch(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    like = next(model.parameters())

    @torch.no_grad()
    def logits(waves_BT: Tensor, mask_BT: Tensor) -> Tensor:
        waves_BT = waves_BT.to(like.device, like.dtype)
        found: Tensor = model(waves_BT, attention_mask=mask_BT.to(like.device)).logits
        return found.float().cpu()

    return logits


def ids_by_graphs(
    folder: Path, config: Any, speller: WhisperSpeller, asked: Mapping[str, Any], num_threads: int
) -> Callable[[Tensor], list[list[int]]]:
    """Return greedy decoding by encoder and decoder. The decoder reads all ids for every token.
    `asked` is the folder's generation_config.json, which names ids that are never written."""
    encoder = open_session(folder / "encoder_model.onnx", num_threads)
    decoder = open_session(folder / "decoder_model.onnx", num_threads)
    room = config.max_target_positions - len(speller.prompt)
    never = np.array(asked.get("suppress_tokens") or [], np.int64)
    not_first = np.array(asked.get("begin_suppress_tokens") or [], np.int64)

    def decode(features_BMF: Tensor) -> list[list[int]]:
        (heard,) = encoder.run(None, {"input_features": features_BMF.numpy()})
        ids_BL = np.array([speller.prompt] * len(features_BMF), np.int64)
        has_ended = np.zeros(len(ids_BL), bool)
        for number in range(room):
            (logits,) = decoder.run(None, {"input_ids": ids_BL, "encoder_hidden_states": heard})
            last_BV = logits[:, -1]
            last_BV[:, never] = -np.inf
            if number == 0:
                last_BV[:, not_first] = -np.inf
            chosen = np.where(has_ended, speller.end_id, last_BV.argmax(axis=-1))
            has_ended |= chosen == speller.end_id
            ids_BL = np.concatenate((ids_BL, chosen[:, None]), axis=1)
            if has_ended.all():
                break
        return [row[len(speller.prompt) :].tolist() for row in ids_BL]

    return decode


def logits_by_graph(folder: Path, num_threads: int) -> Callable[[Tensor, Tensor], Tensor]:
    session = open_session(folder / "model.onnx", num_threads)

    def logits(waves_BT: Tensor, mask_BT: Tensor) -> Tensor:
        given = {"input_values": waves_BT.numpy(), "attention_mask": mask_BT.numpy()}
        return torch.from_numpy(session.run(None, given)[0])

    return logits


def open_session(path: Path, num_threads: int) -> Any:
    runtime = require_extra("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
