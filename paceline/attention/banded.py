"""Triton kernels of attention over a band of keys, forward and backward.

Key i stands for tokens [i STRIDE, i STRIDE + LENGTH). A query at token t sees it when all of them
lie in [lo, t], where lo is the first token of its document, or t - WINDOW + 1 if that is later. So
one kernel serves the window (STRIDE and LENGTH 1) and compressed keys (no WINDOW).

A tile has TQ tokens times the R heads of a group as its rows (padded to RP, a power of two): keys
are loaded once for all heads of a group, and masks cut at single tokens.

Shapes: q, o (B, T, H, E), k, v (B, S, G, E), contiguous; lse, delta (B, T, H) in fp32, natural
logarithms, +inf where a query sees nothing, so that its weights exp(s - lse) are 0.
"""

from typing import Any

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(tile, first_ptr, b, T, R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr, W):  # type: ignore[no-untyped-def]
    """Return, for each row of a tile, its token, its head in the group, whether it is real, and the
    first token that it sees."""
    m = tl.arange(0, TQ * RP)
    t_M = tile * TQ + m // RP
    r_M = m % RP
    is_real = (t_M < T) & (r_M < R)
    first_M = tl.load(first_ptr + b * T + t_M, mask=is_real, other=0)
    return t_M, r_M, is_real, tl.maximum(first_M, t_M - W + 1)


@triton.jit
def _sees(t_M, lo_M, i_N, S, STRIDE: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    begin_N = i_N * STRIDE
    is_past = begin_N[None, :] + (LENGTH - 1) <= t_M[:, None]
    return is_past & (begin_N[None, :] >= lo_M[:, None]) & (i_N[None, :] < S)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, first_ptr, o_ptr, lse_ptr, T, S, H, G, W, scale,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    t_M, r_M, is_real, lo_M = _rows(tile, first_ptr, b, T, R, RP, TQ, W)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    q = tl.load(q_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    # The first token of the tile sees furthest back, its last one furthest ahead.
    begin = tl.min(tl.where(is_real, lo_M, T)) // STRIDE // BN * BN
    last = tl.minimum(tile * TQ + TQ, T) - 1
    end = tl.minimum(tl.where(last + 1 < LENGTH, 0, (last + 1 - LENGTH) // STRIDE + 1), S)
    top = tl.full([TQ * RP], float("-inf"), tl.float32)
    total = tl.zeros([TQ * RP], tl.float32)
    acc = tl.zeros([TQ * RP, E], tl.float32)
    n = tl.arange(0, BN)
    kv = (b * S * G + g).to(tl.int64) * E
    for at in range(begin, end, BN):
        i_N = at + n
        inside = i_N < S
        place = kv + i_N.to(tl.int64) * G * E
        k = tl.load(k_ptr + place[None, :] + e[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        s = tl.where(_sees(t_M, lo_M, i_N, S, STRIDE, LENGTH), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("inf"))
    tl.store(o_ptr + row_M[:, None] * E + e[None, :], acc.to(o_ptr.dtype.element_ty),
             mask=is_real[:, None])  # fmt: skip
    tl.store(lse_ptr + row_M, lse, mask=is_real)


@triton.jit
def _delta(o_ptr, do_ptr, delta_ptr, num_rows, BM: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum o do over the head: what the softmax's gradient takes from every score."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    at = row[:, None] * E + tl.arange(0, E)[None, :]
    inside = (row < num_rows)[:, None]
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(o * do, axis=1), mask=row < num_rows)


@triton.jit
def _backward_q(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, first_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, T, S, H, G, W, scale,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    t_M, r_M, is_real, lo_M = _rows(tile, first_ptr, b, T, R, RP, TQ, W)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    q = tl.load(q_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    do = tl.load(do_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + row_M, mask=is_real, other=0.0)
    begin = tl.min(tl.where(is_real, lo_M, T)) // STRIDE // BN * BN
    last = tl.minimum(tile * TQ + TQ, T) - 1
    end = tl.minimum(tl.where(last + 1 < LENGTH, 0, (last + 1 - LENGTH) // STRIDE + 1), S)
    dq = tl.zeros([TQ * RP, E], tl.float32)
    n = tl.arange(0, BN)
    kv = (b * S * G + g).to(tl.int64) * E
    for at in range(begin, end, BN):
        i_N = at + n
        inside = i_N < S
        place = kv + i_N.to(tl.int64) * G * E
        k = tl.load(k_ptr + place[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.exp2(s - lse[:, None])
        p = tl.where(_sees(t_M, lo_M, i_N, S, STRIDE, LENGTH), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(dq_ptr + row_M[:, None] * E + e[None, :], (dq * scale).to(dq_ptr.dtype.element_ty),
             mask=is_real[:, None])  # fmt: skip


@triton.jit
def _backward_kv(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, first_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    T, S, H, G, W, scale, SPAN,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Take BN keys and the queries that may see them, at most SPAN tokens of those: a key that all
    later queries see would else keep one multiprocessor busy alone. Then parts are added (ADDS)."""
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    e, n = tl.arange(0, E), tl.arange(0, BN)
    i_N = tl.program_id(0) * BN + n
    inside = i_N < S
    place = (b * S * G + g).to(tl.int64) * E + i_N.to(tl.int64) * G * E
    i_begin = tl.program_id(0) * BN
    t_begin = (i_begin * STRIDE + LENGTH - 1) // TQ * TQ + tl.program_id(2) * SPAN
    t_end = tl.minimum(tl.minimum(T, (i_begin + BN - 1) * STRIDE + W), t_begin + SPAN)
    if t_begin < t_end:
        k = tl.load(k_ptr + place[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=inside[:, None], other=0.0)
        dk = tl.zeros([BN, E], tl.float32)
        dv = tl.zeros([BN, E], tl.float32)
        for t0 in range(t_begin, t_end, TQ):
            t_M, r_M, is_real, lo_M = _rows(t0 // TQ, first_ptr, b, T, R, RP, TQ, W)
            row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
            at = row_M[:, None] * E + e[None, :]
            q = tl.load(q_ptr + at, mask=is_real[:, None], other=0.0)
            do = tl.load(do_ptr + at, mask=is_real[:, None], other=0.0)
            lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
            delta = tl.load(delta_ptr + row_M, mask=is_real, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
            p = tl.exp2(s - lse[:, None])
            p = tl.where(_sees(t_M, lo_M, i_N, S, STRIDE, LENGTH), p, 0.0)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
        out = place[:, None] + e[None, :]
        if ADDS:
            tl.atomic_add(dk_ptr + out, dk * scale, mask=inside[:, None], sem="relaxed")
            tl.atomic_add(dv_ptr + out, dv, mask=inside[:, None], sem="relaxed")
        else:
            tl.store(dk_ptr + out, dk * scale, mask=inside[:, None])
            tl.store(dv_ptr + out, dv, mask=inside[:, None])


forward_kernel: Any = _forward
delta_kernel: Any = _delta
backward_q_kernel: Any = _backward_q
backward_kv_kernel: Any = _backward_kv
