"""Speech data by index: a prepared corpus as waveforms with their transcripts.

    utterances = read_manifest(path, 16000, config.data.train_splits)
    data = SpeechClips(root, utterances, 16000, Cut(1.0, 3.0))

A file is decoded when its sample is needed, in a loader process, and only the part that is cut out
of it. Lengths come from the manifest, so no file is opened to learn them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.extras import require_extra
from paceline.data.manifest import Utterance
from paceline.errors import ConfigError, DataError
from paceline.records.files import fingerprint


class Clip(NamedTuple):
    """One sample: `waveform` is (T,) float32 within -1 to 1."""

    waveform: Tensor
    transcript: str


@dataclass(frozen=True)
class Cut:
    """A random piece of `min_s` to `max_s` seconds of each utterance; one that is shorter than
    `max_s` is taken whole. Equal numbers are a fixed slice, for measuring speed."""

    min_s: float
    max_s: float

    def __post_init__(self) -> None:
        if not 0 < self.min_s <= self.max_s:
            raise ConfigError(f"a cut of {self.min_s:g} to {self.max_s:g} s is not one")


class SpeechClips:
    """Utterances of a manifest. Cuts are drawn from torch's generator, which loaders seed by the
    place of a batch in the run."""

    def __init__(
        self, root: Path, utterances: Sequence[Utterance], sample_rate: int, cut: Cut | None = None
    ) -> None:
        self.root, self.utterances = root, utterances
        self.sample_rate, self.cut = sample_rate, cut
        seconds = np.array([row.duration_s for row in utterances], dtype=np.float64)
        self.lengths: NDArray[np.float64] = np.minimum(seconds, cut.max_s) if cut else seconds
        # Paths, lengths and texts are the data; checksums cost nothing if they are known already.
        rows = ("\t".join(map(str, row)) for row in utterances)
        self.fingerprint = f"speech-{fingerprint(repr(cut), str(sample_rate), *rows)}"

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Clip:
        return self.piece(index, *self._draw(self.utterances[index].num_samples))

    def piece(self, index: int, start: int, num_samples: int) -> Clip:
        """Return a part of an utterance, with the same share of its transcript."""
        row = self.utterances[index]
        waveform = _read(self.root / row.rel_path, row, start, num_samples, self.sample_rate)
        return Clip(waveform, cut_text(row.transcript, start, num_samples, row.num_samples))

    def _draw(self, whole: int) -> tuple[int, int]:
        """Draw where a piece begins and how many samples it has."""
        if self.cut is None:
            return 0, whole
        least, most = (round(s * self.sample_rate) for s in (self.cut.min_s, self.cut.max_s))
        if whole < most:
            return 0, whole
        length = int(torch.randint(least, most + 1, ()))
        return int(torch.randint(whole - length + 1, ())), length

    def collate_fn(self, clips: Sequence[Clip]) -> dict[str, Any]:
        """Return `waveforms` (B, T), zeros behind the shorter ones, `num_samples` (B,), and
        `transcripts`."""
        waves = [clip.waveform for clip in clips]
        return {
            "waveforms": torch.nn.utils.rnn.pad_sequence(waves, batch_first=True),
            "num_samples": torch.tensor([len(wave) for wave in waves]),
            "transcripts": [clip.transcript for clip in clips],
        }

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        return self.collate_fn([self[int(index)] for index in indices])


def cut_text(text: str, start: int, length: int, whole: int) -> str:
    """Return the share of a transcript that a piece of its audio is likely to say: characters in
    proportion to samples, at least one."""
    first = min(len(text) * start // whole, max(0, len(text) - 1))
    return text[first : first + max(1, len(text) * length // whole)]


def _read(path: Path, row: Utterance, start: int, num_samples: int, rate: int) -> Tensor:
    """Decode a part of a file; an error says what the manifest promises and the file lacks."""
    soundfile = require_extra("soundfile", "audio")
    try:
        with soundfile.SoundFile(path) as file:
            found = f"{file.frames} samples of {file.channels} channels at {file.samplerate} Hz"
            if (file.samplerate, file.channels, file.frames) != (rate, 1, row.num_samples):
                raise DataError(
                    f"{path} has {found}; its manifest says {row.num_samples} at {rate} Hz\n"
                    "hint: run paceline prepare speech again: it makes what has changed"
                )
            file.seek(start)
            waveform = file.read(num_samples, dtype="float32")
    except (soundfile.LibsndfileError, OSError) as error:
        raise DataError(
            f"{path} cannot be decoded: {error}\n"
            "hint: run paceline prepare speech again: it makes what has changed"
        ) from error
    if len(waveform) != num_samples:
        raise DataError(f"{path} ends at sample {start + len(waveform)} of {row.num_samples}")
    return torch.from_numpy(waveform)
