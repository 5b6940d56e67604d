"""Random images that are a function of (seed, index) alone: on any rank, machine and worker."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
