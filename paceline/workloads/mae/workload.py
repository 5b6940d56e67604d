"""The masked-autoencoder workload: a ViT-MAE of transformers on images, or on random ones.

paceline train mae_tiny strategy.name=zero3 launch.nproc=2
paceline train mae_tiny data.path_train=DIR train.eval_every=50
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.config.schema import DataConfig
from paceline.config.section import Positive, Section
from paceline.data.base import Dataset
from paceline.data.images import MODES, SYNTHETIC, ImageData, Images, prepare_images
from paceline.records import Finding
from paceline.workloads.base import Split, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.workloads.exporting import Exported, ExportRequest


IMAGE_KEYS = ImageData.model_fields.keys() - DataConfig.model_fields.keys()
MASKS = 1  # the random numbers of masks are others than those of crops


class MAEModel(Section):
    """The `model` section of the masked-autoencoder workload."""

    hf_config: dict[str, Any] = Field(
        {}, description="Keys of Hugging Face's ViTMAEConfig: model.hf_config.hidden_size=1280."
    )


class MAEData(ImageData):
    """Its `data` section."""

    synthetic_samples: Positive = Field(
        256_000, description="Length of the data set of random images, in samples."
    )


class MaskedImages:
    """Images, each with an order of its patches: the first of them are seen, the others masked.
    It is drawn as the crop is: from the seed and the position in the run."""

    def __init__(self, images: Images, num_patches: int) -> None:
        self.images, self.num_patches = images, num_patches
        self.fingerprint = f"{images.fingerprint}-{num_patches}"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.at(index, index)

    def at(self, index: int, position: int) -> dict[str, Any]:
        import numpy as np
        import torch

        draws = np.random.default_rng((self.images.seed, position, MASKS))
        order = torch.from_numpy(draws.permutation(self.num_patches))
        return {"pixels": self.images.at(index, position)["pixels"], "order": order}


class MaskedAutoencoder(Workload):
    Model = MAEModel
    Data = MAEData
    unit = "samples"
    attention = "full"
    meta_init = True
    from_transformers = True
    preloads = ("paceline.workloads.hf.preloaded",)
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

        known, data = mae_config(config.model.hf_config), config.data
        if data.path_train != SYNTHETIC:
            if split == "val" and data.path_eval == "auto" and data.val_fraction == 0:
                return None
            images = Images(
                data, split, known.image_size, known.num_channels, config.train.seed, self.prepared
            )
            return MaskedImages(images, num_patches(known))
        if split == "val":
            return None
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

    def export(self, request: ExportRequest) -> Exported:
        from paceline.workloads.mae.export import export_mae

        return export_mae(request)

    def flops(self, config: Any) -> float:
        from paceline.workloads.mae.model import flops_per_sample, mae_config

        return flops_per_sample(mae_config(config.model.hf_config))

    def block_positions(self, config: Any) -> Sequence[int]:
        from paceline.workloads.mae.model import block_positions, mae_config

        return block_positions(mae_config(config.model.hf_config))

    def prepare(self, config: Any, say: Callable[[str], None]) -> dict[str, Any]:
        return prepare_images(config.data, say)

    def problems(self, config: Any) -> Sequence[Finding]:
        from paceline.workloads.mae.model import check_mae, mae_config

        known = mae_config(config.model.hf_config)
        return (
            *check_mae(config.model.hf_config),
            *_image_problems(config.data, known.num_channels),
        )


def _image_problems(data: MAEData, channels: int) -> Iterator[Finding]:
    if data.path_train == SYNTHETIC:
        for key in sorted(data.model_dump(exclude_defaults=True).keys() & IMAGE_KEYS):
            what = "images are random: it has no effect"
            yield Finding.warning(f"data.{key}", what, hint="data.path_train")
        return
    if channels not in MODES:
        what = f"{channels} channels; images are read as grey (1) or RGB (3)"
        yield Finding.error("model.hf_config.num_channels", what)
    for key, given in (("mean", data.mean), ("std", data.std)):
        if given and len(given) != channels:
            what = f"{len(given)} numbers for {channels} channels"
            yield Finding.error(f"data.{key}", what, hint="one per channel")
