"""SwiGLU and its second product, with one Triton kernel each way.

torch.compile puts the gradients of gate and up together by a concat that computes both for each
half, at 60 % of the memory's rate. One kernel that knows that both halves lie side by side reads
three tensors of the hidden width, writes two, and reaches nine tenths of it
(benchmarks/results/gpu_kernels_h200.txt).

Shape letters: N rows (all leading axes), F width inside SwiGLU, D model width.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.products import multiply, multiply_back, weight_gradient

BLOCK = 2048


def swiglu_down(gate_up: Tensor, down_DF: Tensor) -> Tensor:
    """Return (silu(gate) * up) @ down.T of (..., 2F), the gates before the ups."""
    product: Tensor = _SwiGLUDown.apply(gate_up, down_DF)
    return product


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of (..., 2F), for a second product that is computed elsewhere."""
    hidden: Tensor = _SwiGLU.apply(gate_up)
    return hidden


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return activate(gate_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        return activate_back(gate_up, gradients[0])


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, down_DF: Tensor) -> Tensor:
        low, hidden = down_DF.to(gate_up.dtype), activate(gate_up)
        ctx.save_for_backward(gate_up, hidden, low)
        ctx.weight_type = down_DF.dtype
        return multiply(hidden, low)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate_up, hidden, low = ctx.saved_tensors
        (g,) = gradients
        d_gate_up = activate_back(gate_up, multiply_back(g, low))
        return d_gate_up, weight_gradient(g, hidden, ctx.weight_type)


@torch.library.custom_op("paceline::swiglu", mutates_args=())
def activate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., F)."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    hidden = gate_up.new_empty((*gate_up.shape[:-1], width))
    _swiglu_forward[_grid(hidden)](gate_up, hidden, width, BLOCK=BLOCK)
    return hidden


@activate.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("paceline::swiglu_back", mutates_args=())
def activate_back(gate_up: Tensor, d_hidden: Tensor) -> Tensor:
    """Return the gradient of `gate_up`."""
    gate_up, d_hidden = gate_up.contiguous(), d_hidden.contiguous()
    d_gate_up, width = torch.empty_like(gate_up), d_hidden.shape[-1]
    _swiglu_backward[_grid(d_hidden)](gate_up, d_hidden, d_gate_up, width, BLOCK=BLOCK)
    return d_gate_up


@activate_back.register_fake
def _(gate_up: Tensor, d_hidden: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _grid(hidden: Tensor) -> tuple[int, int]:
    width = hidden.shape[-1]
    return hidden.numel() // width, triton.cdiv(width, BLOCK)


@triton.jit
def _swiglu_forward(gate_up, hidden, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=is_in).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=is_in).to(tl.float32)
    tl.store(hidden + row * width + column, gate * tl.sigmoid(gate) * up, mask=is_in)


@triton.jit
def _swiglu_backward(gate_up, d_hidden, d_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    first = row * 2 * width + column
    gate = tl.load(gate_up + first, mask=is_in).to(tl.float32)
    up = tl.load(gate_up + first + width, mask=is_in).to(tl.float32)
    g = tl.load(d_hidden + row * width + column, mask=is_in).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    # d silu = sigmoid + gate * sigmoid * (1 - sigmoid) = sigmoid + silu * (1 - sigmoid)
    tl.store(d_gate_up + first, g * up * (sigmoid + silu * (1 - sigmoid)), mask=is_in)
    tl.store(d_gate_up + first + width, g * silu, mask=is_in)
