"""Triton kernels of attention over a band of keys, forward and backward.

Key i stands for tokens [i STRIDE, i STRIDE + LENGTH). A query at token t sees it when all of them
lie in [lo, t], where lo is the first token of its document, or t - W + 1 if that is later. So one
kernel serves the window (STRIDE and LENGTH 1) and compressed keys (W out of reach).

A tile has TQ tokens times the R heads of a group as its rows (padded to RP, a power of two): keys
are loaded once for all heads of a group. Masks are computed only for the tiles at the band's edges.

Shapes: q, o (B, T, H, E), k, v (B, S, G, E), gates (B, T, H, 3), contiguous; lse (B, T, H) in fp32,
natural logarithms, +inf where a query sees nothing, so that its weights exp(s - lse) are 0.

Backward: with out = sum of gate o over branches and grad = dL/dout, `dots` = rowsum(grad o) is the
gradient of the gate, and what the softmax's gradient takes from every score:
ds = p gate (grad v - dots), dv = (p gate) grad. No branch needs a gradient tensor of its own.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(tile, first_ptr, b, T, W, R: tl.constexpr, RP: tl.constexpr, TQ: tl.constexpr):
    """Return, for each row of a tile, its token, its head in the group, whether it is real, and the
    first token that it sees."""
    m = tl.arange(0, TQ * RP)
    t_M = tile * TQ + m // RP
    r_M = m % RP
    is_real = (t_M < T) & (r_M < R)
    first_M = tl.load(first_ptr + b * T + t_M, mask=is_real, other=0)
    return t_M, r_M, is_real, tl.maximum(first_M, t_M - W + 1)


@triton.jit
def _edges(tile, lo_M, is_real, T, S, STRIDE: tl.constexpr, LENGTH: tl.constexpr,
           TQ: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Return the range of keys that some row of the tile sees, and inside it the range that all
    rows see."""
    begin = tl.min(tl.where(is_real, lo_M, T)) // STRIDE // BN * BN
    last = tl.minimum(tile * TQ + TQ, T) - 1
    end = tl.minimum(tl.maximum(last + 1 - LENGTH + STRIDE, 0) // STRIDE, S)
    whole = (tl.max(tl.where(is_real, lo_M, 0)) + STRIDE - 1) // STRIDE
    whole = tl.minimum((whole + BN - 1) // BN * BN, end)
    seen_by_first = tl.maximum(tile * TQ + 1 - LENGTH + STRIDE, 0) // STRIDE
    return begin, whole, tl.maximum(tl.minimum(seen_by_first, S) // BN * BN, whole), end


@triton.jit
def _sees(t_M, lo_M, i_N, S, STRIDE: tl.constexpr, LENGTH: tl.constexpr):
    begin_N = i_N * STRIDE
    is_past = begin_N[None, :] + (LENGTH - 1) <= t_M[:, None]
    return is_past & (begin_N[None, :] >= lo_M[:, None]) & (i_N[None, :] < S)


@triton.jit
def _over(acc, top, total, q, k_ptr, v_ptr, kv, t_M, lo_M, begin, end, S, G, scale,
          STRIDE: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
          MASKS: tl.constexpr):  # fmt: skip
    """Add keys [begin, end) to the running sums of a tile."""
    e, n = tl.arange(0, E), tl.arange(0, BN)
    for at in range(begin, end, BN):
        i_N = at + n
        place = kv + i_N.to(tl.int64) * G * E
        k_at, v_at = k_ptr + place[None, :] + e[:, None], v_ptr + place[:, None] + e[None, :]
        if MASKS:
            k = tl.load(k_at, mask=(i_N < S)[None, :], other=0.0)
            v = tl.load(v_at, mask=(i_N < S)[:, None], other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
        if MASKS:
            s = tl.where(_sees(t_M, lo_M, i_N, S, STRIDE, LENGTH), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKS else new_top
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def nsa_band_forward(
    q_ptr, k_ptr, v_ptr, first_ptr, o_ptr, lse_ptr, T, S, H, G, W, scale,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long rows first
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    t_M, r_M, is_real, lo_M = _rows(tile, first_ptr, b, T, W, R, RP, TQ)
    begin, whole, part, end = _edges(tile, lo_M, is_real, T, S, STRIDE, LENGTH, TQ, BN)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    q = tl.load(q_ptr + row_M[:, None] * E + e[None, :], mask=is_real[:, None], other=0.0)
    top = tl.full([TQ * RP], float("-inf"), tl.float32)
    total = tl.zeros([TQ * RP], tl.float32)
    acc = tl.zeros([TQ * RP, E], tl.float32)
    kv = (b * S * G + g).to(tl.int64) * E
    acc, top, total = _over(acc, top, total, q, k_ptr, v_ptr, kv, t_M, lo_M, begin, whole, S, G,
                            scale, STRIDE, LENGTH, BN, E, True)  # fmt: skip
    acc, top, total = _over(acc, top, total, q, k_ptr, v_ptr, kv, t_M, lo_M, whole, part, S, G,
                            scale, STRIDE, LENGTH, BN, E, False)  # fmt: skip
    acc, top, total = _over(acc, top, total, q, k_ptr, v_ptr, kv, t_M, lo_M, part, end, S, G,
                            scale, STRIDE, LENGTH, BN, E, True)  # fmt: skip
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("inf"))
    tl.store(o_ptr + row_M[:, None] * E + e[None, :], acc.to(o_ptr.dtype.element_ty),
             mask=is_real[:, None])  # fmt: skip
    tl.store(lse_ptr + row_M, lse, mask=is_real)


@triton.jit
def _over_q(dq, q, grad, lse, dots, gate, k_ptr, v_ptr, kv, t_M, lo_M, begin, end, S, G, scale,
            STRIDE: tl.constexpr, LENGTH: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
            MASKS: tl.constexpr):  # fmt: skip
    """Add the share of keys [begin, end) to the gradient of a tile's queries."""
    e, n = tl.arange(0, E), tl.arange(0, BN)
    for at in range(begin, end, BN):
        i_N = at + n
        place = kv + i_N.to(tl.int64) * G * E
        k_at, v_at = k_ptr + place[:, None] + e[None, :], v_ptr + place[:, None] + e[None, :]
        if MASKS:
            k = tl.load(k_at, mask=(i_N < S)[:, None], other=0.0)
            v = tl.load(v_at, mask=(i_N < S)[:, None], other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.exp2(s - lse[:, None])
        if MASKS:
            p = tl.where(_sees(t_M, lo_M, i_N, S, STRIDE, LENGTH), p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * gate[:, None] * (dp - dots[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def nsa_band_backward_q(
    q_ptr, k_ptr, v_ptr, first_ptr, grad_ptr, lse_ptr, dots_ptr, gates_ptr, dq_ptr,
    T, S, H, G, W, scale, BRANCH: tl.constexpr, ADDS: tl.constexpr,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write the queries' gradient, or add it to what another branch has written (ADDS)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    t_M, r_M, is_real, lo_M = _rows(tile, first_ptr, b, T, W, R, RP, TQ)
    begin, whole, part, end = _edges(tile, lo_M, is_real, T, S, STRIDE, LENGTH, TQ, BN)
    e = tl.arange(0, E)
    row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
    at = row_M[:, None] * E + e[None, :]
    q = tl.load(q_ptr + at, mask=is_real[:, None], other=0.0)
    grad = tl.load(grad_ptr + at, mask=is_real[:, None], other=0.0)
    lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
    dots = tl.load(dots_ptr + row_M * 3 + BRANCH, mask=is_real, other=0.0)
    gate = tl.load(gates_ptr + row_M * 3 + BRANCH, mask=is_real, other=0.0).to(tl.float32)
    dq = tl.zeros([TQ * RP, E], tl.float32)
    kv = (b * S * G + g).to(tl.int64) * E
    dq = _over_q(dq, q, grad, lse, dots, gate, k_ptr, v_ptr, kv, t_M, lo_M, begin, whole, S, G,
                 scale, STRIDE, LENGTH, BN, E, True)  # fmt: skip
    dq = _over_q(dq, q, grad, lse, dots, gate, k_ptr, v_ptr, kv, t_M, lo_M, whole, part, S, G,
                 scale, STRIDE, LENGTH, BN, E, False)  # fmt: skip
    dq = _over_q(dq, q, grad, lse, dots, gate, k_ptr, v_ptr, kv, t_M, lo_M, part, end, S, G,
                 scale, STRIDE, LENGTH, BN, E, True) * scale  # fmt: skip
    if ADDS:
        dq += tl.load(dq_ptr + at, mask=is_real[:, None], other=0.0).to(tl.float32)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=is_real[:, None])


@triton.jit
def nsa_band_backward_kv(
    q_ptr, k_ptr, v_ptr, first_ptr, grad_ptr, lse_ptr, dots_ptr, gates_ptr, dk_ptr, dv_ptr,
    T, S, H, G, W, scale, SPAN, BRANCH: tl.constexpr, ADDS: tl.constexpr,
    STRIDE: tl.constexpr, LENGTH: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    TQ: tl.constexpr, BN: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Take BN keys and the queries that may see them, at most SPAN tokens of those: otherwise a key
    that all later queries see would keep one multiprocessor busy alone. Parts are then added
    (ADDS)."""
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    e, n = tl.arange(0, E), tl.arange(0, BN)
    i_begin = tl.program_id(0) * BN
    i_N = i_begin + n
    inside = (i_N < S)[:, None]
    place = (b * S * G + g).to(tl.int64) * E + i_N.to(tl.int64) * G * E
    t_begin = (i_begin * STRIDE + LENGTH - 1) // TQ * TQ + tl.program_id(2) * SPAN
    t_end = tl.minimum(tl.minimum(T, (i_begin + BN - 1) * STRIDE + W), t_begin + SPAN)
    if t_begin < t_end:
        k = tl.load(k_ptr + place[:, None] + e[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + place[:, None] + e[None, :], mask=inside, other=0.0)
        dk = tl.zeros([BN, E], tl.float32)
        dv = tl.zeros([BN, E], tl.float32)
        for t0 in range(t_begin, t_end, TQ):
            t_M, r_M, is_real, lo_M = _rows(t0 // TQ, first_ptr, b, T, W, R, RP, TQ)
            row_M = ((b * T + t_M) * H + g * R + r_M).to(tl.int64)
            at = row_M[:, None] * E + e[None, :]
            q = tl.load(q_ptr + at, mask=is_real[:, None], other=0.0)
            grad = tl.load(grad_ptr + at, mask=is_real[:, None], other=0.0)
            lse = tl.load(lse_ptr + row_M, mask=is_real, other=float("inf")) * LOG2E
            dots = tl.load(dots_ptr + row_M * 3 + BRANCH, mask=is_real, other=0.0)
            gate = tl.load(gates_ptr + row_M * 3 + BRANCH, mask=is_real, other=0.0).to(tl.float32)
            # Keys as rows: both products below then take weights as they are, not transposed.
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
            p = tl.exp2(s - lse[None, :]) * gate[None, :]
            begins = (i_N * STRIDE)[:, None]
            sees = (begins + (LENGTH - 1) <= t_M[None, :]) & (begins >= lo_M[None, :]) & inside
            p = tl.where(sees, p, 0.0)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
            ds = p * (dp - dots[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        out = place[:, None] + e[None, :]
        if ADDS:
            tl.atomic_add(dk_ptr + out, dk * scale, mask=inside, sem="relaxed")
            tl.atomic_add(dv_ptr + out, dv, mask=inside, sem="relaxed")
        else:
            tl.store(dk_ptr + out, dk * scale, mask=inside)
            tl.store(dv_ptr + out, dv, mask=inside)
