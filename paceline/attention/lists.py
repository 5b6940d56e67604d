"""Which queries chose a block: the inverse of a choice, without a wait for the device.

    order    pairs, as t N + n, block by block
    items    (P, W, 4) work for programs: b G + g, block, and from where to where in `order`

The sequence is cut into P pieces, each with lists of its own. Lists differ in length, and the first
block is in all of them: a list is cut into items of at most `longest` pairs. How many items there
are depends on the choice, but never more than W = B G J + pairs / longest: so the grid is known
without asking the device, and the last items are empty.

Pairs of a list are in the order in which programs ran, or sorted stably if the run has to be
deterministic.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Lists(NamedTuple):
    order: Tensor
    items: Tensor


@triton.jit
def nsa_count(blocks_ptr, counts_ptr, order_ptr, total, T, piece, J, GN, BG, G: tl.constexpr,
           N: tl.constexpr, FILLS: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Count the pairs of each list; or, with counts that say where the next one goes, put them
    there (FILLS). Blocks lie by (B, T, G, N)."""
    at = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    block = tl.load(blocks_ptr + at, mask=at < total, other=-1)
    t = (at // GN) % T
    bg = at // GN // T * G + at % GN // N
    chosen = block >= 0
    which = (t // piece * BG + bg) * J + block
    place = tl.atomic_add(counts_ptr + which, 1, mask=chosen, sem="relaxed")
    if FILLS:
        tl.store(order_ptr + place, (t * N + at % N).to(tl.int32), mask=chosen)


@triton.jit
def nsa_cut(begin_ptr, count_ptr, item_ptr, items_ptr, W, J, lists, LONGEST):
    """Write the items of one list."""
    which, piece = tl.program_id(0), tl.program_id(1)
    at = piece * lists + which
    begin, count, item = tl.load(begin_ptr + at), tl.load(count_ptr + at), tl.load(item_ptr + at)
    for start in range(0, count, LONGEST):
        row = items_ptr + (piece * W + item + start // LONGEST) * 4
        tl.store(row, which // J)
        tl.store(row + 1, which % J)
        tl.store(row + 2, begin + start)
        tl.store(row + 3, begin + tl.minimum(start + LONGEST, count))


def build_lists(blocks: Tensor, num_blocks: int, piece: int, longest: int) -> Lists:
    """Return the lists of a choice (B, T, G, N), `piece` tokens at a time."""
    B, T, G, N = blocks.shape
    J, P, total, BG = num_blocks, triton.cdiv(T, piece), blocks.numel(), B * G
    counts = torch.zeros(P, BG * J, dtype=torch.int32, device=blocks.device)
    order = torch.empty(total, dtype=torch.int32, device=blocks.device)
    grid = (triton.cdiv(total, 1024),)
    shape: dict[str, Any] = {"G": G, "N": N, "BM": 1024}
    nsa_count[grid](blocks, counts, order, total, T, piece, J, G * N, BG, FILLS=False, **shape)
    begin = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts) - counts
    if torch.are_deterministic_algorithms_enabled():
        order = _sorted(blocks, piece, J)
    else:
        nsa_count[grid](
            blocks, begin.clone(), order, total, T, piece, J, G * N, BG, FILLS=True, **shape
        )
    num_items = (counts + (longest - 1)) // longest
    first_item = num_items.cumsum(1, dtype=torch.int32) - num_items
    W = BG * J + triton.cdiv(B * min(piece, T) * G * N, longest)
    items = torch.zeros(P, W, 4, dtype=torch.int32, device=blocks.device)
    nsa_cut[(BG * J, P)](begin, counts, first_item, items, W, J, BG * J, longest)
    return Lists(order, items)


def _sorted(blocks: Tensor, piece: int, J: int) -> Tensor:
    """Return the pairs list by list, in each by token; empty places stand last."""
    B, T, G, N = blocks.shape
    token = torch.arange(T, device=blocks.device)[:, None, None]
    group = torch.arange(B * G, device=blocks.device).view(B, 1, G, 1)
    which = ((token // piece) * B * G + group) * J + blocks.long()
    which = which.masked_fill(blocks < 0, torch.iinfo(torch.int64).max)
    pair = (token * N + torch.arange(N, device=blocks.device)).int().expand_as(blocks)
    return pair.flatten()[which.flatten().sort(stable=True).indices]
