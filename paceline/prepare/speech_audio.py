"""One audio file into 16-bit FLAC, mono, at one sample rate, its silent ends cut off.

    decode -> mix to mono -> resample, if the rate differs -> trim -> FLAC

What cannot be trained on is `Unusable`, with a reason for people. The libraries for audio are an
extra and are imported where they are used; torch is not.
"""

import io
import math
import re
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.extras import require_extra
from paceline.records.files import fingerprint

FRAME, HOP = 2048, 512  # of librosa's trim, in samples at the target rate
FLOOR = 1e-10  # mean square of a frame below which librosa measures nothing: -100 dB
RATES = (2000, 384_000)
MAX_CHANNELS = 64
FULL_SCALE = 32768.0
VERSION = 1  # of what this module makes of a file; another one redoes the work
# How libsndfile says that a WAV has less data than its header announces.
SHORT_WAV = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
UNKNOWN_SIZES = (0, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF)  # of a WAV that was written to a pipe
NO_LENGTH = 2**63 - 1  # a FLAC that was written to a pipe
BLOCK = 1 << 20  # samples that are decoded at a time
LOSSY = ("MP3", "OGG")  # their length is an estimate before they are decoded
Samples = NDArray[np.float32]


class Unusable(Exception):
    """A file that nothing can be learned from; its text is the reason."""


@dataclass(frozen=True)
class Sound:
    """What the prepared files shall be; `max_s` is the longest source that is taken."""

    target_sr: int = 16000
    trim: bool = False
    top_db: float = 60.0
    max_s: float = 3600.0

    @property
    def how(self) -> str:
        """A short name for all that decides the bytes of a prepared file."""
        trim = f"{self.top_db!r}:{FRAME}:{HOP}" if self.trim else "no"
        return fingerprint(f"{VERSION}:{self.target_sr}:{trim}")


class Rendered(NamedTuple):
    """A prepared file's bytes; None where the source is what was asked for already."""

    flac: bytes | None
    num_samples: int
    source_s: float


def render(file: BinaryIO, sound: Sound) -> Rendered:
    """Decode an audio file and return what is to be written in its place."""
    soundfile = require_extra("soundfile", "audio")
    file.seek(0)
    try:
        # libsndfile reads a real file by its number, without coming back to Python for each block.
        handle = file if isinstance(file, io.BytesIO) else file.fileno()
        with soundfile.SoundFile(handle, closefd=False) as opened:
            _require_plausible(opened, sound)
            is_pcm16 = opened.subtype == "PCM_16" and opened.channels == 1
            is_ready = is_pcm16 and opened.format == "FLAC"
            # 16-bit samples that need no resampling stay the whole numbers they are.
            keep = is_pcm16 and opened.samplerate == sound.target_sr
            decoded = _decode(opened, "int16" if keep else "float32")
            rate = int(opened.samplerate)
    except soundfile.LibsndfileError as error:
        raise Unusable(f"cannot be decoded: {error.error_string}") from error
    source_s = len(decoded) / rate
    if keep:
        signal = decoded.astype(np.float32) / FULL_SCALE
    else:
        signal = _resample(_mono(decoded), rate, sound.target_sr)
    start, end = _bounds(signal, sound)
    if keep and is_ready and end - start == len(signal):
        return Rendered(None, len(signal), source_s)
    pcm = decoded[start:end] if keep else _to_pcm16(signal[start:end])
    return Rendered(_encode(pcm, sound.target_sr), end - start, source_s)


def hear(file: BinaryIO, rate: int, max_s: float) -> Samples:
    """Decode an audio file of any rate and number of channels: mono, at `rate`. It is read block by
    block, so that memory is that of the result."""
    soundfile, soxr = require_extra("soundfile", "audio"), require_extra("soxr", "audio")
    blocks: list[Samples] = []
    try:
        with soundfile.SoundFile(file.fileno(), closefd=False) as opened:
            _require_plausible(opened, Sound(rate, max_s=max_s))
            # Each block is resampled as it comes; what is left in the filter comes with the last.
            stream = soxr.ResampleStream(opened.samplerate, rate, 1, dtype="float32", quality="HQ")
            num_read = 0
            while len(block := opened.read(BLOCK, dtype="float32")):
                num_read += len(block)
                mono = _mono(block)
                blocks.append(mono if rate == opened.samplerate else stream.resample_chunk(mono))
            if rate != opened.samplerate:
                blocks.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
            _require_whole(opened, num_read)
    except soundfile.LibsndfileError as error:
        raise Unusable(f"cannot be decoded: {error.error_string}") from error
    return np.concatenate(blocks)


