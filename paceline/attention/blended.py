"""Triton kernels around the branches: their sum by gates, and the gates' gradient, each in one pass
over memory."""

import triton
import triton.language as tl


@triton.jit
def nsa_blend(cmp_ptr, sel_ptr, win_ptr, gates_ptr, out_ptr, num_rows, BM: tl.constexpr,
           E: tl.constexpr):  # fmt: skip
    """Write gate o, summed over branches. A row is a token's head."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    at, there = row[:, None] * E + tl.arange(0, E)[None, :], inside[:, None]
    sums = tl.zeros([BM, E], tl.float32)
    for branch in tl.static_range(3):
        o_ptr = cmp_ptr if branch == 0 else (sel_ptr if branch == 1 else win_ptr)
        gate = tl.load(gates_ptr + row * 3 + branch, mask=inside, other=0.0).to(tl.float32)
        sums += gate[:, None] * tl.load(o_ptr + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def nsa_dots(cmp_ptr, sel_ptr, win_ptr, grad_ptr, gates_ptr, dots_ptr, gated_ptr, num_rows,
          WRITES: tl.constexpr, BM: tl.constexpr, E: tl.constexpr):  # fmt: skip
    """Write the products of the gradient with each branch, (rows, 3): the gradients of gates; and,
    where asked (WRITES), the gradient of the first branch."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < num_rows
    at, there = row[:, None] * E + tl.arange(0, E)[None, :], inside[:, None]
    grad = tl.load(grad_ptr + at, mask=there, other=0.0).to(tl.float32)
    for branch in tl.static_range(3):
        o_ptr = cmp_ptr if branch == 0 else (sel_ptr if branch == 1 else win_ptr)
        o = tl.load(o_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(dots_ptr + row * 3 + branch, tl.sum(o * grad, axis=1), mask=inside)
    if WRITES:
        gate = tl.load(gates_ptr + row * 3, mask=inside, other=0.0).to(tl.float32)
        gated = (grad * gate[:, None]).to(gated_ptr.dtype.element_ty)
        tl.store(gated_ptr + at, gated, mask=there)
