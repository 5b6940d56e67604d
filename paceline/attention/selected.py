"""Triton kernels of attention over the blocks that each query has chosen, forward and backward.

By queries: a program takes one token with all heads of its group, and walks over its N blocks. Keys
are loaded once a group, and nothing is written but the result. With fewer than 16 heads in a group
the tensor cores' tiles of 16 rows are half empty, so there, and in the backward pass, the work goes

by blocks: a program holds the keys of one block, and takes the queries that chose it, from the
lists that `lists.py` makes; its tiles are full whatever the heads. What a query gets from one block
is a part of its sum, and is written to the place of the pair (query, n-th block); another kernel
adds the N parts of a query. So nothing is added in an order that changes, but for keys of a block
that several programs share.

Shapes: q, o (B, T, H, E), k, v (B, S, G, E), blocks (B, T, G, N), contiguous; lse (B, T, H)
and dots (B, T, H, 3) in fp32; banded.py has the formulas; parts (B, T, G, N, R, E).
"""

import triton
import triton.language as tl

from paceline.attention.banded import LOG2E


@triton.jit
def nsa_selected_by_query(
    q_ptr, k_ptr, v_ptr, blocks_ptr, first_ptr, o_ptr, lse_ptr, T, S, H, G, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    t, b, g = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    e, n, r = tl.arange(0, E), tl.arange(0, L), tl.arange(0, RP)
    row = ((b * T + t) * H + g * R).to(tl.int64) + r
    is_real = r < R
    q = tl.load(q_ptr + row[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    first = tl.load(first_ptr + b * T + t)
    pair = ((b * T + t).to(tl.int64) * G + g) * N
    kv = (b * S * G + g).to(tl.int64) * E
    top = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, E], tl.float32)
    for turn in range(N):
        block = tl.load(blocks_ptr + pair + turn)
        i = block * L + n
        sees = (i >= first) & (i <= t)  # of an empty place, -1, no token is
        place = kv + i.to(tl.int64) * G * E
        k = tl.load(k_ptr + place[None, :] + e[:, None], mask=sees[None, :], other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=sees[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        s = tl.where(sees[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    # Every query has chosen its own block, so it has seen itself at least.
    tl.store(o_ptr + row[:, None] * E + e[None, :],
             (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=is_real[:, None])  # fmt: skip
    tl.store(lse_ptr + row, (top + tl.log2(total)) / LOG2E, mask=is_real)


@triton.jit
def _pairs_of(order_ptr, at, end, T, t_base, t_count, H, G, bg, N: tl.constexpr,
              R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr):  # fmt: skip
    """Return the rows of the next TQ queries in a block's list: their tokens, where their heads lie
    in q and in the parts, and whether they are real."""
    m = tl.arange(0, TQ * RP)
    place = at + m // RP
    r = m % RP
    is_real = (place < end) & (r < R)
    pair = tl.load(order_ptr + place, mask=place < end, other=0)
    t = pair // N
    row = (((bg // G) * T + t).to(tl.int64) * H + (bg % G) * R) + r
    # Parts lie by (B, G, t, n), with the tokens of this piece of the sequence alone.
    part = (bg.to(tl.int64) * t_count - t_base) * N + pair
    return t, part * R + r, row, is_real


@triton.jit
def nsa_selected_by_block(
    q_ptr, k_ptr, v_ptr, first_ptr, order_ptr, item_ptr, parts_ptr, part_lse_ptr,
    T, t_base, t_count, S, H, G, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    item = item_ptr + tl.program_id(0) * 4
    bg, block = tl.load(item), tl.load(item + 1)
    begin, end = tl.load(item + 2), tl.load(item + 3)
    e, n = tl.arange(0, E), tl.arange(0, L)
    if begin < end:
        i = block * L + n
        place = ((bg // G * S + i).to(tl.int64) * G + bg % G) * E
        k = tl.load(k_ptr + place[None, :] + e[:, None], mask=(i < S)[None, :], other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=(i < S)[:, None], other=0.0)
        for at in range(begin, end, TQ):
            t, part, row, is_real = _pairs_of(
                order_ptr, at, end, T, t_base, t_count, H, G, bg, N, R, RP, TQ
            )
            first = tl.load(first_ptr + bg // G * T + t, mask=is_real, other=0)
            q = tl.load(q_ptr + row[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
            s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
            sees = (i[None, :] <= t[:, None]) & (i[None, :] >= first[:, None])
            s = tl.where(sees, s, float("-inf"))
            top = tl.max(s, axis=1)
            p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total = tl.maximum(tl.sum(p, axis=1), 1e-30)
            o = tl.dot(p.to(v.dtype), v, input_precision="ieee") / total[:, None]
            tl.store(parts_ptr + part[:, None] * E + e[None, :],
                     o.to(parts_ptr.dtype.element_ty), mask=is_real[:, None])  # fmt: skip
            tl.store(part_lse_ptr + part, top + tl.log2(total), mask=is_real)


@triton.jit
def nsa_join_parts(
    parts_ptr, part_lse_ptr, blocks_ptr, o_ptr, lse_ptr, T, t_base, t_count, H, G,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Weigh the N parts of a query by the sums that they stand for."""
    t, bg = tl.program_id(0), tl.program_id(1)
    e, r = tl.arange(0, E), tl.arange(0, RP)
    is_real = r < R
    token = (bg // G * T + t_base + t).to(tl.int64)
    chosen = blocks_ptr + (token * G + bg % G) * N
    base = (bg.to(tl.int64) * t_count + t) * N * R
    top = tl.full([RP], float("-inf"), tl.float32)
    for turn in range(N):
        there = is_real & (tl.load(chosen + turn + r * 0) >= 0)
        lse = tl.load(part_lse_ptr + base + turn * R + r, mask=there, other=float("-inf"))
        top = tl.maximum(top, lse)
    top = tl.where(is_real, top, 0.0)
    total = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, E], tl.float32)
    for turn in range(N):
        there = is_real & (tl.load(chosen + turn + r * 0) >= 0)
        at = base + turn * R + r
        lse = tl.load(part_lse_ptr + at, mask=there, other=float("-inf"))
        part = tl.load(parts_ptr + at[:, None] * E + e[None, :], mask=there[:, None], other=0.0)
        weight = tl.exp2(lse - top)
        total += weight
        acc += weight[:, None] * part.to(tl.float32)
    total = tl.where(is_real, total, 1.0)
    row = token * H + bg % G * R + r
    tl.store(o_ptr + row[:, None] * E + e[None, :],
             (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=is_real[:, None])  # fmt: skip
    tl.store(lse_ptr + row, (top + tl.log2(total)) / LOG2E, mask=is_real)


@triton.jit
def nsa_selected_backward(
    q_ptr, k_ptr, v_ptr, first_ptr, grad_ptr, lse_ptr, dots_ptr, gates_ptr, order_ptr, item_ptr,
    parts_ptr, dk_ptr, dv_ptr, T, t_base, t_count, S, H, G, scale,
    N: tl.constexpr, L: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    item = item_ptr + tl.program_id(0) * 4
    bg, block = tl.load(item), tl.load(item + 1)
    begin, end = tl.load(item + 2), tl.load(item + 3)
    e, n = tl.arange(0, E), tl.arange(0, L)
    if begin < end:
        i = block * L + n
        inside = (i < S)[:, None]
        place = ((bg // G * S + i).to(tl.int64) * G + bg % G) * E
        k = tl.load(k_ptr + place[:, None] + e[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=inside, other=0.0)
        dk = tl.zeros([L, E], tl.float32)
        dv = tl.zeros([L, E], tl.float32)
        for at in range(begin, end, TQ):
            t, part, row, is_real = _pairs_of(
                order_ptr, at, end, T, t_base, t_count, H, G, bg, N, R, RP, TQ
            )
            first = tl.load(first_ptr + bg // G * T + t, mask=is_real, other=0)
            lie = row[:, None] * E + e[None, :]
            q = tl.load(q_ptr + lie, mask=is_real[:, None], other=0.0)
            grad = tl.load(grad_ptr + lie, mask=is_real[:, None], other=0.0)
            lse = tl.load(lse_ptr + row, mask=is_real, other=float("inf")) * LOG2E
            dots = tl.load(dots_ptr + row * 3 + 1, mask=is_real, other=0.0)
            gate = tl.load(gates_ptr + row * 3 + 1, mask=is_real, other=0.0).to(tl.float32)
            # Keys as rows: the two products with weights then take them as is, not transposed.
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
            sees = (i[:, None] <= t[None, :]) & (i[:, None] >= first[None, :])
            p = tl.where(sees, tl.exp2(s - lse[None, :]) * gate[None, :], 0.0)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
            ds = (p * (dp - dots[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            dq = tl.dot(tl.trans(ds), k, input_precision="ieee") * scale
            tl.store(parts_ptr + part[:, None] * E + e[None, :],
                     dq.to(parts_ptr.dtype.element_ty), mask=is_real[:, None])  # fmt: skip
        out = place[:, None] + e[None, :]
        tl.atomic_add(dk_ptr + out, dk * scale, mask=inside, sem="relaxed")
        tl.atomic_add(dv_ptr + out, dv, mask=inside, sem="relaxed")


@triton.jit
def nsa_sum_parts(
    parts_ptr, blocks_ptr, dq_ptr, T, t_base, t_count, H, G,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Add the N parts of a query's gradient to what other branches have written."""
    t, bg = tl.program_id(0), tl.program_id(1)
    e, r = tl.arange(0, E), tl.arange(0, RP)
    token = (bg // G * T + t_base + t).to(tl.int64)
    chosen = blocks_ptr + (token * G + bg % G) * N
    base = (bg.to(tl.int64) * t_count + t) * N * R
    row = token * H + bg % G * R + r
    out = row[:, None] * E + e[None, :]
    acc = tl.load(dq_ptr + out, mask=(r < R)[:, None], other=0.0).to(tl.float32)
    for turn in range(N):
        there = (r < R) & (tl.load(chosen + turn + r * 0) >= 0)
        at = (base + turn * R + r)[:, None] * E + e[None, :]
        acc += tl.load(parts_ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
    tl.store(dq_ptr + out, acc.to(dq_ptr.dtype.element_ty), mask=(r < R)[:, None])
