"""A Triton kernel that chooses blocks: scores of compressed keys, and the best n of each query.

Neither the weights of heads (T x S/d each) nor the scores of blocks (T x S/l') are ever whole in
memory: a program holds the queries of a few tokens with all heads of a group, walks over selection
blocks, and keeps its n best so far.

    weights     p = exp(q k - lse): the forward pass of the compressed branch has left lse
    of a group  summed over its heads
    of a block  eq. 9: a compression block that begins in block j gives the share of its tokens that
                lie in j to j, and the rest to j + 1; l <= l', so there is no third
    the best    a number is the score's bits above, and the block's number, from the end, below: of
                equal scores the earlier block is larger. Sorted tiles meet the kept ones reversed,
                and the larger of each pair stays (half of a bitonic merge).
"""

from typing import Any

import triton
import triton.language as tl

from paceline.attention.banded import LOG2E

FORCED = tl.constexpr(0x7F800000)  # the bits of +inf
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, lse_ptr, first_ptr, blocks_ptr, T, M, H, G, scale,
    L: tl.constexpr, D: tl.constexpr, L_SEL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = L_SEL // D  # compressed keys that begin in a block
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    m = tl.arange(0, TQ * RP)
    t_M, r_M = tile * TQ + m // RP, m % RP
    is_real = (t_M < T) & (r_M < R)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    q = tl.load(q_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
    first_M = tl.load(first_ptr + b * T + t_M, mask=is_real, other=0)
    t_Q = tile * TQ + tl.arange(0, TQ)
    first_Q = tl.load(first_ptr + b * T + t_Q, mask=t_Q < T, other=0)
    own_Q, begin_Q = t_Q // L_SEL, first_Q // L_SEL
    # What a compressed key gives to the block after its own, and to its own, over D.
    within = tl.arange(0, PER) * D
    spills = tl.maximum(within + L - L_SEL, 0).to(tl.float32) / D
    stays = L / D - spills
    j = tl.arange(0, NP)
    is_next = (j[:, None] + 1 == j[None, :]).to(tl.float32)
    c = tl.arange(0, NP * PER)
    best = tl.full([TQ, NP], -1, tl.int64)
    carry = tl.zeros([TQ], tl.float32)
    last = tl.minimum(tile * TQ + TQ, T) - 1
    start = tl.min(tl.where(t_Q < T, begin_Q, LAST)) // NP * NP
    for j0 in range(start, last // L_SEL + 1, NP):
        i_C = j0 * PER + c
        place = ((b * M + i_C).to(tl.int64) * G + g) * E
        k = tl.load(k_ptr + place[None, :] + e[:, None], mask=(i_C < M)[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        begins = i_C * D
        sees = (begins[None, :] + (L - 1) <= t_M[:, None]) & (begins[None, :] >= first_M[:, None])
        p = tl.where(sees & (i_C < M)[None, :], tl.exp2(s - lse[:, None]), 0.0)
        group = tl.sum(tl.reshape(p, [TQ, RP, NP * PER]), axis=1)
        group = tl.reshape(group, [TQ, NP, PER])
        stay = tl.sum(group * stays[None, None, :], axis=2)
        spill = tl.sum(group * spills[None, None, :], axis=2)
        shifted = tl.sum(spill[:, :, None] * is_next[None, :, :], axis=1)
        score = stay + shifted + tl.where(j[None, :] == 0, carry[:, None], 0.0)
        carry = tl.sum(tl.where(j[None, :] == NP - 1, spill, 0.0), axis=1)
        block = j0 + j[None, :]
        own, begin = own_Q[:, None], begin_Q[:, None]
        must = (block == own) | (block == own - 1) | (block == begin)
        bits = tl.where(must, FORCED, score.to(tl.int32, bitcast=True)).to(tl.int64)
        key = (bits << 32) | (block ^ LAST).to(tl.int64)
        key = tl.where((block <= own) & (block >= begin), key, -1)
        best = tl.sort(tl.maximum(best, tl.sort(key)), descending=True)
    found = tl.where((best >= 0) & (j[None, :] < N), (best & LAST).to(tl.int32) ^ LAST, LAST)
    found = tl.sort(found)
    found = tl.where(found == LAST, -1, found)
    out = ((b * T + t_Q).to(tl.int64) * G + g) * N
    tl.store(blocks_ptr + out[:, None] + j[None, :], found, mask=(t_Q < T)[:, None] & (j < N)[None, :])


choose_kernel: Any = _choose
