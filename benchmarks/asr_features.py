"""Log-mel features on one core: ours against Hugging Face's WhisperFeatureExtractor.

    OMP_NUM_THREADS=1 python benchmarks/asr_features.py [--rounds 20]

Both make the features of the same utterance, one at a time, as a loader does. Times are of the
processor, so other work on the machine changes less; rounds are interleaved and the lower quartile
counts. `2 to 16 s` are lengths spread evenly between those, as read speech has them. Beside each
ratio stands the largest difference of any feature.
"""

import argparse
import time

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from paceline.data.logmel import RATE, LogMel

SPREAD_S = tuple(float(seconds) for seconds in range(2, 17, 2))
LENGTHS_S = (1.0, 3.0, 10.0, 15.0, 20.0, 30.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {asked.rounds} rounds")
    for num_mels in (80, 128):
        theirs, ours = WhisperFeatureExtractor(feature_size=num_mels), LogMel(num_mels, 30 * RATE)
        print(f"{num_mels} mel bins    extractor       ours      ratio    largest difference")
        for seconds in LENGTHS_S:
            times = measure(theirs, ours, (seconds,), asked.rounds)
            report(f"{seconds:4.0f} s", *times)
        report("2 to 16 s", *measure(theirs, ours, SPREAD_S, asked.rounds))


def measure(
    theirs: WhisperFeatureExtractor, ours: LogMel, lengths: tuple[float, ...], rounds: int
) -> tuple[float, float, float]:
    """Return the seconds per utterance of both, and how far their features are apart at most."""
    draws = np.random.default_rng(0)
    waves = [(0.1 * draws.standard_normal(int(s * RATE))).astype(np.float32) for s in lengths]
    spent: tuple[list[float], list[float]] = ([], [])
    apart = 0.0
    for _ in range(rounds):
        for wave in waves:
            started_at = time.process_time()
            first = theirs(wave, sampling_rate=RATE, return_tensors="pt").input_features[0]
            between = time.process_time()
            second = ours(torch.from_numpy(wave)[None])[0]
            spent[0].append(between - started_at)
            spent[1].append(time.process_time() - between)
            apart = max(apart, float((first - second).abs().max()))
    per_wave = [np.array(each).reshape(rounds, len(waves)) for each in spent]
    mean = [float(np.quantile(each, 0.25, axis=0).mean()) for each in per_wave]
    return mean[0], mean[1], apart


def report(name: str, theirs_s: float, ours_s: float, apart: float) -> None:
    ratio = f"{theirs_s / ours_s:6.2f}x"
    print(f"{name:12s}  {theirs_s * 1e3:7.2f} ms  {ours_s * 1e3:7.2f} ms  {ratio}    {apart:.1e}")


if __name__ == "__main__":
    main()
