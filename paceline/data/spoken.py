"""Utterances with their words as ids, for training a recogniser: features or waveforms, masked.

    data = SpokenTexts(clips, spell, Hearing(extract), seed)

All of it happens when a sample is needed, in loader processes. What SpecAugment masks is drawn
from the seed and the position in the run, so it depends on neither ranks, nor loaders, nor
microbatches: https://arxiv.org/abs/1904.08779.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.audio import SpeechClips
from paceline.data.logmel import HOP, LogMel
from paceline.data.speech_pairs import normalised
from paceline.records.files import fingerprint

IGNORED = -100  # a label that has no loss
MASKS = 3  # masks have other random numbers than cuts


@dataclass(frozen=True)
class Masks:
    """SpecAugment: how many spans of time and bands of the spectrum, and how wide at most."""

    num_times: int = 0
    max_frames: int = 100
    num_mels: int = 0
    max_mels: int = 27

    def __bool__(self) -> bool:
        return self.num_times + self.num_mels > 0

    def draw(self, seed: int, position: int, num_frames: int, num_bins: int) -> NDArray[np.int64]:
        """Return the spans of a sample, (num_times + num_mels, 2): where each begins and ends."""
        draws = np.random.default_rng((seed, position, MASKS))
        asked = [(self.max_frames, num_frames)] * self.num_times
        asked += [(self.max_mels, num_bins)] * self.num_mels
        spans = np.zeros((len(asked), 2), np.int64)
        for row, (most, size) in zip(spans, asked, strict=True):
            width = int(draws.integers(0, min(most, size) + 1))
            first = int(draws.integers(0, size - width + 1))
            row[:] = first, first + width
        return spans


@dataclass(frozen=True)
class Hearing:
    """What a sample is: log-mel features where there is `extract`, else a normalised waveform.
    `on_device`: the features are computed there, from the waveforms."""

    extract: LogMel | None = None
    on_device: bool = False
    masks: Masks = Masks()


class SpokenTexts:
    """Samples by index, and by index and position. `lengths`, in seconds, are those that a model
    hears: Whisper always hears its whole window."""

    def __init__(
        self,
        clips: SpeechClips,
        spell: Callable[[str], tuple[list[int], list[int]]],
        hearing: Hearing,
        seed: int,
        is_masked: bool = False,
    ) -> None:
        self.clips, self.spell, self.hearing, self.seed = clips, spell, hearing, seed
        self.is_masked = is_masked
        parts = (clips.fingerprint, repr(hearing), str(is_masked), str(spell("a z")))
        self.fingerprint = f"spoken-{fingerprint(*parts)}"
        self.lengths: NDArray[np.float64] = clips.lengths
        if hearing.extract is not None:
            self.lengths = np.full(len(clips), hearing.extract.window / clips.sample_rate)

    def __len__(self) -> int:
        return len(self.clips)

    def name(self, index: int) -> str:
        """Return the name by which a person finds the utterance."""
        row = self.clips.utterances[index]
        return f"{row.rel_path} ({row.duration_s:.1f} s)"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample(index, None)

    def at(self, index: int, position: int) -> dict[str, Any]:
        """Return the sample that stands at this position of the run."""
        return self._sample(index, position if self.is_masked else None)

    def _sample(self, index: int, position: int | None) -> dict[str, Any]:
        clip, hearing = self.clips[index], self.hearing
        inputs, targets = self.spell(clip.transcript)
        sample: dict[str, Any] = {
            "inputs": torch.tensor(inputs, dtype=torch.int64),
            "targets": torch.tensor(targets, dtype=torch.int64),
            "text": clip.transcript,
        }
        extract, wave = hearing.extract, clip.waveform
        num_frames = -(-len(wave) // HOP)
        spans = np.zeros((0, 2), np.int64)
        if position is not None:
            num_bins = 1 if extract is None else extract.num_mels
            spans = hearing.masks.draw(self.seed, position, num_frames, num_bins)
        if extract is None:
            wave = normalised(clip).waveform.clone()
            for first, end in spans[: hearing.masks.num_times]:
                wave[first * HOP : end * HOP] = 0
            return {**sample, "waveform": wave}
        if hearing.on_device:
            return {**sample, "waveform": wave, "spans": torch.from_numpy(spans)}
        features_1MF = extract(wave[None])
        mask_spans(features_1MF, torch.from_numpy(spans)[None], hearing.masks.num_times)
        return {**sample, "features": features_1MF[0]}

    def collate_fn(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return `inputs` and `targets` (B, L), the latter filled up with IGNORED, `texts`, and
        `features` (B, M, F), or `waveforms` (B, T) with zeros behind each, `num_samples` (B,), and
        `spans` (B, S, 2)."""
        fill = torch.nn.utils.rnn.pad_sequence
        targets = [sample["targets"] for sample in samples]
        batch: dict[str, Any] = {
            "inputs": fill([sample["inputs"] for sample in samples], batch_first=True),
            "targets": fill(targets, batch_first=True, padding_value=IGNORED),
            "texts": [sample["text"] for sample in samples],
        }
        if "features" in samples[0]:
            return {**batch, "features": torch.stack([sample["features"] for sample in samples])}
        waves = [sample["waveform"] for sample in samples]
        batch["waveforms"] = fill(waves, batch_first=True)
        batch["num_samples"] = torch.tensor([len(wave) for wave in waves])
        if "spans" in samples[0]:
            batch["spans"] = torch.stack([sample["spans"] for sample in samples])
        return batch


def mask_spans(features_BMF: Tensor, spans_BS2: Tensor, num_times: int) -> None:
    """Set what SpecAugment masks to 0, in place: the first spans are of time, others of bins."""
    if not spans_BS2.shape[1]:
        return
    for axis, spans in ((2, spans_BS2[:, :num_times]), (1, spans_BS2[:, num_times:])):
        if not spans.shape[1]:
            continue
        places = torch.arange(features_BMF.shape[axis], device=features_BMF.device)
        inside = (places >= spans[..., :1]) & (places < spans[..., 1:])
        shape = (len(spans), 1, -1) if axis == 2 else (len(spans), -1, 1)
        features_BMF.masked_fill_(inside.any(dim=1).view(shape), 0.0)
