"""The Triton kernels as one operation of torch, with its gradient and its shapes.

    paceline::nsa            queries, keys of three branches, gates --> output, what backward needs
    paceline::nsa_backward

As an operation it stands in profiles under its name, is one node for the compiler, and can be
captured in CUDA graphs: no size depends on data, and nothing waits for the device. What runs inside
is named too (`nsa.cmp`, `nsa.choose`, `nsa.sel`, `nsa.win`), whoever has compiled the rest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline.attention.banded import nsa_band_backward_kv, nsa_band_backward_q, nsa_band_forward
from paceline.attention.blended import nsa_blend, nsa_dots
from paceline.attention.folded import fits, folded_backward, folded_forward
from paceline.attention.lists import Lists, build_lists
from paceline.attention.marks import mark
from paceline.attention.scores import nsa_pick, nsa_score
from paceline.attention.selected import (
    nsa_join_parts,
    nsa_selected_backward,
    nsa_selected_by_block,
    nsa_selected_by_query,
    nsa_sum_parts,
)
from paceline.attention.sizes import Sizes

FAR = 1 << 30  # a window that reaches the first token
MIN_ROWS = 16  # of a tile of the tensor cores
BY_QUERY_FROM = 16  # heads of a group that fill such a tile
SCORES_BYTES = 1 << 28  # the most memory for scores of blocks
PARTS_BYTES = 1 << 31  # the most memory for partial sums; longer sequences go in pieces
PICKED, PICK_WARPS = 2048, 4  # scores that a program picks from
LONGEST = 512  # queries of a block that one program takes
SPAN = 512  # tokens whose gradients for a few keys one program sums
CMP, SEL, WIN = range(3)


class Tile(NamedTuple):
    """Rows (tokens times heads) and keys of a tile, and how many warps and stages work on it."""

    rows: int
    keys: int
    warps: int
    stages: int


# Measured on an H200 with heads of 128 in bf16 (benchmarks/nsa.py).
TILES = {
    "band_forward": Tile(64, 64, 4, 3),
    "band_backward_q": Tile(64, 64, 4, 2),
    "band_backward_kv": Tile(32, 64, 4, 3),
    "score": Tile(128, 64, 8, 2),
    "selected_by_query": Tile(16, 64, 2, 2),
    "selected_by_block": Tile(64, 64, 4, 3),
    "selected_backward": Tile(64, 64, 4, 1),
}


def fit(kernel: str, q: Tensor, num_groups: int) -> tuple[dict[str, int], int, dict[str, int]]:
    """Return the shape of a kernel's tile (heads of a group, as they are and as a power of two, the
    tokens that fill the tile with them, the width of a head), its keys, and how it is launched."""
    H, E = q.shape[2:]
    rows, keys, warps, stages = TILES[kernel]
    if q.dtype == torch.float32:
        # Products are spelt out instruction by instruction: large tiles take minutes to compile.
        rows, keys, warps, stages = 32, 32, 4, 1
    elif E > 128:
        rows, keys, stages = rows // 2, keys // 2, min(stages, 2)
    RP = triton.next_power_of_2(H // num_groups)
    shape = {"R": H // num_groups, "RP": RP, "TQ": max(1, rows // RP), "E": E}
    return shape, keys, {"num_warps": warps, "num_stages": stages}


# ---- forward


def band_forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, band: tuple[int, int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a band of keys (stride, length, window): the output and lse."""
    B, T, H, E = q.shape
    S, G = k.shape[1:3]
    out, lse = torch.empty_like(q), q.new_empty(B, T, H, dtype=torch.float32)
    tile, keys, launch = fit("band_forward", q, G)
    nsa_band_forward[(triton.cdiv(T, tile["TQ"]), B * G)](
        q, k, v, first, out, lse, T, S, H, G, band[2], scale, STRIDE=band[0], LENGTH=band[1],
        **tile, BN=keys, **launch,
    )  # fmt: skip
    return out, lse


