"""Rotary position embedding between the product that makes q, k and v and attention: one Triton
kernel each way.

Forward it reads q and k where the product left them and writes them rotated; v is a view. Backward
it rotates the gradients of q and k back and writes them, with v's, side by side, where the
product's own backward pass reads them: there is no concat, no negation, no slice.

Shape letters: B batch, T tokens, H query heads, K key/value heads, E head width, X all of q, k and
v."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def split_rotated(
    qkv_BTX: Tensor, rope_TE: tuple[Tensor, Tensor], num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, H, T, E) and k (B, K, T, E), rotated by their positions, and v (B, K, T, E). The
    tables hold cos and sin of each position's angles, both halves of E alike."""
    q, k, v = _SplitRotated.apply(qkv_BTX, *rope_TE, num_heads, num_kv_heads)
    return q, k, v


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = turn(qkv, cos, sin, num_heads, num_kv_heads)
        v = qkv.unflatten(-1, (-1, cos.shape[-1]))[:, :, num_heads + num_kv_heads :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_q, d_k, d_v = (g.transpose(1, 2) for g in gradients)
        return turn_back(d_q, d_k, d_v, *ctx.saved_tensors), None, None, None, None


@torch.library.custom_op("paceline::rope", mutates_args=())
def turn(
    qkv_BTX: Tensor, cos_TE: Tensor, sin_TE: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Return q (B, T, H, E) and k (B, T, K, E), rotated."""
    qkv_BTX = qkv_BTX.contiguous()
    B, T, X = qkv_BTX.shape
    E = cos_TE.shape[-1]
    q = qkv_BTX.new_empty((B, T, num_heads, E))
    k = qkv_BTX.new_empty((B, T, num_kv_heads, E))
    settings = _settings(num_heads, num_kv_heads, E)
    _rope_forward[(B * T,)](qkv_BTX, cos_TE, sin_TE, q, k, T, X, **settings)
    return q, k


@turn.register_fake
def _(
    qkv_BTX: Tensor, cos_TE: Tensor, sin_TE: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    B, T, _ = qkv_BTX.shape
    E = cos_TE.shape[-1]
    return qkv_BTX.new_empty((B, T, num_heads, E)), qkv_BTX.new_empty((B, T, num_kv_heads, E))


@torch.library.custom_op("paceline::rope_back", mutates_args=())
def turn_back(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Return the gradient of qkv (B, T, X) from those of q, k and v (B, T, heads, E)."""
    # Attention's backward pass says how it strides over B, T and heads; inside a head it is dense.
    d_q, d_k, d_v = (g if g.stride(-1) == 1 else g.contiguous() for g in (d_q, d_k, d_v))
    B, T, H, E = d_q.shape
    K = d_k.shape[2]
    d_qkv = d_q.new_empty((B, T, (H + 2 * K) * E))
    strides = [*d_q.stride()[:3], *d_k.stride()[:3], *d_v.stride()[:3]]
    tensors = (d_q, d_k, d_v, cos_TE, sin_TE, d_qkv)
    _rope_backward[(B * T,)](*tensors, T, d_qkv.shape[-1], *strides, **_settings(H, K, E))
    return d_qkv


@turn_back.register_fake
def _(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    B, T, H, E = d_q.shape
    return d_q.new_empty((B, T, (H + 2 * d_k.shape[2]) * E))


def _settings(num_heads: int, num_kv_heads: int, width: int) -> dict[str, int]:
    """A program takes one token: all its heads share the angles, which it reads once."""
    return {
        "H": num_heads,
        "K": num_kv_heads,
        "HALF": width // 2,
        "H_PAD": triton.next_power_of_2(num_heads),
        "K_PAD": triton.next_power_of_2(num_kv_heads),
        "HALF_PAD": triton.next_power_of_2(width // 2),
    }


@triton.jit
def _angles(cos, sin, position, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    column = tl.arange(0, HALF_PAD)
    at, is_in = position * 2 * HALF + column, column < HALF
    c = tl.load(cos + at, mask=is_in, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=is_in, other=0.0).to(tl.float32)
    return c[None, :], s[None, :]


@triton.jit
def _place(
    stride, NUM: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):
    """Where the first halves of NUM heads lie, `stride` apart, and which of them there are."""
    head, column = tl.arange(0, PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    return head * stride + column, (head < NUM) & (column < HALF)


@triton.jit
def _rotate(source, target, c, s, at_source, at_target, is_in, HALF: tl.constexpr):
    """Rotate pairs (e, e + HALF) by the angles; with -s it rotates them back."""
    a = tl.load(source + at_source, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(source + at_source + HALF, mask=is_in, other=0.0).to(tl.float32)
    tl.store(target + at_target, a * c - b * s, mask=is_in)
    tl.store(target + at_target + HALF, b * c + a * s, mask=is_in)


@triton.jit
def _rope_forward(
    qkv, cos, sin, q, k, T, X,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    H_PAD: tl.constexpr, K_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c, s = _angles(cos, sin, row % T, HALF, HALF_PAD)
    at, is_in = _place(2 * HALF, H, H_PAD, HALF, HALF_PAD)
    _rotate(qkv + row * X, q + row * H * 2 * HALF, c, s, at, at, is_in, HALF)
    at, is_in = _place(2 * HALF, K, K_PAD, HALF, HALF_PAD)
    _rotate(qkv + row * X + H * 2 * HALF, k + row * K * 2 * HALF, c, s, at, at, is_in, HALF)


@triton.jit
def _rope_backward(
    d_q, d_k, d_v, cos, sin, d_qkv, T, X,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    H_PAD: tl.constexpr, K_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    c, s = _angles(cos, sin, t, HALF, HALF_PAD)
    target = d_qkv + row * X
    at, is_in = _place(q_h, H, H_PAD, HALF, HALF_PAD)
    dense, _ = _place(2 * HALF, H, H_PAD, HALF, HALF_PAD)
    _rotate(d_q + b * q_b + t * q_t, target, c, -s, at, dense, is_in, HALF)
    at, is_in = _place(k_h, K, K_PAD, HALF, HALF_PAD)
    dense, _ = _place(2 * HALF, K, K_PAD, HALF, HALF_PAD)
    _rotate(d_k + b * k_b + t * k_t, target + H * 2 * HALF, c, -s, at, dense, is_in, HALF)
    at, is_in = _place(v_h, K, K_PAD, HALF, HALF_PAD)
    source, target = d_v + b * v_b + t * v_t, target + (H + K) * 2 * HALF
    for _half in tl.static_range(2):
        value = tl.load(source + at + _half * HALF, mask=is_in)
        tl.store(target + dense + _half * HALF, value, mask=is_in)
