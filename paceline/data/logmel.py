"""Log-mel features as Whisper hears them, computed by torch on any device.

    extract = LogMel(num_mels=80, window=480_000)
    extract(waves_BT)                  (B, M, F) for waveforms (B, T) of 16 kHz, zeros behind each

They are those of Hugging Face's WhisperFeatureExtractor, which pads every utterance to its
window of 30 s and then transforms all of it. A frame of silence has one known value, so here only
the frames that touch a sample are computed: the time is that of the audio, not of the window.

Shape letters: B waveforms, T samples, S of a frame, Q frequencies, M mel bins, F frames of the
window, N of them that are computed.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.data.extras import require_extra

RATE, SIZE, HOP = 16000, 400, 160  # Hz, and samples of a frame and between two
FLOOR, SILENCE = 1e-10, -10.0  # the least power that is told from silence, and its logarithm
CACHED = 256  # frames whose spectra stay in a core's cache
RANGE = 8.0  # powers of ten below the loudest; quieter values are raised to that


@dataclass(frozen=True)
class LogMel:
    """`window` is how many samples the model hears at once; the features cover all of it."""

    num_mels: int
    window: int

    @property
    def num_frames(self) -> int:
        return self.window // HOP

    @torch.no_grad()
    def __call__(self, waves_BT: Tensor) -> Tensor:
        with torch.autocast(waves_BT.device.type, enabled=False):
            return self._extract(waves_BT[:, : self.window].float())

    def _extract(self, waves_BT: Tensor) -> Tensor:
        # Frame f is centred on sample f * HOP. The last one that reaches a sample is number
        # (T + SIZE / 2 - 1) // HOP; beyond the window the signal is mirrored, so that is the end.
        num = min(self.num_frames, (waves_BT.shape[1] + SIZE // 2 - 1) // HOP + 1)
        length = min(self.window, num * HOP + SIZE // 2)
        frames_BNS = mirrored(waves_BT, length).unfold(1, SIZE, HOP)[:, :num]
        whole_BMF = waves_BT.new_empty((len(waves_BT), self.num_mels, self.num_frames))
        step = CACHED if waves_BT.device.type == "cpu" else num
        for first in range(0, num, step):
            part = slice(first, min(first + step, num))
            whole_BMF[..., part] = self._powers(frames_BNS[:, part])
        logs_BMF = whole_BMF[..., :num].clamp_(min=FLOOR).log10_()
        least_B11 = logs_BMF.amax(dim=(1, 2), keepdim=True).sub_(RANGE).clamp_(min=SILENCE)
        whole_BMF[..., num:] = SILENCE
        torch.maximum(whole_BMF, least_B11, out=whole_BMF)
        return whole_BMF.add_(4.0).div_(4.0)

    def _powers(self, frames_BNS: Tensor) -> Tensor:
        """Return the power in each mel bin, (B, M, N): squares without roots, which would cost as
        much as the transform."""
        device = frames_BNS.device
        spectrum_BNQ = torch.fft.rfft(frames_BNS * _hann(device))
        power_BNQ = spectrum_BNQ.real.square().add_(spectrum_BNQ.imag.square())
        found_BMN: Tensor = _mels(self.num_mels, device) @ power_BNQ.transpose(1, 2)
        return found_BMN


def mirrored(waves_BT: Tensor, length: int) -> Tensor:
    """Return the waveforms padded with zeros to `length`, and half a frame of their mirror image
    before and behind: one copy, where `torch.nn.functional.pad` takes two."""
    half, size = SIZE // 2, waves_BT.shape[1]
    whole = waves_BT.new_zeros((len(waves_BT), length + SIZE))
    whole[:, half : half + size] = waves_BT
    whole[:, :half] = whole[:, half + 1 : SIZE + 1].flip(1)
    whole[:, half + length :] = whole[:, length - 1 : length + half - 1].flip(1)
    return whole


@cache
def _hann(device: torch.device) -> Tensor:
    return torch.hann_window(SIZE, device=device)


@cache
def _mels(num_mels: int, device: torch.device) -> Tensor:
    """Return the filters (M, Q): how much each frequency counts in each bin."""
    library = require_extra("transformers.audio_utils", "hf")
    table = library.mel_filter_bank(
        num_frequency_bins=1 + SIZE // 2,
        num_mel_filters=num_mels,
        min_frequency=0.0,
        max_frequency=RATE / 2,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(table).float().T.contiguous().to(device)