def choose(q: Tensor, k: Tensor, lse: Tensor, first: Tensor, z: Sizes, scale: float) -> Tensor:
    """Return the blocks that queries choose by their scores of compressed keys (B, T, G, N)."""
    B, T, H, _ = q.shape
    M, G = k.shape[1:3]
    blocks = torch.empty(B, T, G, z.n_sel, dtype=torch.int32, device=q.device)
    (tile, keys, launch), J = fit("score", q, G), z.num_blocks(T)
    JP = triton.next_power_of_2(J)
    piece = min(T, max(256, SCORES_BYTES // (2 * 4 * B * G * J)))
    scores = torch.empty(2, B, G, piece, J, dtype=torch.float32, device=q.device)
    num_blocks = max(1, keys * z.d // z.l_sel)  # of a tile
    TQ = max(1, PICKED // JP)
    for begin in range(0, T, piece):
        nsa_score[(triton.cdiv(piece, tile["TQ"]), B * G)](
            q, k, lse, first, scores, T, begin, piece, M, J, H, G, scale, L=z.l, D=z.d,
            L_SEL=z.l_sel, BJ=num_blocks, **tile, **launch,
        )  # fmt: skip
        nsa_pick[(triton.cdiv(piece, TQ), B * G)](
            scores, first, blocks, T, begin, piece, J, G, L_SEL=z.l_sel, N=z.n_sel,
            NP=triton.next_power_of_2(z.n_sel), JP=JP, TQ=TQ, num_warps=PICK_WARPS,
        )  # fmt: skip
    return blocks


def piece_of(q: Tensor, num_chosen: int) -> int:
    """Return how many tokens at a time have parts that fit into PARTS_BYTES."""
    B, T, H, E = q.shape
    return min(T, max(1, PARTS_BYTES // (B * num_chosen * H * E * q.element_size())))


def selected_by_query(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, z: Sizes, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over chosen blocks, token by token: the output and lse."""
    B, T, H, E = q.shape
    S, G = k.shape[1:3]
    out, lse = torch.empty_like(q), q.new_empty(B, T, H, dtype=torch.float32)
    tile, _, launch = fit("selected_by_query", q, G)
    nsa_selected_by_query[(T, B * G)](
        q, k, v, blocks, first, out, lse, T, S, H, G, scale, N=z.n_sel, L=z.l_sel, R=tile["R"],
        RP=max(MIN_ROWS, tile["RP"]), E=E, **launch,
    )  # fmt: skip
    return out, lse


def selected_by_block(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, lists: Lists, z: Sizes,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over chosen blocks, block by block: the output and lse."""
    B, T, H, E = q.shape
    S, G, N = k.shape[1], k.shape[2], z.n_sel
    out, lse = torch.empty_like(q), q.new_empty(B, T, H, dtype=torch.float32)
    (tile, _, launch), piece = fit("selected_by_block", q, G), piece_of(q, N)
    parts = q.new_empty(B, G, piece, N, H // G, E)
    part_lse = q.new_empty(B, G, piece, N, H // G, dtype=torch.float32)
    for number, begin in enumerate(range(0, T, piece)):
        items = lists.items[number]
        nsa_selected_by_block[(len(items),)](
            q, k, v, first, lists.order, items, parts, part_lse, T, begin, piece, S, H, G, scale,
            N=N, L=z.l_sel, **tile, **launch,
        )  # fmt: skip
        nsa_join_parts[(min(piece, T - begin), B * G)](
            parts, part_lse, blocks, out, lse, T, begin, piece, H, G,
            N=N, R=tile["R"], RP=tile["RP"], E=E, num_warps=4,
        )  # fmt: skip
    return out, lse


@torch.library.custom_op("paceline::nsa", mutates_args=())
def nsa(
    q: Tensor, keys: Sequence[Tensor], gates: Tensor, begins: Tensor | None, sizes: Sequence[int],
    scale: float, nvtx: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Attend by three branches; `begins` is the first token of each query's document (B, T), None
    where there is but one. Returns the output, the branches, their lse, the chosen blocks, and the
    lists of who chose them."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys
    z, first = Sizes(*sizes), first_of(q, begins)
    G = k_sel.shape[2]
    with mark("pcmp_all", q, nvtx), mark("nsa.cmp", q, nvtx):
        if begins is None and fits(q, z):
            cmp, lse_cmp = folded_forward(q, k_cmp, v_cmp, z, scale)
        else:
            cmp, lse_cmp = band_forward(q, k_cmp, v_cmp, first, (z.d, z.l, FAR), scale)
    with mark("topk+ranges", q, nvtx), mark("nsa.choose", q, nvtx):
        blocks = choose(q, k_cmp, lse_cmp, first, z, scale)
        piece = piece_of(q, z.n_sel)
        lists = build_lists(blocks, z.num_blocks(q.shape[1]), piece, longest_of(q, z))
    with mark("branch_attn+gate", q, nvtx):
        with mark("nsa.sel", q, nvtx):
            if q.shape[2] // G >= BY_QUERY_FROM:
                sel, lse_sel = selected_by_query(q, k_sel, v_sel, blocks, first, z, scale)
            else:
                sel, lse_sel = selected_by_block(q, k_sel, v_sel, blocks, first, lists, z, scale)
        with mark("nsa.win", q, nvtx):
            win, lse_win = band_forward(q, k_win, v_win, first, (1, 1, z.w), scale)
        with mark("nsa.gate", q, nvtx):
            out, num_rows = torch.empty_like(q), q.shape[:3].numel()
            nsa_blend[(triton.cdiv(num_rows, 32),)](
                cmp, sel, win, gates, out, num_rows, BM=32, E=q.shape[3]
            )
    return out, cmp, sel, win, lse_cmp, lse_sel, lse_win, blocks, *lists


def first_of(q: Tensor, begins: Tensor | None) -> Tensor:
    """Return the first token that each query may see (B, T)."""
    if begins is None:
        return torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
    return begins


def longest_of(q: Tensor, z: Sizes) -> int:
    """Return how many queries of a block one program takes. All of them: then no program adds to
    what another has written, and sums have one order."""
    if torch.are_deterministic_algorithms_enabled():
        return q.shape[0] * q.shape[1] * z.n_sel
    return LONGEST


# ---- backward


def band_backward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, grad: Tensor, lse: Tensor, dots: Tensor,
    gates: Tensor, band: tuple[int, int, int], scale: float, branch: int, dq: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the queries' gradient, for the first branch, or add to it; return those of keys and
    values."""
    B, T, H, _ = q.shape
    S, G = k.shape[1:3]
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    fixed = {"BRANCH": branch, "STRIDE": band[0], "LENGTH": band[1]}
    tile, keys, launch = fit("band_backward_q", q, G)
    nsa_band_backward_q[(triton.cdiv(T, tile["TQ"]), B * G)](
        q, k, v, first, grad, lse, dots, gates, dq, T, S, H, G, band[2], scale,
        ADDS=branch != CMP, **fixed, **tile, BN=keys, **launch,
    )  # fmt: skip
    tile, keys, launch = fit("band_backward_kv", q, G)
    num_tokens = min(T, keys * band[0] + band[2] + tile["TQ"])  # that see some of these keys
    span = T if torch.are_deterministic_algorithms_enabled() else SPAN
    num_parts = triton.cdiv(num_tokens, span)
    span = triton.cdiv(span, tile["TQ"]) * tile["TQ"] if num_parts > 1 else FAR
    nsa_band_backward_kv[(triton.cdiv(S, keys), B * G, num_parts)](
        q, k, v, first, grad, lse, dots, gates, dk, dv, T, S, H, G, band[2], scale, span,
        ADDS=num_parts > 1, **fixed, **tile, BN=keys, **launch,
    )  # fmt: skip
    return dk.to(k.dtype), dv.to(v.dtype)


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, lists: Lists, grad: Tensor,
    lse: Tensor, dots: Tensor, gates: Tensor, z: Sizes, scale: float, dq: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add to the queries' gradient; return those of keys and values."""
    B, T, H, E = q.shape
    S, G, N = k.shape[1], k.shape[2], z.n_sel
    (tile, _, launch), piece = fit("selected_backward", q, G), piece_of(q, N)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    parts = q.new_empty(B, G, piece, N, H // G, E)
    for number, begin in enumerate(range(0, T, piece)):
        items = lists.items[number]
        nsa_selected_backward[(len(items),)](
            q, k, v, first, grad, lse, dots, gates, lists.order, items, parts, dk, dv,
            T, begin, piece, S, H, G, scale,
            N=N, L=z.l_sel, **tile, **launch,
        )  # fmt: skip
        nsa_sum_parts[(min(piece, T - begin), B * G)](
            parts, blocks, dq, T, begin, piece, H, G,
            N=N, R=tile["R"], RP=tile["RP"], E=E, num_warps=4,
        )  # fmt: skip
    return dk.to(k.dtype), dv.to(v.dtype)


@torch.library.custom_op("paceline::nsa_backward", mutates_args=())
def nsa_backward(
    grad: Tensor, q: Tensor, keys: Sequence[Tensor], gates: Tensor, begins: Tensor | None,
    kept: Sequence[Tensor], sizes: Sequence[int], scale: float, nvtx: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Return the gradients of queries, of each branch's keys and values, and of gates."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = keys
    cmp, sel, win, lse_cmp, lse_sel, lse_win, blocks, order, items = kept
    z, num_rows, first = Sizes(*sizes), q.shape[:3].numel(), first_of(q, begins)
    dq, dots = torch.empty_like(q), torch.empty_like(gates, dtype=torch.float32)
    folds = begins is None and fits(q, z)
    of_out = torch.empty_like(grad) if folds else grad  # of the compressed branch, for cuDNN
    with mark("nsa.gate_backward", q, nvtx):
        nsa_dots[(triton.cdiv(num_rows, 32),)](
            cmp, sel, win, grad, gates, dots, of_out, num_rows, WRITES=folds, BM=32, E=q.shape[3]
        )
    # In this order: the first writes the queries' gradient, the others add to it.
    with mark("nsa.cmp_backward", q, nvtx):
        if folds:
            of_cmp = folded_backward(of_out, q, k_cmp, v_cmp, cmp, lse_cmp, z, scale, dq)
        else:
            of_cmp = band_backward(
                q, k_cmp, v_cmp, first, grad, lse_cmp, dots, gates, (z.d, z.l, FAR), scale, CMP, dq
            )
    with mark("nsa.win_backward", q, nvtx):
        of_win = band_backward(
            q, k_win, v_win, first, grad, lse_win, dots, gates, (1, 1, z.w), scale, WIN, dq
        )
    with mark("nsa.sel_backward", q, nvtx):
        of_sel = selected_backward(
            q, k_sel, v_sel, blocks, first, Lists(order, items), grad, lse_sel, dots, gates, z,
            scale, dq,
        )  # fmt: skip
    return dq, *of_cmp, *of_sel, *of_win, dots.to(gates.dtype)


# ---- as torch needs it


@nsa.register_fake
def _(q: Tensor, keys: Any, gates: Tensor, begins: Any, sizes: Sequence[int], *others: Any) -> Any:
    z, (B, T, H, _) = Sizes(*sizes), q.shape
    G = keys[2].shape[2]
    lse = [q.new_empty(B, T, H, dtype=torch.float32) for _ in range(3)]
    blocks = q.new_empty(B, T, G, z.n_sel, dtype=torch.int32)
    piece = piece_of(q, z.n_sel)
    W = B * G * z.num_blocks(T) + triton.cdiv(B * piece * G * z.n_sel, longest_of(q, z))
    items = q.new_empty(triton.cdiv(T, piece), W, 4, dtype=torch.int32)
    order = q.new_empty(blocks.numel(), dtype=torch.int32)
    return *(torch.empty_like(q) for _ in range(4)), *lse, blocks, order, items


@nsa_backward.register_fake
def _(grad: Tensor, q: Tensor, keys: Any, gates: Tensor, *others: Any) -> Any:
    return *(torch.empty_like(x) for x in (q, *keys)), torch.empty_like(gates)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, keys, gates, begins, *ctx.settings = inputs
    ctx.save_for_backward(q, *keys, gates, begins, *output[1:])
    ctx.mark_non_differentiable(*output[1:])  # gradients come through the sum
    ctx.set_materialize_grads(False)  # those of the others would be filled with zeros


def _gradient(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
    q, *rest = ctx.saved_tensors
    keys, (gates, begins), kept = rest[:6], rest[6:8], rest[8:]
    dq, *dkeys, dgates = nsa_backward(
        grad.contiguous(), q, keys, gates, begins, kept, *ctx.settings
    )
    return dq, dkeys, dgates, None, None, None, None


nsa.register_autograd(_gradient, setup_context=_keep)


def widen(x: Tensor) -> Tensor:
    """Return it contiguous, with heads of a power of two: zeros change no score."""
    E = x.shape[-1]
    missing = max(MIN_ROWS, triton.next_power_of_2(E)) - E
    return F.pad(x, (0, missing)) if missing else x.contiguous()  # a pad of 0 would be a copy
