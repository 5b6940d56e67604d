"""The masked-autoencoder workload: a ViT-MAE of transformers on random images.

paceline train mae_tiny strategy.name=zero3 launch.nproc=2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.config.schema import DataConfig
from paceline.config.section import Positive, Section
from paceline.data.base import Dataset
from paceline.records import Finding
from paceline.workloads.base import Split, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn


class MAEModel(Section):
    """The `model` section of the masked-autoencoder workload."""

    hf_config: dict[str, Any] = Field(
        {}, description="Keys of Hugging Face's ViTMAEConfig: model.hf_config.hidden_size=1280."
    )


class MAEData(DataConfig):
    """Its `data` section."""

    synthetic_samples: Positive = Field(
        256_000, description="Length of the data set of random images, in samples."
    )


class MaskedAutoencoder(Workload):
    Model = MAEModel
    Data = MAEData
    unit = "samples"
    attention = "full"
    meta_init = True
    from_transformers = True
    own_attention = frozenset({"eager"})

    def build_model(self, config: Any) -> nn.Module:
        from paceline.workloads.mae.model import build_mae

        return build_mae(config.model.hf_config, config.attention.impl)

    def init_weights(self, model: nn.Module, name: str, module: nn.Module) -> None:
        from paceline.workloads.mae.model import init_mae_module

        init_mae_module(model, name, module)

    def head_dim(self, config: Any) -> int:
        """Return the head's width of encoder or decoder: of the one that kernels find harder."""
        from paceline.workloads.mae.model import mae_config

        known = mae_config(config.model.hf_config)
        widths = (
            int(known.hidden_size // known.num_attention_heads),
            int(known.decoder_hidden_size // known.decoder_num_attention_heads),
        )
        return next((width for width in widths if width % 8), max(widths))

    def build_data(self, config: Any, split: Split) -> Dataset | None:
        from paceline.data.synthetic import RandomImages
        from paceline.workloads.mae.model import mae_config, num_patches

        if split == "val":
            return None
        known = mae_config(config.model.hf_config)
        shape = (known.num_channels, known.image_size, known.image_size)
        return RandomImages(
            config.data.synthetic_samples, shape, num_patches(known), config.train.seed
        )

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        from paceline.workloads.mae.model import loss_sum

        pixels = batch["pixels"]
        outputs = model(pixels, batch["order"])
        known = getattr(model, "module", model).config  # DistributedDataParallel holds it inside
        return loss_sum(known, pixels, outputs), len(pixels)

    def flops(self, config: Any) -> float:
        from paceline.workloads.mae.model import flops_per_sample, mae_config

        return flops_per_sample(mae_config(config.model.hf_config))

    def block_positions(self, config: Any) -> Sequence[int]:
        from paceline.workloads.mae.model import block_positions, mae_config

        return block_positions(mae_config(config.model.hf_config))

    def problems(self, config: Any) -> Sequence[Finding]:
        from paceline.workloads.mae.model import check_mae

        return tuple(check_mae(config.model.hf_config))
