"""Tokens that are a function of (seed, index) alone: the same on every rank, machine and worker."""

from collections.abc import Sequence

import torch
from torch import Tensor


class SyntheticTokens:
    """`num_samples` samples of seq_len + 1 uniform token ids."""

    def __init__(self, num_samples: int, seq_len: int, vocab_size: int, seed: int) -> None:
        self.num_samples, self.seq_len = num_samples, seq_len
        self.vocab_size, self.seed = vocab_size, seed
        self.fingerprint = f"synthetic-{num_samples}-{seq_len}-{vocab_size}-{seed}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        shape = (self.seq_len + 1,)
        return {"tokens": torch.randint(self.vocab_size, shape, generator=generator)}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {"tokens": torch.stack([self[int(index)]["tokens"] for index in indices])}
