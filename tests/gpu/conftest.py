"""What a test on a GPU leaves to the next one in its process: torch's kernels, and all memory."""

import gc
from collections.abc import Iterator

import pytest
import torch

from paceline.train.torch_settings import allow_kernels


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    allow_kernels("sdpa", is_compiled=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
