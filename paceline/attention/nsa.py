"""All three branches together, by kernels or in plain torch; and their sum by gates.

    out_t = sum over cmp, sel, win of gate_t * attention(q_t, keys, values of that branch)

Keys and values are each branch's own; queries are shared. Gradients flow through what is attended
to and through gates; which blocks are chosen has none.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.attention import plain
from paceline.attention.marks import mark
from paceline.attention.sizes import Sizes

BRANCHES = ("cmp", "sel", "win")
Kernels = Literal["auto", "triton", "torch"]


@dataclass(frozen=True)
class Settings:
    """How it is computed: which `ranges` plain torch uses, what computes it, and whether its parts
    are marked for nsys."""

    sizes: Sizes = Sizes()
    ranges: Literal["v1", "v2"] = "v2"
    kernels: Kernels = "auto"
    nvtx: bool = False

    def uses_kernels(self, q: Tensor) -> bool:
        """Say whether Triton computes it: on GPUs, if it supports the sizes."""
        fits = not self.sizes.no_kernels(q.shape[-1])
        half_or_single = q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        if self.kernels == "auto":
            return q.is_cuda and fits and half_or_single
        return self.kernels == "triton"


class Keys(NamedTuple):
    """Keys and values of each branch (B, S, G, E); of the first one compressed (B, M, G, E)."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


class Attended(NamedTuple):
    """The sum by gates (B, T, H, E), the branches, and the chosen blocks (B, T, G, N)."""

    out: Tensor
    cmp: Tensor
    sel: Tensor
    win: Tensor
    blocks: Tensor


def attend(
    q_BTHE: Tensor, keys: Keys, gates_BTH3: Tensor, first_BT: Tensor | None, settings: Settings
) -> Attended:
    """Attend by three branches. `first_BT` is where each query's document begins; None: at 0."""
    if settings.uses_kernels(q_BTHE):
        return _by_kernels(q_BTHE, keys, gates_BTH3, first_BT, settings)
    if first_BT is None:
        first_BT = torch.zeros(q_BTHE.shape[:2], dtype=torch.int32, device=q_BTHE.device)
    T, z, nvtx = q_BTHE.shape[1], settings.sizes, settings.nvtx
    at_T = torch.arange(T, device=q_BTHE.device)
    with mark("pcmp_all", q_BTHE, nvtx), mark("nsa.cmp", q_BTHE, nvtx):
        is_seen = plain.is_compressed_visible(at_T, first_BT, keys.k_cmp.shape[1], z)
        cmp, weights_BTGM = plain.compressed(q_BTHE, keys.k_cmp, keys.v_cmp, is_seen)
    with mark("map_pcmp_to_pslc", q_BTHE, nvtx), mark("nsa.choose", q_BTHE, nvtx):
        blocks = plain.choose_blocks(weights_BTGM, at_T, first_BT, z)
    with mark("topk+ranges", q_BTHE, nvtx), mark(f"nsa.sel.ranges_{settings.ranges}", q_BTHE, nvtx):
        S = keys.k_sel.shape[1]
        mask = plain.selected_mask(blocks, S, at_T, first_BT, z, settings.ranges)
    with mark("branch_attn+gate", q_BTHE, nvtx):
        with mark("nsa.sel", q_BTHE, nvtx):
            sel = plain.masked(q_BTHE, keys.k_sel, keys.v_sel, mask)
        with mark("nsa.win", q_BTHE, nvtx):
            win = plain.window(q_BTHE, keys.k_win, keys.v_win, at_T, first_BT, z.w)
        with mark("nsa.gate", q_BTHE, nvtx):
            return Attended(blend(cmp, sel, win, gates_BTH3), cmp, sel, win, blocks)


def _by_kernels(
    q_BTHE: Tensor, keys: Keys, gates_BTH3: Tensor, first_BT: Tensor | None, settings: Settings
) -> Attended:
    from paceline.attention import ops  # with it comes Triton

    z, E = settings.sizes, q_BTHE.shape[-1]
    q, *wide = (ops.widen(x) for x in (q_BTHE, *keys))
    sizes = [z.l, z.d, z.l_sel, z.n_sel, z.w]
    begins = None if first_BT is None else first_BT.int().contiguous()
    out, cmp, sel, win, _, _, _, blocks, _, _ = ops.nsa(
        q, wide, gates_BTH3.contiguous(), begins, sizes, E**-0.5, settings.nvtx
    )
    return Attended(out[..., :E], cmp[..., :E], sel[..., :E], win[..., :E], blocks)


def blend(cmp: Tensor, sel: Tensor, win: Tensor, gates_BTH3: Tensor) -> Tensor:
    """Add the branches by their gates (B, T, H, E)."""
    of_cmp, of_sel, of_win = gates_BTH3[..., None].unbind(dim=-2)
    return of_cmp * cmp + of_sel * sel + of_win * win