def _require_plausible(opened: Any, sound: Sound) -> None:
    """Judge the header, before memory is taken for what it announces."""
    rate, channels = opened.samplerate, opened.channels
    if not RATES[0] <= rate <= RATES[1]:
        raise Unusable(f"sample rate of {rate:,} Hz is not between {RATES[0]:,} and {RATES[1]:,}")
    if channels > MAX_CHANNELS:
        raise Unusable(f"{channels} channels are more than {MAX_CHANNELS}")
    if opened.frames == NO_LENGTH:
        raise Unusable("its header does not say how long it is: encode it anew")
    if opened.frames / rate > sound.max_s:
        raise Unusable(f"over-long: {opened.frames / rate:,.0f} s, the limit is {sound.max_s:,g} s")
    for found in SHORT_WAV.finditer(opened.extra_info):
        said, there = map(int, found.groups())
        if said > there and said not in UNKNOWN_SIZES:
            raise Unusable(f"truncated: {there:,} of {said:,} bytes of samples")


def _decode(opened: Any, dtype: str) -> NDArray[Any]:
    decoded: NDArray[Any] = opened.read(dtype=dtype, always_2d=False)
    _require_whole(opened, len(decoded))
    return decoded


def _require_whole(opened: Any, num_samples: int) -> None:
    """Judge what was decoded by what the header announced."""
    if not num_samples:
        raise Unusable("empty: no samples")
    slack = opened.frames // 50 if opened.format in LOSSY else 0
    if num_samples < opened.frames - slack:
        raise Unusable(f"truncated: {num_samples:,} of {opened.frames:,} samples")


def _mono(decoded: Samples) -> Samples:
    """Return the mean of the channels. Samples that are no numbers would spread in resampling."""
    mixed: Samples = decoded if decoded.ndim == 1 else decoded.mean(axis=1, dtype=np.float32)
    with np.errstate(over="ignore"):
        energy = float(np.dot(mixed, mixed))
    if not math.isfinite(energy):
        bad = int(mixed.size - np.isfinite(mixed).sum())
        if bad:
            raise Unusable(f"not finite: {bad:,} of {mixed.size:,} samples are NaN or infinite")
        raise Unusable(f"out of range: samples up to {float(np.abs(mixed).max()):.3g}")
    return mixed


def _resample(signal: Samples, rate: int, target_sr: int) -> Samples:
    """Return the signal at the target rate, by soxr's HQ, which is librosa's choice too."""
    if rate == target_sr:
        return signal
    resampled: Samples = require_extra("soxr", "audio").resample(
        signal, rate, target_sr, quality="HQ"
    )
    if not len(resampled):
        raise Unusable(f"empty: {len(signal)} samples at {rate:,} Hz are none at {target_sr:,} Hz")
    return resampled


def _bounds(signal: Samples, sound: Sound) -> tuple[int, int]:
    """Return where the sound begins and ends; a file without any is `Unusable`."""
    power = frame_power(signal)
    if power.max() <= FLOOR:
        raise Unusable("silent: no frame is above -100 dB")
    return trim_bounds(power, len(signal), sound.top_db) if sound.trim else (0, len(signal))


def frame_power(signal: Samples) -> NDArray[np.float64]:
    """Return the mean square of each frame of 2048 samples, one every 512, centred there.

    Frame f covers [512 f - 1024, 512 f + 1024), zeros beyond both ends: four blocks of 512. So the
    squares are summed once per block, and a frame is the sum of four blocks.
    """
    num_blocks = len(signal) // HOP
    blocks = np.zeros(num_blocks + 4)  # two before the first, the last partial one, one behind
    whole = signal[: num_blocks * HOP].reshape(num_blocks, HOP)
    blocks[2 : 2 + num_blocks] = np.einsum("bh,bh->b", whole, whole)
    rest = signal[num_blocks * HOP :]
    blocks[2 + num_blocks] = np.dot(rest, rest)
    power: NDArray[np.float64] = (blocks[:-3] + blocks[1:-2] + blocks[2:-1] + blocks[3:]) / FRAME
    return power


def trim_bounds(power: NDArray[np.float64], num_samples: int, top_db: float) -> tuple[int, int]:
    """Return the samples from the first frame to the last one that is less than `top_db` below the
    loudest, as librosa's trim does."""
    assert top_db > 0, "the loudest frame stays"
    loud = np.maximum(power, FLOOR)
    heard = np.flatnonzero(loud > loud.max() * 10 ** (-top_db / 10))
    return int(heard[0]) * HOP, min(num_samples, (int(heard[-1]) + 1) * HOP)


def _to_pcm16(signal: Samples) -> NDArray[np.int16]:
    scaled = signal * np.float32(FULL_SCALE)
    np.rint(scaled, out=scaled)
    np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1, out=scaled)
    return scaled.astype(np.int16)


def _encode(pcm: NDArray[np.int16], rate: int) -> bytes:
    buffer = io.BytesIO()
    require_extra("soundfile", "audio").write(buffer, pcm, rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()
