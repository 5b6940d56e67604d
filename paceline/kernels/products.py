"""Matrix products whose weight gradient is written once, in the weight's own type.

Under autocast torch writes the gradient of an fp32 weight in bf16 and casts it: ten bytes of
traffic for each weight, and a rounding. cuBLAS sums in fp32 anyway, so it can write that itself:
four bytes. `project` says which layers are multiplied this way."""

from typing import Any

import torch
from torch import Tensor, nn


def project(layer: nn.Linear, x: Tensor, kernels: str) -> Tensor:
    """Apply a layer without a bias. A layer that replaced it computes by itself, except layers in
    fp8 that have a kernel."""
    if kernels == "triton" and type(layer) is nn.Linear:
        return linear(x, layer.weight)
    if kernels == "triton" and is_cast_whole(layer):
        from paceline.kernels import fp8  # with it comes Triton

        if getattr(layer, "is_gathered", False):
            return fp8.linear_gathered(x, layer.weight)
        return fp8.linear(x, layer.weight, getattr(layer, "is_freed", False))
    return layer(x)


def is_cast_whole(layer: nn.Module) -> bool:
    """Say whether a layer was marked by strategies/fp8.py: one scale for each of its matrices."""
    return getattr(layer, "is_cast_whole", False)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (..., D) by the rows of a weight (F, D), in the type of `x`; the weight's gradient
    has the weight's own type."""
    product: Tensor = _Linear.apply(x, weight)
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.weight_type = weight.dtype
        return multiply(x, low)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, low = ctx.saved_tensors
        (g,) = gradients
        return multiply_back(g, low), weight_gradient(g, x, ctx.weight_type)


def multiply(x: Tensor, low_FD: Tensor) -> Tensor:
    """Return x @ low.T, for any number of leading axes."""
    rows = x.flatten(0, -2) @ low_FD.t()
    return rows.unflatten(0, x.shape[:-1])


def multiply_back(g: Tensor, low_FD: Tensor) -> Tensor:
    """Return the gradient of `multiply`'s input."""
    rows = g.flatten(0, -2) @ low_FD
    return rows.unflatten(0, g.shape[:-1])


def weight_gradient(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return g.T @ x over all rows, in `dtype`."""
    g_NF, x_ND = g.flatten(0, -2), x.flatten(0, -2)
    if dtype == x.dtype:
        return g_NF.t() @ x_ND
    return sum_outer(g_NF, x_ND)


@torch.library.custom_op("paceline::sum_outer", mutates_args=())
def sum_outer(g_NF: Tensor, x_ND: Tensor) -> Tensor:
    """Return g.T @ x in fp32, of matrices in a smaller type."""
    if g_NF.is_cuda:
        return torch.mm(g_NF.t(), x_ND, out_dtype=torch.float32)
    return g_NF.t().float() @ x_ND.float()


@sum_outer.register_fake
def _(g_NF: Tensor, x_ND: Tensor) -> Tensor:
    return g_NF.new_empty((g_NF.shape[1], x_ND.shape[1]), dtype=torch.float32)


def add_outer(total_FD: Tensor, g_NF: Tensor, x_ND: Tensor, is_first: bool) -> None:
    """Add g.T @ x to `total`, which is fp32, in place; the first one overwrites what is there."""
    if not g_NF.is_cuda or g_NF.dtype == torch.float32:
        total_FD.addmm_(g_NF.t().float(), x_ND.float(), beta=0 if is_first else 1)
    elif is_first:
        torch.mm(g_NF.t(), x_ND, out_dtype=torch.float32, out=total_FD)
    else:
        torch.addmm(total_FD, g_NF.t(), x_ND, out_dtype=torch.float32, out=total_FD)
