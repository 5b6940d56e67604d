"""A linear layer in fp8 whose matrices are cast once, for all of its products.

Tensor cores multiply rows by rows in fp8, so each matrix is needed in both layouts:

    output           x (N, D)        times    w (F, D)
    gradient of x    g (N, F)        times    w transposed (D, F)
    gradient of w    g transposed    times    x transposed (D, N)

torch.compile casts again for every product, and writes what is transposed byte by byte. Here one
kernel reads a tile once and writes it both ways; what backward needs is kept in 8 bits. The numbers
are those of torchao's recipe `tensorwise`: one scale for each matrix, gradients in e5m2, all else
in e4m3; weights in fp32 are rounded to the type of the input first. Weights that FSDP has gathered
in fp8 come cast, as torchao's tensors, and are transposed for backward.

Shape letters: N rows (all leading axes), D inputs, F outputs.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

NUMBERS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # a matrix of zeros has a scale too
MULTIPLE = 16  # of rows that a product sums over; rows of zeros are added to reach it
TILE, WARPS = 128, 4


def linear(x: Tensor, weight_FD: Tensor, is_freed: bool = False) -> Tensor:
    """Multiply (..., D) by the rows of a weight in fp8. The product has the type of `x`, the
    weight's gradient that of the weight. `is_freed`: the weight is freed after forward, gathered
    again for backward, and cast again there, so that nothing of it stays in between."""
    product: Tensor = _Linear.apply(x, weight_FD, is_freed)
    return product


def linear_gathered(x: Tensor, weight_FD: Tensor) -> Tensor:
    """Multiply by a weight that was gathered in fp8, with its scale. Backward keeps only the weight
    itself, whether it is freed in between or not."""
    product: Tensor = _Gathered.apply(x, weight_FD)
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Tensor, is_freed: bool) -> Tensor:
        x_ND, w_FD = as_rows(x), weight_FD.to(x.dtype)
        of_x, of_w = scale_of(x_ND, NUMBERS), scale_of(w_FD, NUMBERS)
        low_ND, low_DN = cast_both(x_ND, of_x, False)
        if is_freed:  # not by the same operation as in backward: a compiler would keep its result
            low_FD, kept = cast(w_FD, of_w, NUMBERS), weight_FD
        else:
            low_FD, kept = cast_both(w_FD, of_w, False)
        ctx.save_for_backward(low_DN, kept, of_x, of_w)
        ctx.weight_type, ctx.is_freed = weight_FD.dtype, is_freed
        y_NF = multiply(low_ND, low_FD, of_x, of_w, x.dtype, is_fast=True)
        return as_shaped(y_NF, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        low_DN, kept, of_x, of_w = ctx.saved_tensors
        (g,) = gradients
        low_DF = cast_both(kept.to(g.dtype), of_w, False)[1] if ctx.is_freed else kept
        return *multiply_back(g, (low_DN, of_x), (low_DF, of_w), ctx.weight_type), None


# One node of a compiled graph: what a tensor of a subclass is made of is for the graph to find, not
# for Dynamo, which would take it for an input without a gradient.
@torch.compiler.allow_in_graph
class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_FD: Any) -> Tensor:
        x_ND = as_rows(x)
        of_x = scale_of(x_ND, NUMBERS)
        low_ND, low_DN = cast_both(x_ND, of_x, False)
        ctx.save_for_backward(low_DN, weight_FD, of_x)
        y_NF = multiply(low_ND, weight_FD._data, of_x, weight_FD._scale, x.dtype, is_fast=True)
        return as_shaped(y_NF, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        low_DN, weight_FD, of_x = ctx.saved_tensors
        (g,) = gradients
        low_DF = turn(weight_FD._data, g)
        return multiply_back(g, (low_DN, of_x), (low_DF, weight_FD._scale), weight_FD.dtype)


def as_rows(x: Tensor) -> Tensor:
    """Return all leading axes as one of rows, with zeros below where they cannot be summed over."""
    x_ND = x.flatten(0, -2)
    num_rows = x_ND.shape[0]  # not len(), nor numel(): a compiled graph would be of this number
    missing = -num_rows % MULTIPLE if num_rows else MULTIPLE
    return F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND


def as_shaped(y_NF: Tensor, x: Tensor) -> Tensor:
    """Return rows with the leading axes of what they were computed from."""
    axes = x.shape[:-1]
    return y_NF[: prod(axes)].unflatten(0, axes)


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor that makes a matrix's largest number the largest of the type."""
    largest = x.detach().abs().amax().double().clamp(min=SMALLEST)
    return (torch.finfo(dtype).max / largest).float()


