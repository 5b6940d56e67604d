"""Causal attention by name, and a cache of keys and values for generation.

It is spelt out, goes through SDPA, or through FlexAttention. Which kernel SDPA takes is a setting
of the process (train/torch_settings.py:apply_policy), not of the call.

Shape letters: B batch, T tokens, S keys, H query heads, K key/value heads, E head width.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(impl: str, q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Any = None) -> Tensor:
    """Compute causal attention, (B, H, T, E). `impl` is eager, flex, or any name that SDPA
    serves; `mask` is what `keep_apart` returned for it, or a layer's `Seen`, where tokens before
    these are known."""
    if isinstance(mask, Seen):
        return mask.attend(q_BHTE, k_BKSE, v_BKSE)
    if impl == "eager":
        return _spelt_out(q_BHTE, k_BKSE, v_BKSE, mask)
    is_grouped = q_BHTE.shape[1] != k_BKSE.shape[1]
    if impl == "flex":
        return _flex(q_BHTE, k_BKSE, v_BKSE, is_grouped, mask)
    if impl == "efficient" and is_grouped:  # the one kernel that does not know groups
        num_groups = q_BHTE.shape[1] // k_BKSE.shape[1]
        k_BKSE, v_BKSE = (x.repeat_interleave(num_groups, dim=1) for x in (k_BKSE, v_BKSE))
        is_grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKSE, v_BKSE, mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def keep_apart(impl: str, positions_BT: Tensor) -> Any:
    """Return the mask of attention that is causal and stays inside documents, whose tokens are
    counted from 0: (B, 1, T, T), True where a query may see a key; for flex a block mask, for
    nsa where each token's document begins (B, T)."""
    T = positions_BT.shape[1]
    if impl == "nsa":  # the first token of each one's document
        return (torch.arange(T, device=positions_BT.device) - positions_BT).int()
    document_BT = (positions_BT == 0).cumsum(dim=1)
    if impl == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document_BT[b, query] == document_BT[b, key])

        return create_block_mask(
            sees, len(positions_BT), None, T, T, device=str(positions_BT.device)
        )
    is_past_TT = torch.ones(T, T, dtype=torch.bool, device=positions_BT.device).tril()
    is_same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return (is_same_BTT & is_past_TT)[:, None]


def _spelt_out(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None) -> Tensor:
    """Attend by two products and a softmax, in fp32 where it would overflow."""
    H, K = q_BHTE.shape[1], k_BKSE.shape[1]
    T, S, E = q_BHTE.shape[2], k_BKSE.shape[2], q_BHTE.shape[3]
    k_BHSE = k_BKSE.repeat_interleave(H // K, dim=1)
    v_BHSE = v_BKSE.repeat_interleave(H // K, dim=1)
    scores_BHTS = (q_BHTE @ k_BHSE.transpose(-2, -1)).float() * E**-0.5
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q_BHTE.device).tril()
    weights_BHTS = scores_BHTS.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights_BHTS.to(v_BHSE.dtype) @ v_BHSE


def _flex(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, is_grouped: bool, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # with it comes the compiler

    mask = mask or _causal_mask(q_BHTE.shape[2], q_BHTE.device)
    kernel = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return kernel(q_BHTE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=is_grouped)


@cache
def _compiled_flex() -> Any:
    """Return flex_attention compiled: without a compiler it holds the whole square of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(num_tokens: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def is_past(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(is_past, None, None, num_tokens, num_tokens, device=str(device))


class Past:
    """Keys and values of the tokens so far, of all layers: a new token then costs one position.

    Rows of unequal length end together. Before a row's first token are `pads_B` places that it does
    not see; its positions count from there.
    """

    def __init__(self, num_layers: int, pads_B: Tensor, num_places: int) -> None:
        self.pads_B, self.num_places, self.num_seen = pads_B, num_places, 0
        self.has_pads = bool(pads_B.any())
        self.layers = [Seen(self) for _ in range(num_layers)]
        self.mask: Tensor | None = None

    def begin(self, T: int) -> Tensor:
        """Make room for T more tokens; return their positions (B, T)."""
        first, S = self.num_seen, self.num_seen + T
        self.num_seen = S
        query_T = torch.arange(first, S, device=self.pads_B.device)
        if T > 1 or self.has_pads:
            key_S = torch.arange(S, device=self.pads_B.device)
            is_past_TS = key_S <= query_T[:, None]
            # A place before the first token sees itself: a softmax over nothing would be NaN.
            is_own_TS = key_S == query_T[:, None]
            is_real_BTS = (key_S >= self.pads_B[:, None, None]) | is_own_TS
            self.mask = (is_past_TS & is_real_BTS)[:, None]
        else:
            self.mask = None  # the newest token sees all
        return (query_T - self.pads_B[:, None]).clamp(min=0)


class Seen:
    """One layer's part of a `Past`."""

    def __init__(self, past: Past) -> None:
        self.past = past
        self.keys_BKSE = self.values_BKSE = torch.empty(0)

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Attend from the new tokens to all that are seen, and keep the new ones."""
        B, K, T, E = k_BKTE.shape
        if not self.keys_BKSE.numel():
            self.keys_BKSE, self.values_BKSE = (
                x.new_empty(B, K, self.past.num_places, E) for x in (k_BKTE, v_BKTE)
            )
        S = self.past.num_seen
        self.keys_BKSE[:, :, S - T : S] = k_BKTE
        self.values_BKSE[:, :, S - T : S] = v_BKTE
        return F.scaled_dot_product_attention(
            q_BHTE,
            self.keys_BKSE[:, :, :S],
            self.values_BKSE[:, :, :S],
            self.past.mask,
            enable_gqa=q_BHTE.shape[1] != K,
        )
