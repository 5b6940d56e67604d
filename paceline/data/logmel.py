"""Log-mel features as Whisper hears them, computed by torch on any device.

    extract = LogMel(num_mels=80, window=480_000)
    extract(waves_BT)                  (B, M, F) for waveforms (B, T) of 16 kHz, zeros behind each

They are those of Hugging Face's WhisperFeatureExtractor, which fills every utterance up to its
window of 30 s and then transforms all of it. A frame of silence has one known value, so here only
the frames that touch a sample are computed: the time is that of the audio, not of the window.

Shape letters: B waveforms, T samples, Q frequencies, M mel bins, F frames of the window, N of them
that are computed.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.data.extras import require_extra

RATE, SIZE, HOP = 16000, 400, 160  # Hz, and samples of a frame and between two
FLOOR = 1e-10  # the least power that is told from silence
RANGE = 8.0  # powers of ten below the loudest; all that is quieter is that


@dataclass(frozen=True)
class LogMel:
    """`window` is how many samples the model hears at once: the features are of all of it."""

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
        padded = torch.nn.functional.pad(waves_BT, (0, length - waves_BT.shape[1]))
        shape, table = _hann(waves_BT.device), _mels(self.num_mels, waves_BT.device)
        parts = torch.stft(padded, SIZE, HOP, window=shape, return_complex=True)[..., :num]
        # The square of a complex number without its root, which is what takes the time.
        power_BQN = torch.view_as_real(parts).square_().sum(dim=-1)
        found_BMN = (table @ power_BQN).clamp_(min=FLOOR).log10_()
        least_B11 = found_BMN.amax(dim=(1, 2), keepdim=True) - RANGE
        found_BMN = found_BMN.maximum(least_B11).add_(4.0).div_(4.0)
        if num == self.num_frames:
            return found_BMN
        silence_B11 = least_B11.clamp(min=-10.0).add_(4.0).div_(4.0)  # log10 of FLOOR
        whole = silence_B11.expand(*found_BMN.shape[:2], self.num_frames).contiguous()
        whole[..., :num] = found_BMN
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
