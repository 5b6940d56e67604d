"""One audio file: what is made of it, what librosa would have made, and what is refused."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from paceline.prepare.speech_audio import Sound, Unusable, frame_power, render, trim_bounds
from tests.speech_signals import CORPUS, RATE, TABLE, signal

LIBROSA = json.loads(TABLE.read_text())
HOP = 512
Signal = NDArray[np.float32]


def encoded(samples: NDArray[np.generic], rate: int = RATE, kind: str = "WAV/FLOAT") -> io.BytesIO:
    format_, subtype = kind.split("/")
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format_, subtype=subtype)
    return io.BytesIO(buffer.getvalue())


def decoded(flac: bytes | None) -> NDArray[np.int16]:
    assert flac is not None
    with soundfile.SoundFile(io.BytesIO(flac)) as file:
        assert (file.format, file.subtype, file.channels) == ("FLAC", "PCM_16", 1)
        samples: NDArray[np.int16] = file.read(dtype="int16")
        return samples


# Trim


def test_trim_is_librosas_to_the_frame() -> None:
    """Of 31 signals at three thresholds, as librosa 0.11 trims them."""
    assert len(LIBROSA["signals"]) == 93
    moved = []
    for row in LIBROSA["signals"]:
        whole = signal(row["signal"])
        start, end = trim_bounds(frame_power(whole), len(whole), row["top_db"])
        moved.append(max(abs(start - row["start"]), abs(end - row["end"])))
    assert max(moved) <= HOP and sum(moved) == 0, "no signal of these is on the edge of a frame"


def test_files_have_the_length_that_librosa_gives_them() -> None:
    """Loaded at 16 kHz and trimmed by librosa: five rates, within a frame."""
    for name, num_samples in LIBROSA["files"].items():
        with (CORPUS / name).open("rb") as file:
            rendered = render(file, Sound(trim=True))
        assert abs(rendered.num_samples - num_samples) <= HOP, name
        assert len(decoded(rendered.flac)) == rendered.num_samples


def test_a_louder_threshold_cuts_more() -> None:
    whole = encoded(signal("ramp"))
    lengths = [render(whole, Sound(trim=True, top_db=db)).num_samples for db in (10, 30, 60)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


# What is made


def test_whole_numbers_stay_what_they_are() -> None:
    """No resampling, so no rounding: 16-bit samples come out bit by bit, trimmed or not."""
    pcm = (signal("burst3") * 32767).astype(np.int16)
    flac = render(encoded(pcm, kind="WAV/PCM_16"), Sound()).flac
    assert np.array_equal(decoded(flac), pcm)
    trimmed = decoded(render(encoded(pcm, kind="WAV/PCM_16"), Sound(trim=True, top_db=20)).flac)
    start, end = trim_bounds(frame_power(pcm.astype(np.float32)), len(pcm), 20)
    assert np.array_equal(trimmed, pcm[start:end]) and start > 0


def test_what_is_ready_is_not_encoded_again() -> None:
    pcm = (signal("all_loud") * 32767).astype(np.int16)
    ready = encoded(pcm, kind="FLAC/PCM_16")
    assert render(ready, Sound(trim=True)) == (None, len(pcm), len(pcm) / RATE)
    assert render(ready, Sound(target_sr=8000)).flac is not None


def test_channels_are_averaged() -> None:
    one, other = signal("all_loud") * 0.5, signal("ramp") * 0.5
    mixed = decoded(render(encoded(np.stack([one, other], axis=1)), Sound()).flac)
    assert np.abs(mixed / 32768 - (one + other) / 2).max() < 2e-5


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_tone_keeps_its_pitch_at_another_rate(rate: int) -> None:
    """400 Hz for one second: 400 periods, whatever the rates."""
    tone = (0.5 * np.sin(2 * np.pi * 400 * np.arange(rate) / rate)).astype(np.float32)
    rendered = render(encoded(tone, rate), Sound())
    assert abs(rendered.num_samples - RATE) <= 1 and rendered.source_s == 1.0
    spectrum = np.abs(np.fft.rfft(decoded(rendered.flac).astype(np.float64)))
    assert spectrum.argmax() == 400


@pytest.mark.parametrize("kind", ["FLAC/PCM_24", "OGG/VORBIS", "MP3/MPEG_LAYER_III", "WAV/PCM_U8"])
def test_formats(kind: str) -> None:
    whole = signal("all_loud") * 0.5
    rendered = render(encoded(whole, kind=kind), Sound())
    assert abs(rendered.num_samples - len(whole)) < 2500  # MP3 fills its last frame up


def test_loud_samples_are_clipped_and_do_not_wrap() -> None:
    samples = decoded(render(encoded(signal("all_loud") * 3), Sound()).flac)
    assert samples.max() == 32767 and samples.min() == -32768


# What is refused


def nan(samples: Signal) -> io.BytesIO:
    broken = samples.copy()
    broken[5:8] = np.nan
    broken[9] = np.inf
    return encoded(broken)


def truncated(kind: str, share: float = 0.5) -> Callable[[Signal], io.BytesIO]:
    def make(samples: Signal) -> io.BytesIO:
        raw = encoded(samples, kind=kind).getvalue()
        return io.BytesIO(raw[: int(len(raw) * share)])

    return make


def flipped(samples: Signal) -> io.BytesIO:
    raw = bytearray(encoded(samples, kind="FLAC/PCM_16").getvalue())
    raw[len(raw) // 2] ^= 0x10
    return io.BytesIO(bytes(raw))


def without_length(samples: Signal) -> io.BytesIO:
    """The count of samples is 36 bits from byte 21.5 on."""
    raw = bytearray(encoded(samples, kind="FLAC/PCM_16").getvalue())
    raw[21] &= 0xF0
    raw[22:26] = bytes(4)
    return io.BytesIO(bytes(raw))


REFUSED: dict[str, tuple[Callable[[Signal], io.BytesIO], str]] = {
    "nothing": (lambda s: io.BytesIO(b""), "cannot be decoded: Format not recognised"),
    "junk": (lambda s: io.BytesIO(bytes(range(256)) * 9), "cannot be decoded"),
    "pickle": (lambda s: io.BytesIO(b"\x80\x04cos\nsystem\n."), "cannot be decoded"),
    "truncated flac": (truncated("FLAC/PCM_16"), "cannot be decoded|truncated"),
    "flipped flac": (flipped, "cannot be decoded"),
    "truncated wav": (truncated("WAV/PCM_16"), r"truncated: 23,\d+ of 48,000 bytes"),
    "header of a wav": (truncated("WAV/PCM_16", 0.0009), "cannot be decoded|truncated|empty"),
    "truncated mp3": (truncated("MP3/MPEG_LAYER_III"), "truncated"),
    "no length": (without_length, "does not say how long"),
    "no samples": (lambda s: encoded(s[:0]), "empty"),
    "zeros": (lambda s: encoded(s * 0), "silent"),
    "whisper": (lambda s: encoded(s * 1e-6), "silent"),
    "nan": (nan, "not finite: 4 of 24,000 samples are NaN or infinite"),
    "huge": (lambda s: encoded(s * 1e30), "out of range: samples up to 1e"),
    "1 Hz": (lambda s: encoded(s[:99], 1, "FLAC/PCM_16"), "sample rate of 1 Hz"),
    "over-long": (lambda s: encoded(np.tile(s, 5)), "over-long: 8 s, the limit is 7 s"),
    "too short": (lambda s: encoded(s[:1], 384_000), "empty: 1 samples at 384,000 Hz are none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_can_be_learned_from_is_refused_with_its_reason(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(Unusable, match=reason):
        render(make(signal("all_loud")), Sound(trim=True, max_s=7))


def test_a_bomb_is_refused_by_its_header() -> None:
    """Four hours of zeros in a few kilobytes of FLAC: no memory is taken for them."""
    block = encoded(np.zeros(16, np.int16), 4000, "FLAC/PCM_16").getvalue()
    raw = bytearray(block)
    raw[21] = raw[21] & 0xF0 | 0xF
    raw[22:26] = struct.pack(">I", 2**32 - 1)
    with pytest.raises(Unusable, match="over-long"):
        render(io.BytesIO(bytes(raw)), Sound())


def test_a_wav_that_was_written_to_a_pipe_is_taken() -> None:
    """ffmpeg cannot go back to write the size there."""
    raw = bytearray(encoded(signal("all_loud"), kind="WAV/PCM_16").getvalue())
    raw[4:8] = raw[40:44] = b"\xff\xff\xff\xff"
    assert render(io.BytesIO(bytes(raw)), Sound()).num_samples == 24000


def test_the_settings_have_a_name_that_changes_with_what_they_decide() -> None:
    sounds = [Sound(), Sound(8000), Sound(trim=True), Sound(trim=True, top_db=30)]
    assert len({sound.how for sound in sounds}) == 4
    assert Sound(top_db=30).how == Sound(max_s=5).how == Sound().how, "neither is used"


def test_a_real_file_and_its_bytes_are_the_same(tmp_path: Path) -> None:
    path = next(CORPUS.rglob("114-*.flac"))
    with path.open("rb") as file:
        by_number = render(file, Sound(trim=True))
    assert by_number == render(io.BytesIO(path.read_bytes()), Sound(trim=True))
