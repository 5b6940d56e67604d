"""Matrix products in fp8: layers of a model replaced by torchao's, as the plan says.

A layer casts its input, its weight and the gradient of its output to 8 bits, each with a scale, and
multiplies those; weights, optimizer state and everything between layers stay what they are. On a
CPU the same casts are computed and the product is taken in fp32: right, and slow. Layers of the
recipe `tensorwise` are marked: a model that has our kernels computes those by kernels/fp8.py."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.extras import require_extra
from paceline.records import Fp8Plan, Plan, Proof

EXTRA = "fp8"
# Our names are torchao's, except one.
RECIPES = {"rowwise_gw_hp": "rowwise_with_gw_hp"}


def load_torchao(part: str) -> Any:
    """Import a part of torchao, without its compiled extensions: none is for training."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    return require_extra(f"torchao.{part}", EXTRA)


def convert_layers(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Replace the layers that the plan names, in place; their weights keep their names."""
    assert plan.fp8 is not None, "precision is fp8"
    float8 = load_torchao("float8")
    wanted = set(plan.fp8.layers)
    float8.convert_to_float8_training(
        model,
        config=build_config(float8, plan.fp8, device),
        module_filter_fn=lambda module, name: name in wanted,
    )
    layer: Any
    for name, layer in model.named_modules():
        if name in wanted:  # the others are on other stages of a pipeline
            layer.is_cast_whole = plan.fp8.recipe == "tensorwise"
            layer.is_gathered = plan.fp8.gathers_fp8


def mark_freed(module: nn.Module) -> None:
    """Tell layers of our kernel that their weights are freed between forward and backward."""
    for part in module.modules():
        if getattr(part, "is_cast_whole", False):
            part.is_freed = True  # type: ignore[assignment]


def build_config(float8: Any, plan: Fp8Plan, device: torch.device) -> Any:
    name = RECIPES.get(plan.recipe, plan.recipe)
    config = float8.Float8LinearConfig.from_recipe_name(name)
    return replace(
        config, emulate=device.type != "cuda", enable_fsdp_float8_all_gather=plan.gathers_fp8
    )


def scale_after_updates(plan: Plan, optimizer: Optimizer, module: nn.Module) -> Callable[[], None]:
    """Compute the scales of all weights that are gathered in fp8 by one collective after each
    update, not one for each weight when it is gathered. Return the function that does it, for
    other code that changes weights."""
    if plan.fp8 is None or not plan.fp8.gathers_fp8:
        return lambda: None
    float8 = load_torchao("float8")

    def find_scales(*_: Any) -> None:
        float8.precompute_float8_dynamic_scale_for_fsdp(module)

    optimizer.register_step_post_hook(find_scales)
    return find_scales


def fp8_proofs(plan: Plan, module: nn.Module) -> Iterable[Proof]:
    """Show how many of this rank's layers really are torchao's."""
    if plan.fp8 is None:
        return []
    wanted = plan.fp8.layers
    if plan.pipeline is not None:
        held = {name for name, _ in module.named_parameters()}
        wanted = [layer for layer in wanted if f"{layer}.weight" in held]
    made = sum(type(part).__name__ == "Float8Linear" for part in module.modules())
    return [
        Proof(
            what="fp8 layers",
            requested=f"{len(wanted)}, {plan.fp8.recipe}",
            effective=f"{made}",
            proof="modules that torchao replaced",
            ok=made == len(wanted),
        )
    ]
