"""The Triton kernels as operations of torch, each with its gradient and its shapes.

    paceline::nsa_banded     attention over a band of keys: the window, or compressed keys
    paceline::nsa_choose     the blocks that each query chooses
    paceline::nsa_selected   attention over chosen blocks

As operations they stand in profiles under these names, are one node each for the compiler, and can
be captured in CUDA graphs: no size depends on data, and nothing waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline.attention import banded, scores
from paceline.attention import selected as kernels
from paceline.attention.folded import attend_folded, fold_kernel
from paceline.attention.lists import build_lists
from paceline.attention.sizes import Sizes

FAR = 1 << 30  # a window that reaches the first token
MIN_ROWS = 16  # of a tile of the tensor cores
PARTS_BYTES = 1 << 31  # what parts of sums may take; longer sequences go in pieces
LONGEST = 1024  # queries of a block that one program takes
SPAN = 4096  # tokens whose gradients for a few keys one program sums


def _tile(R: int, E: int, rows: int = 128) -> dict[str, int]:
    """Return the heads of a group as a power of two, and the tokens that fill a tile with them."""
    RP = triton.next_power_of_2(R)
    return {"R": R, "RP": RP, "TQ": max(1, (rows if E <= 128 else rows // 2) // RP)}


def _warps(E: int) -> int:
    return 8 if E >= 64 else 4


@torch.library.custom_op("paceline::nsa_banded", mutates_args=())
def nsa_banded(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, stride: int, length: int, window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over a band of keys (`banded.py`); return the output and lse."""
    B, T, H, E = q.shape
    S, G = k.shape[1:3]
    out, lse = torch.empty_like(q), q.new_empty(B, T, H, dtype=torch.float32)
    tile = _tile(H // G, E)
    banded.forward_kernel[(triton.cdiv(T, tile["TQ"]), B * G)](
        q, k, v, first, out, lse, T, S, H, G, window, scale,
        STRIDE=stride, LENGTH=length, **tile, BN=64, E=E, num_warps=_warps(E), num_stages=3,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("paceline::nsa_banded_backward", mutates_args=())
def nsa_banded_backward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    stride: int, length: int, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, E = q.shape
    S, G = k.shape[1:3]
    delta, tile = _delta(out, grad), _tile(H // G, E)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    of_band = {"STRIDE": stride, "LENGTH": length, **tile, "E": E, "num_warps": _warps(E)}
    banded.backward_q_kernel[(triton.cdiv(T, tile["TQ"]), B * G)](
        q, k, v, first, grad, lse, delta, dq, T, S, H, G, window, scale,
        **of_band, BN=64, num_stages=2,
    )  # fmt: skip
    BN = 64
    num_tokens = min(T, BN * stride + window + tile["TQ"])  # that see some of BN keys
    span = T if torch.are_deterministic_algorithms_enabled() else SPAN
    num_parts = triton.cdiv(num_tokens, span)
    banded.backward_kv_kernel[(triton.cdiv(S, BN), B * G, num_parts)](
        q, k, v, first, grad, lse, delta, dk, dv, T, S, H, G, window, scale,
        span // tile["TQ"] * tile["TQ"] if num_parts > 1 else FAR,
        **of_band, BN=BN, ADDS=num_parts > 1, num_stages=2,
    )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _delta(out: Tensor, grad: Tensor) -> Tensor:
    B, T, H, E = out.shape
    delta = out.new_empty(B, T, H, dtype=torch.float32)
    num_rows = B * T * H
    banded.delta_kernel[(triton.cdiv(num_rows, 64),)](out, grad, delta, num_rows, BM=64, E=E)
    return delta


@torch.library.custom_op("paceline::nsa_choose", mutates_args=())
def nsa_choose(
    q: Tensor, k: Tensor, lse: Tensor, first: Tensor, l: int, d: int, l_sel: int, n: int,  # noqa: E741
    scale: float,
) -> Tensor:
    """Return the blocks that queries choose by their scores of compressed keys (`scores.py`)."""
    B, T, H, E = q.shape
    M, G = k.shape[1:3]
    blocks = torch.empty(B, T, G, n, dtype=torch.int32, device=q.device)
    tile = _tile(H // G, E)
    # A tile of scores is as wide as the compressed keys of as many blocks as are kept.
    scores.choose_kernel[(triton.cdiv(T, tile["TQ"]), B * G)](
        q, k, lse, first, blocks, T, M, H, G, scale, L=l, D=d, L_SEL=l_sel,
        N=n, NP=max(triton.next_power_of_2(n), MIN_ROWS * d // l_sel, 2), **tile, E=E,
        num_warps=_warps(E), num_stages=2,
    )  # fmt: skip
    return blocks


@torch.library.custom_op("paceline::nsa_selected", mutates_args=())
def nsa_selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, l_sel: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over chosen blocks (`selected.py`); return the output and lse."""
    B, T, H, E = q.shape
    out, lse = torch.empty_like(q), q.new_empty(B, T, H, dtype=torch.float32)
    if H // k.shape[2] < MIN_ROWS:
        _forward_by_block(q, k, v, blocks, first, l_sel, scale, out, lse)
    else:
        _forward_by_query(q, k, v, blocks, first, l_sel, scale, out, lse)
    return out, lse


def _forward_by_query(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, l_sel: int, scale: float,
    out: Tensor, lse: Tensor, num_warps: int = 2, num_stages: int = 3,
) -> None:  # fmt: skip
    B, T, H, E = q.shape
    S, G = k.shape[1:3]
    R = H // G
    kernels.forward_by_query[(T, B * G)](
        q, k, v, blocks, first, out, lse, T, S, H, G, scale, N=blocks.shape[3], L=l_sel, R=R,
        RP=max(MIN_ROWS, triton.next_power_of_2(R)), E=E, num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip


def _pieces(q: Tensor, num_chosen: int) -> list[tuple[int, int]]:
    """Return pieces of the sequence, from token to token, whose parts fit into PARTS_BYTES."""
    B, T, H, E = q.shape
    size = max(1, PARTS_BYTES // (B * num_chosen * H * E * q.element_size()))
    return [(at, min(at + size, T)) for at in range(0, T, size)]


def _forward_by_block(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, l_sel: int, scale: float,
    out: Tensor, lse: Tensor, rows: int = 128, num_warps: int = 8, num_stages: int = 2,
) -> None:  # fmt: skip
    B, T, H, E = q.shape
    S, G, N = k.shape[1], k.shape[2], blocks.shape[3]
    tile = _tile(H // G, E, rows)
    for begin, end in _pieces(q, N):
        count = end - begin
        lists = build_lists(blocks[:, begin:end], triton.cdiv(S, l_sel), LONGEST)
        parts = q.new_empty(B, G, count, N, H // G, E)
        part_lse = q.new_empty(B, G, count, N, H // G, dtype=torch.float32)
        kernels.forward_by_block[(len(lists.items),)](
            q, k, v, first, lists.order, lists.items, parts, part_lse, T, begin, count, S, H, G,
            scale, N=N, L=l_sel, **tile, E=E, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        kernels.join_parts[(count, B * G)](
            parts, part_lse, blocks, out, lse, T, begin, count, H, G,
            N=N, R=tile["R"], RP=tile["RP"], E=E, num_warps=4,
        )  # fmt: skip


@torch.library.custom_op("paceline::nsa_selected_backward", mutates_args=())
def nsa_selected_backward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, out: Tensor, lse: Tensor,
    grad: Tensor, l_sel: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward_by_block(q, k, v, blocks, first, out, lse, grad, l_sel, scale)


def _backward_by_block(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, out: Tensor, lse: Tensor,
    grad: Tensor, l_sel: int, scale: float, rows: int = 128, num_warps: int = 8, num_stages: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, E = q.shape
    S, G, N = k.shape[1], k.shape[2], blocks.shape[3]
    tile, delta = _tile(H // G, E, rows), _delta(out, grad)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    # One program per block adds nothing to what another wrote: then sums have one order.
    longest = B * T * N if torch.are_deterministic_algorithms_enabled() else LONGEST
    for begin, end in _pieces(q, N):
        count = end - begin
        lists = build_lists(blocks[:, begin:end], triton.cdiv(S, l_sel), longest)
        parts = q.new_empty(B, G, count, N, H // G, E)
        kernels.backward_by_block[(len(lists.items),)](
            q, k, v, first, grad, lse, delta, lists.order, lists.items, parts, dk, dv,
            T, begin, count, S, H, G, scale,
            N=N, L=l_sel, **tile, E=E, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        kernels.sum_parts[(count, B * G)](
            parts, blocks, dq, T, begin, count, H, G,
            N=N, R=tile["R"], RP=tile["RP"], E=E, num_warps=4,
        )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@nsa_banded.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@nsa_choose.register_fake
def _(q: Tensor, k: Tensor, lse: Tensor, first: Tensor, *sizes: Any) -> Any:
    return q.new_empty(*q.shape[:2], k.shape[2], sizes[3], dtype=torch.int32)


@nsa_selected.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@nsa_banded_backward.register_fake
@nsa_selected_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_banded(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, first, *ctx.band = inputs
    ctx.save_for_backward(q, k, v, first, *output)
    ctx.mark_non_differentiable(output[1])


def _banded_gradient(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    grads = nsa_banded_backward(*ctx.saved_tensors, grad.contiguous(), *ctx.band)
    return *grads, None, None, None, None, None


def _keep_selected(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, blocks, first, *ctx.sizes = inputs
    ctx.save_for_backward(q, k, v, blocks, first, *output)
    ctx.mark_non_differentiable(output[1])


def _selected_gradient(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    grads = nsa_selected_backward(*ctx.saved_tensors, grad.contiguous(), *ctx.sizes)
    return *grads, None, None, None, None


nsa_banded.register_autograd(_banded_gradient, setup_context=_keep_banded)
nsa_selected.register_autograd(_selected_gradient, setup_context=_keep_selected)


def widen(x: Tensor) -> Tensor:
    """Return it contiguous, with heads of a power of two: zeros change no score."""
    E = x.shape[-1]
    return F.pad(x, (0, max(MIN_ROWS, triton.next_power_of_2(E)) - E)).contiguous()


def attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, z: Sizes, E: int
) -> tuple[Tensor, Tensor]:
    """Attend to compressed keys; return the output and lse. `E` is the width before `widen`."""
    if k.shape[1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], torch.inf, dtype=torch.float32)
    if first is None and (kernel := fold_kernel(q)) is not None:
        return attend_folded(q, k, v, z, kernel, E**-0.5)
    if first is None:
        first = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
    out, lse = nsa_banded(q, k, v, first, z.d, z.l, FAR, E**-0.5)
    return out, lse


def choose(q: Tensor, k: Tensor, lse: Tensor, first: Tensor, z: Sizes, E: int) -> Tensor:
    """Return the blocks that queries choose (B, T, G, N)."""
    return nsa_choose(q, k, lse, first, z.l, z.d, z.l_sel, z.n_sel, E**-0.5)


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, first: Tensor, z: Sizes, E: int
) -> Tensor:
    return nsa_selected(q, k, v, blocks, first, z.l_sel, E**-0.5)[0]


def attend_window(q: Tensor, k: Tensor, v: Tensor, first: Tensor, z: Sizes, E: int) -> Tensor:
    return nsa_banded(q, k, v, first, 1, 1, z.w, E**-0.5)[0]