def multiply(
    a_MK: Tensor,
    b_NK: Tensor,
    of_a: Tensor,
    of_b: Tensor,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """Return a times b transposed, of scaled matrices in fp8. Fast sums have fewer digits than
    fp32: enough for outputs, not for gradients."""
    inverse = of_a.reciprocal(), of_b.reciprocal()
    if not a_MK.is_cuda:  # the same numbers, multiplied in fp32
        return ((a_MK.float() * inverse[0]) @ (b_NK.float() * inverse[1]).t()).to(dtype)
    return torch._scaled_mm(a_MK, b_NK.t(), *inverse, out_dtype=dtype, use_fast_accum=is_fast)


def multiply_back(
    g: Tensor, x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], weight_type: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight, both of which come transposed, with scales."""
    (low_DN, of_x), (low_DF, of_w) = x, weight
    g_NF = as_rows(g)
    of_g = scale_of(g_NF, GRADIENTS)
    low_NF, low_FN = cast_both(g_NF, of_g, True)
    d_x = multiply(low_NF, low_DF, of_g, of_w, g.dtype)
    d_w = multiply(low_FN, low_DN, of_g, of_x, weight_type)
    return as_shaped(d_x, g), d_w


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a scaled matrix in fp8."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


@torch.library.custom_op("paceline::cast_both", mutates_args=())
def cast_both(x_ND: Tensor, scale: Tensor, is_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return a scaled matrix in fp8, as it is (N, D) and transposed (D, N)."""
    dtype = GRADIENTS if is_gradient else NUMBERS
    limit, (N, D) = torch.finfo(dtype).max, x_ND.shape
    # Triton 3.6 miscompiles tiles that are read in fp32 and transposed in 8 bits.
    if not x_ND.is_cuda or x_ND.dtype == torch.float32 or N % TILE or D % TILE:
        low = cast(x_ND, scale, dtype)
        return low, low.t().contiguous()
    x_ND = x_ND.contiguous()
    plain, turned = torch.empty_like(x_ND, dtype=dtype), x_ND.new_empty((D, N), dtype=dtype)
    _cast_both[(N // TILE, D // TILE)](
        x_ND, scale, plain.view(torch.uint8), turned.view(torch.uint8), N, D, LIMIT=limit,
        IS_GRADIENT=is_gradient, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return plain, turned


@cast_both.register_fake
def _(x_ND: Tensor, scale: Tensor, is_gradient: bool) -> tuple[Tensor, Tensor]:
    dtype, (N, D) = GRADIENTS if is_gradient else NUMBERS, x_ND.shape
    return x_ND.new_empty((N, D), dtype=dtype), x_ND.new_empty((D, N), dtype=dtype)


@triton.jit
def _cast_both(x, scale, plain, turned, N, D, LIMIT: tl.constexpr, IS_GRADIENT: tl.constexpr,
               TILE: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = n[:, None] * D + d[None, :]
    wide = tl.load(x + at).to(tl.float32) * tl.load(scale)
    wide = tl.minimum(tl.maximum(wide, -LIMIT), LIMIT)
    low = wide.to(tl.float8e5 if IS_GRADIENT else tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(plain + at, low)
    tl.store(turned + d[:, None] * N + n[None, :], tl.trans(low))


@torch.library.custom_op("paceline::turn", mutates_args=())
def turn(low_ND: Tensor, after: Tensor) -> Tensor:
    """Return a matrix in fp8 transposed (D, N), only once there is a gradient: else a compiler may
    do it in forward, and keep the result."""
    N, D = low_ND.shape
    if not low_ND.is_cuda or N % TILE or D % TILE:
        return low_ND.t().contiguous()
    turned = low_ND.new_empty((D, N))
    grid = (N // TILE, D // TILE)
    _turn[grid](low_ND.contiguous().view(torch.uint8), turned.view(torch.uint8), N, D, TILE=TILE,
                num_warps=WARPS)  # fmt: skip
    return turned


@turn.register_fake
def _(low_ND: Tensor, after: Tensor) -> Tensor:
    return low_ND.new_empty(low_ND.shape[::-1])


@triton.jit
def _turn(low, turned, N, D, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(low + n[:, None] * D + d[None, :])
    tl.store(turned + d[:, None] * N + n[None, :], tl.trans(tile))
