"""Log-mel features on a GPU are those of the extractor on a CPU."""

import numpy as np
import pytest
import torch

from paceline.data.logmel import LogMel
from tests.skips import needs_gpu

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_on_the_device_are_those_of_the_extractor(num_mels: int) -> None:
    draws = np.random.default_rng(0)
    waves = [0.1 * draws.standard_normal(n).astype(np.float32) for n in (8000, 100_000, 480_000)]
    theirs = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    expected = theirs(waves, sampling_rate=16000, return_tensors="pt").input_features
    rows = [torch.from_numpy(wave) for wave in waves]
    filled = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        found = LogMel(num_mels, 480_000)(filled)
    assert (found.cpu() - expected).abs().max() < 1e-4
