"""Triton kernels that choose blocks: scores of compressed keys, and the best n of each query.

The weights of heads (T x S/d each) are never whole in memory. The first kernel holds the queries of
a few tokens with all heads of a group, walks over selection blocks and writes one score per block,
for a piece of the sequence at a time; the second takes the n best of each row.

    weights     p = exp(q k - lse): the forward pass of the compressed branch has left lse
    of a group  summed over its heads
    of a block  eq. 9: a compression block that begins in block j gives the share of its tokens that
                lie in j to j, and the rest to j + 1; l <= l', so there is no third
"""

import triton
import triton.language as tl

from paceline.attention.banded import LOG2E

FORCED = tl.constexpr(1e30)


@triton.jit
def nsa_score(
    q_ptr, k_ptr, lse_ptr, first_ptr, scores_ptr, T, t_base, t_count, M, J, H, G, scale,
    L: tl.constexpr, D: tl.constexpr, L_SEL: tl.constexpr, BJ: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write the scores of blocks (B, G, t, J), of those that a query may choose."""
    PER: tl.constexpr = L_SEL // D  # compressed keys that begin in a block
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    m = tl.arange(0, TQ * RP)
    t_M, r_M = t_base + tile * TQ + m // RP, m % RP
    last = tl.minimum(t_base + t_count, T) - 1
    is_real = (t_M <= last) & (r_M < R)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    q = tl.load(q_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
    first_M = tl.load(first_ptr + b * T + t_M, mask=is_real, other=0)
    t_Q = tile * TQ + tl.arange(0, TQ)
    # What a compressed key gives to the block after its own, and to its own, over D.
    within = tl.arange(0, PER) * D
    spills = tl.maximum(within + L - L_SEL, 0).to(tl.float32) / D
    stays = L / D - spills
    j = tl.arange(0, BJ)
    c = tl.arange(0, BJ * PER)
    out = ((b * G + g).to(tl.int64) * t_count + t_Q) * J
    last = tl.minimum(t_base + tile * TQ + TQ - 1, last)
    start = tl.min(tl.where(is_real, first_M, T)) // L_SEL // BJ * BJ
    for j0 in range(start, last // L_SEL + 1, BJ):
        i_C = j0 * PER + c
        place = ((b * M + i_C).to(tl.int64) * G + g) * E
        k = tl.load(k_ptr + place[None, :] + e[:, None], mask=(i_C < M)[None, :], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        begins = i_C * D
        sees = (begins[None, :] + (L - 1) <= t_M[:, None]) & (begins[None, :] >= first_M[:, None])
        p = tl.where(sees & (i_C < M)[None, :], tl.exp2(s - lse[:, None]), 0.0)
        group = tl.reshape(tl.sum(tl.reshape(p, [TQ, RP, BJ * PER]), axis=1), [TQ, BJ, PER])
        block = j0 + j
        inside = (t_base + t_Q <= last)[:, None] & (block < J)[None, :]
        at = scores_ptr + out[:, None] + block[None, :]
        stay = tl.sum(group * stays[None, None, :], axis=2)
        spill = tl.sum(group * spills[None, None, :], axis=2)
        # Two arrays, one number apart: the second kernel adds what spills from the block before.
        tl.store(at, stay, mask=inside)
        tl.store(at + tl.num_programs(1).to(tl.int64) * t_count * J, spill, mask=inside)


@triton.jit
def nsa_pick(
    scores_ptr, first_ptr, blocks_ptr, T, t_base, t_count, J, G,
    L_SEL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, JP: tl.constexpr, TQ: tl.constexpr,
):  # fmt: skip
    """Write the best N blocks of each query, ascending, -1 where there are fewer: its own, the one
    before and the first always; of equal scores the earlier."""
    bg = tl.program_id(1)
    t_Q = tl.program_id(0) * TQ + tl.arange(0, TQ)
    token = t_base + t_Q
    is_real = (t_Q < t_count) & (token < T)
    first = tl.load(first_ptr + bg // G * T + token, mask=is_real, other=0)
    own, begin = (token // L_SEL)[:, None], (first // L_SEL)[:, None]
    j = tl.arange(0, JP)[None, :]
    may = (j <= own) & (j >= begin) & is_real[:, None]
    at = scores_ptr + (bg.to(tl.int64) * t_count + t_Q)[:, None] * J + j
    score = tl.load(at, mask=may, other=-1.0)
    spilt = at + tl.num_programs(1).to(tl.int64) * t_count * J - 1
    score += tl.load(spilt, mask=may & (j > begin), other=0.0)
    score = tl.where(may & ((j == own) | (j == own - 1) | (j == begin)), FORCED, score)
    # Marked one by one; then the places of those that are marked follow from a running count.
    left = tl.where(may, score, -1.0)
    for _ in range(N):
        best = tl.max(left, axis=1)
        where = tl.min(tl.where((left == best[:, None]) & (left >= 0), j, JP), axis=1)
        left = tl.where(j == where[:, None], -2.0, left)
    taken = left == -2.0
    place = tl.cumsum(taken.to(tl.int32), axis=1) - 1
    out = blocks_ptr + ((bg // G * T + token).to(tl.int64) * G + bg % G)[:, None] * N
    n = tl.arange(0, NP)[None, :]
    num = tl.sum(taken.to(tl.int32), axis=1)[:, None]
    tl.store(out + n, tl.full([TQ, NP], -1, tl.int32), mask=(n >= num) & (n < N) & is_real[:, None])
    tl.store(out + place, tl.broadcast_to(j, [TQ, JP]), mask=taken)
