"""Pieces of speech with their words, ready for a model: normalised, padded and tokenised.

    data = SpeechPairs(clips, spelling, Pieces(Cut(1.0, 3.0)), seed)

All of it happens when a sample is needed, in loader processes. Cuts are drawn from the
seed and the position in the run, so it depends on neither ranks, nor loaders, nor microbatches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.audio import Clip, Cut, SpeechClips
from paceline.data.spelling import Spelling

QUIET = 1e-7  # what the variance of a waveform is increased by, as in Hugging Face's extractor
ROUND_S = 0.1
LENGTHS = 2  # lengths have other random numbers than positions


class Pieces(NamedTuple):
    """Which part of an utterance is a sample. `cut`: a random piece; None: the whole. `head_s`: the
    first seconds at most, without chance, as validation needs it. `by_length`: batches are made of
    pieces of like length, so how long each is must be known before it is drawn."""

    cut: Cut | None = None
    head_s: float | None = None
    by_length: bool = False


class SpeechPairs:
    """Samples by index, and by index and position. `lengths`, in seconds, exist if they are known:
    they are not if each piece's length is drawn anew."""

    def __init__(self, clips: SpeechClips, spelling: Spelling, pieces: Pieces, seed: int) -> None:
        self.clips, self.spelling, self.pieces, self.seed = clips, spelling, pieces, seed
        self.fingerprint = f"{clips.fingerprint}-{pieces}-{spelling.tokenizer.sha256[:16]}"
        self.num_samples = np.array([row.num_samples for row in clips.utterances], np.int64)
        self.known: NDArray[np.int64] | None = None  # how many samples each piece has
        if pieces.head_s is not None:
            self.known = np.minimum(self.num_samples, self._samples(pieces.head_s))
        elif pieces.cut is None:
            self.known = self.num_samples
        elif pieces.by_length or pieces.cut.min_s == pieces.cut.max_s:
            self.known = self._draw_lengths(pieces.cut)
        if self.known is not None:
            self.lengths: NDArray[np.float64] = self.known / clips.sample_rate

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        if self.pieces.cut is not None:
            return self.at(index, index)
        assert self.known is not None, "the length of what is not cut is known"
        return normalised(self.clips.piece(index, 0, int(self.known[index])))

    def at(self, index: int, position: int) -> Clip:
        """Return the sample that stands at this position of the run."""
        cut = self.pieces.cut
        if cut is None:
            return self[index]
        draws = np.random.default_rng((self.seed, position))
        whole = int(self.num_samples[index])
        if self.known is not None:
            length = int(self.known[index])
        elif whole < self._samples(cut.max_s):
            length = whole
        else:
            length = int(draws.integers(self._samples(cut.min_s), self._samples(cut.max_s) + 1))
        start = int(draws.integers(whole - length + 1))
        return normalised(self.clips.piece(index, start, length))

    def collate_fn(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """Return `waveforms` (B, T) with zeros behind the shorter ones, `num_samples` (B,),
        `tokens` (B, L) and `num_tokens` (B,). T is rounded up to a tenth of a second: for every
        length that it has not met before cuDNN looks for kernels anew, in each convolution."""
        waves = [clip.waveform for clip in clips]
        padded = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
        rest = -padded.shape[1] % self._samples(ROUND_S)
        tokens, num_tokens = self.spelling.rows([clip.transcript for clip in clips])
        return {
            "waveforms": torch.nn.functional.pad(padded, (0, rest)),
            "num_samples": torch.tensor([len(wave) for wave in waves]),
            "tokens": tokens,
            "num_tokens": num_tokens,
        }

    def _samples(self, seconds: float) -> int:
        return round(seconds * self.clips.sample_rate)

    def _draw_lengths(self, cut: Cut) -> NDArray[np.int64]:
        """Draw a length for each utterance once; where it begins is drawn anew every time."""
        draws = np.random.default_rng((self.seed, 0, LENGTHS))
        least, most = self._samples(cut.min_s), self._samples(cut.max_s)
        drawn = draws.integers(least, most + 1, size=len(self.num_samples))
        lengths: NDArray[np.int64] = np.where(self.num_samples < most, self.num_samples, drawn)
        return lengths


def normalised(clip: Clip) -> Clip:
    """Give a piece the mean 0 and the variance 1, before any padding is added to it."""
    wave = clip.waveform
    spread = (wave.var(correction=0) + QUIET).sqrt()
    return Clip((wave - wave.mean()) / spread, clip.transcript)
