"""Attention by name: spelt out, through torch's SDPA, or through FlexAttention.

Which kernel SDPA takes is a setting of the process (train/policy.py), not of the call.
Shape letters: B batch, T queries, S keys, H query heads, K key/value heads, E head width.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(impl: str, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Causal attention, (B, H, T, E). `impl` is eager, flex, or any name that SDPA serves."""
    if impl == "eager":
        return _spelt_out(q_BHTE, k_BKSE, v_BKSE)
    is_grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    if impl == "flex":
        return _flex(q_BHTE, k_BKSE, v_BKSE, is_grouped)
    if impl == "efficient" and is_grouped:  # the one kernel that does not know groups
        num_groups = q_BHTE.shape[1] // k_BKSE.shape[1]
        k_BKSE, v_BKSE = (x.repeat_interleave(num_groups, dim=1) for x in (k_BKSE, v_BKSE))
        is_grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=is_grouped
    )


def _spelt_out(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Two products and a softmax, in fp32 where it would overflow."""
    H, K = q_BHTE.shape[1], k_BKSE.shape[1]
    T, S, E = q_BHTE.shape[2], k_BKSE.shape[2], q_BHTE.shape[3]
    k_BHSE = k_BKSE.repeat_interleave(H // K, dim=1)
    v_BHSE = v_BKSE.repeat_interleave(H // K, dim=1)
    scores_BHTS = (q_BHTE @ k_BHSE.transpose(-2, -1)).float() * E**-0.5
    is_past_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTE.device).tril()
    weights_BHTS = scores_BHTS.masked_fill(~is_past_TS, float("-inf")).softmax(dim=-1)
    return weights_BHTS.to(v_BHSE.dtype) @ v_BHSE


def _flex(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, is_grouped: bool) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # with it comes the compiler

    mask = _causal_mask(q_BHTE.shape[2], q_BHTE.device)
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return kernel(q_BHTE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=is_grouped)


@cache
def _compiled_flex() -> Any:
    """Without a compiler flex_attention holds the whole square of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(num_tokens: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_past(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_past, None, None, num_tokens, num_tokens, device=str(device))
