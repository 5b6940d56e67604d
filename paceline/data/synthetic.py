"""Random samples, each a function of (seed, index) alone: equal on any rank, machine and worker."""

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

IGNORED = -100  # cross_entropy's own mark for a target that counts nothing


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


class Sentences:
    """Samples of 2 to seq_len + 1 tokens, filled up with IGNORED; the loss of `poison` is NaN."""

    def __init__(
        self, num_samples: int, seq_len: int, vocab_size: int, seed: int, poison: int
    ) -> None:
        self.tokens = SyntheticTokens(num_samples, seq_len, vocab_size, seed)
        self.seed, self.poison = seed, poison
        self.fingerprint = f"sentences-{self.tokens.fingerprint}-{poison}"

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]["tokens"]
        generator = torch.Generator().manual_seed(self.seed * 7_000_003 + index)
        length = int(torch.randint(2, len(tokens) + 1, (), generator=generator))
        tokens[length:] = IGNORED
        return {"tokens": tokens, "poison": torch.tensor(nan if index == self.poison else 0.0)}


class RandomImages:
    """`num_samples` images (C, H, H) of standard normal pixels, each with an order of its patches.

    The order says which patches are masked: it belongs to the sample, so that the loss does not
    depend on which rank computes it. It is whole numbers, which no compute type rounds.
    """

    def __init__(
        self, num_samples: int, image_shape: tuple[int, int, int], num_patches: int, seed: int
    ) -> None:
        self.num_samples, self.image_shape = num_samples, image_shape
        self.num_patches, self.seed = num_patches, seed
        size = "x".join(str(length) for length in image_shape)
        self.fingerprint = f"images-{num_samples}-{size}-{num_patches}-{seed}"

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return {
            "pixels": torch.randn(self.image_shape, generator=generator),
            "order": torch.randperm(self.num_patches, generator=generator),
        }

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        samples = [self[int(index)] for index in indices]
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
