"""ViT-MAE of transformers: a quarter of the patches is encoded, and the others are predicted.

Shape letters: B batch, C channels, H height and width in pixels, N patches, P pixels of a patch
(over all channels), D width.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.records import Finding
from paceline.workloads.hf.model import (
    WHERE,
    build_config,
    build_from_config,
    check_keys,
    init_module,
    require_extra,
)

TINY = 1e-6  # as in the paper's code
WAVELENGTH = 10000.0


def mae_config(given: dict[str, Any]) -> Any:
    config = build_config(require_extra().ViTMAEConfig, given)
    for key in ("image_size", "patch_size"):
        if not isinstance(getattr(config, key), int):
            raise ConfigError(
                f"{WHERE}.{key}={getattr(config, key)}, and images and patches are square here\n"
                "hint: give it one number"
            )
    return config


def build_mae(given: dict[str, Any], impl: str) -> nn.Module:
    """Build a model from pixels (B, C, H, H) and the order of their patches (B, N) to predictions
    and mask."""
    model = build_from_config("AutoModelForPreTraining", mae_config(given), impl)
    model.forward = MethodType(_reconstruct, model)
    return model


def _reconstruct(model: Any, pixels_BCHH: Tensor, order_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted patches (B, N, P), and 1 where a patch was masked (B, N). It stands in
    for transformers' forward, which has the loss in it: under FSDP that would compare in the 8 bits
    of bf16, because FSDP rounds the pixels on their way in."""
    encoded = model.vit(pixels_BCHH, noise=order_BN)
    decoded = model.decoder(encoded.last_hidden_state, encoded.ids_restore)
    return decoded.logits, encoded.mask


def loss_sum(config: Any, pixels_BCHH: Tensor, outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error of the masked patches, averaged in each sample and summed over
    samples."""
    logits_BNP, mask_BN = outputs
    target_BNP = patches_of(pixels_BCHH.float(), config.patch_size)
    if config.norm_pix_loss:
        spread = target_BNP.var(dim=-1, keepdim=True)
        target_BNP = (target_BNP - target_BNP.mean(dim=-1, keepdim=True)) / (spread + TINY) ** 0.5
    error_BN = (logits_BNP.float() - target_BNP).square().mean(dim=-1)
    return ((error_BN * mask_BN).sum(dim=1) / mask_BN.sum(dim=1)).sum()


def patches_of(pixels_BCHH: Tensor, side: int) -> Tensor:
    """Turn (B, C, H, H) into (B, N, P): row by row, and the channels of a pixel side by side."""
    B, C, H, W = pixels_BCHH.shape
    tiles = pixels_BCHH.reshape(B, C, H // side, side, W // side, side)
    return tiles.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, side * side * C)


@torch.no_grad()
def init_mae_module(model: Any, name: str, module: nn.Module) -> None:
    """First values of one module, as transformers means them.

    Its own constructor (5.22) leaves positions and tokens at zero: one initialiser is skipped
    because a child is marked as done, the other is undone by a later pass.
    """
    std = model.config.initializer_range
    if module is model.vit.embeddings:
        module.position_embeddings.copy_(_positions_like(module.position_embeddings))
        nn.init.normal_(module.cls_token, std=std)
    elif module is model.decoder:
        module.decoder_pos_embed.copy_(_positions_like(module.decoder_pos_embed))
        nn.init.normal_(module.mask_token, std=std)
    elif module is model.vit.embeddings.patch_embeddings.projection:
        # It multiplies a flattened patch: initialise it as that matrix, not as a convolution.
        nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1))
        nn.init.zeros_(module.bias)
    else:
        init_module(model, name, module)


def _positions_like(table: Tensor) -> Tensor:
    side = round((table.shape[1] - 1) ** 0.5)
    return position_table(side, table.shape[2])


def position_table(side: int, width: int) -> Tensor:
    """Fixed positions (1, 1 + side * side, width): zeros for the class token, then for each patch
    sines and cosines of its column and of its row."""
    omega = 1.0 / WAVELENGTH ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side, dtype=torch.float64).outer(omega)
    waves = torch.cat((angles.sin(), angles.cos()), dim=1)
    table = torch.cat((waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)), dim=1)
    return torch.cat((torch.zeros(1, width), table.float())).unsqueeze(0)


def num_patches(config: Any) -> int:
    return int(config.image_size // config.patch_size) ** 2


def block_positions(config: Any) -> list[int]:
    """Count positions per block: the encoder sees the patches that are not masked, the decoder all;
    both a class token."""
    patches = num_patches(config)
    seen = int(patches * (1 - config.mask_ratio))
    encoder = [1 + seen] * config.num_hidden_layers
    return encoder + [1 + patches] * config.decoder_num_hidden_layers


def flops_per_sample(config: Any) -> float:
    """Forward and backward FLOPs of an image, as torch counts them: products of matrices only.

    Backward is twice the forward, but for the patch embedding: nothing needs the pixels' gradient.
    """
    patches, pixels = num_patches(config), config.patch_size**2 * config.num_channels
    seen = int(patches * (1 - config.mask_ratio)) + 1  # and the class token
    embed = 2 * patches * pixels * config.hidden_size
    encoder = config.num_hidden_layers * _layer_flops(
        seen, config.hidden_size, config.intermediate_size
    )
    between = 2 * seen * config.hidden_size * config.decoder_hidden_size
    decoder = config.decoder_num_hidden_layers * _layer_flops(
        patches + 1, config.decoder_hidden_size, config.decoder_intermediate_size
    )
    predict = 2 * (patches + 1) * config.decoder_hidden_size * pixels
    return 3 * (embed + encoder + between + decoder + predict) - embed


def _layer_flops(num_tokens: int, width: int, inner: int) -> int:
    matrices = 4 * width * width + 2 * width * inner
    return 2 * num_tokens * matrices + 4 * num_tokens * num_tokens * width


def check_mae(given: dict[str, Any]) -> Iterator[Finding]:
    """Return what is wrong with the keys of `model.hf_config`."""
    yield from check_keys(given, require_extra().ViTMAEConfig)
    config = mae_config(given)
    if config.image_size % config.patch_size:
        what = (
            f"an image of {config.image_size} is not a whole number of {config.patch_size} patches"
        )
        yield _refuse("image_size", what, "make it a multiple of patch_size")
    for prefix in ("", "decoder_"):
        width = getattr(config, f"{prefix}hidden_size")
        heads = getattr(config, f"{prefix}num_attention_heads")
        if width % heads or width % 4:
            what = f"{width} must be a multiple of its {heads} heads, and of 4 for the positions"
            yield _refuse(f"{prefix}hidden_size", what, "choose another width or number of heads")
    seen = int(num_patches(config) * (1 - config.mask_ratio))
    if not 0 < seen < num_patches(config):
        what = f"{config.mask_ratio} of {num_patches(config)} patches leaves {seen} to see"
        yield _refuse("mask_ratio", what, "some patches must be seen, and some masked")


def _refuse(key: str, what: str, hint: str) -> Finding:
    return Finding.error(f"{WHERE}.{key}", what, hint)
