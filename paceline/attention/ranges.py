"""Chosen blocks as half-open ranges of tokens, in two ways that must agree.

v1 is spelt out, token by token, to be read; v2 is tensor operations only, to be run. Blocks come as
(B, T, G, N), ascending, -1 where a place is empty; ranges go as (B, T, G, N, 2), touching blocks
merged, (0, 0) where a place is empty. Ranges end at their query: no later token is in them.
"""

import torch
from torch import Tensor


def ranges_v1(blocks_BTGN: Tensor, l_sel: int, num_tokens: int, at_T: Tensor) -> Tensor:
    """Return the ranges of the blocks, found by loops. `at_T` are the positions of the queries."""
    B, T, G, N = blocks_BTGN.shape
    found = torch.zeros(B, T, G, N, 2, dtype=torch.int32)
    for b in range(B):
        for t in range(T):
            end_of_past = min(int(at_T[t]) + 1, num_tokens)
            for g in range(G):
                merged: list[list[int]] = []
                for block in sorted(set(blocks_BTGN[b, t, g].tolist())):
                    start, end = block * l_sel, min((block + 1) * l_sel, end_of_past)
                    if block < 0 or start >= end:
                        continue
                    if merged and merged[-1][1] == start:
                        merged[-1][1] = end
                    else:
                        merged.append([start, end])
                for place, (start, end) in enumerate(merged):
                    found[b, t, g, place] = torch.tensor([start, end])
    return found.to(blocks_BTGN.device)


def ranges_v2(blocks_BTGN: Tensor, l_sel: int, num_tokens: int, at_T: Tensor) -> Tensor:
    """Return the same ranges by tensor operations, without a wait for the device.

    A run begins at a block that is not the one before it, nor the next of it; a running sum of
    beginnings numbers the runs, and each run keeps its first start and its last end.
    """
    N = blocks_BTGN.shape[-1]
    if N == 0:
        return blocks_BTGN.new_zeros(*blocks_BTGN.shape, 2, dtype=torch.int32)
    end_of_past = (at_T.to(blocks_BTGN.device).long() + 1).clamp(max=num_tokens)[:, None, None]
    start = blocks_BTGN.long() * l_sel
    end = torch.minimum(start + l_sel, end_of_past)
    is_real = (blocks_BTGN >= 0) & (start < end)
    # Empty places behind all others: neighbours are then real ones, in order.
    start, order = start.masked_fill(~is_real, torch.iinfo(torch.int64).max).sort(dim=-1)
    end, is_real = end.gather(-1, order), is_real.gather(-1, order)
    begins = is_real.clone()
    begins[..., 1:] &= start[..., 1:] > end[..., :-1]
    run = (begins.cumsum(dim=-1) - 1).clamp(min=0)
    firsts = torch.full_like(start, torch.iinfo(torch.int64).max)
    firsts.scatter_reduce_(-1, run, start, "amin")
    lasts = torch.zeros_like(end).scatter_reduce_(-1, run, end.where(is_real, 0), "amax")
    firsts = firsts.where(lasts > 0, 0)
    return torch.stack((firsts, lasts), dim=-1).int()


RANGES = {"v1": ranges_v1, "v2": ranges_v2}


def ranges_to_mask(ranges_BTGN2: Tensor, num_tokens: int) -> Tensor:
    """Return (B, G, T, S), True where a token lies in a range: steps up and down, summed."""
    B, T, G, _, _ = ranges_BTGN2.shape
    steps = torch.zeros(B, T, G, num_tokens + 1, dtype=torch.int32, device=ranges_BTGN2.device)
    start, end = ranges_BTGN2.long().unbind(dim=-1)
    ones = torch.ones_like(start, dtype=torch.int32)
    steps.scatter_add_(-1, start, ones).scatter_add_(-1, end, -ones)
    return (steps.cumsum(dim=-1)[..., :-1] > 0).transpose(1, 2)
