"""All three branches together, by kernels or in plain torch; and their sum by gates.

    out_t = sum over cmp, sel, win of gate_t * attention(q_t, keys, values of that branch)

Keys and values are each branch's own; queries are shared. Gradients flow through what is attended
to and through gates; which blocks are chosen has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.attention import plain
from paceline.attention.sizes import Sizes

BRANCHES = ("cmp", "sel", "win")
Kernels = Literal["auto", "triton", "torch"]


@dataclass(frozen=True)
class Settings:
    """How it is computed: `ranges` of plain torch, by whom, and whether parts are named in
    profiles."""

    sizes: Sizes = Sizes()
    ranges: Literal["v1", "v2"] = "v2"
    kernels: Kernels = "auto"
    marks: bool = False

    def uses_kernels(self, q: Tensor) -> bool:
        """Say whether Triton computes it: on GPUs, where sizes are powers of two."""
        z = self.sizes
        fits = all(x & (x - 1) == 0 for x in (z.l_sel, z.l_sel // z.d)) and z.l_sel >= 16
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


class Branches(NamedTuple):
    """What each branch says (B, T, H, E), and the chosen blocks (B, T, G, N)."""

    cmp: Tensor
    sel: Tensor
    win: Tensor
    blocks: Tensor


def attend(q_BTHE: Tensor, keys: Keys, first_BT: Tensor | None, settings: Settings) -> Branches:
    """Attend by three branches. `first_BT` is where each query's document begins; None: at 0."""
    if settings.uses_kernels(q_BTHE):
        return _by_kernels(q_BTHE, keys, first_BT, settings)
    B, T = q_BTHE.shape[:2]
    z, at_T = settings.sizes, torch.arange(T, device=q_BTHE.device)
    first_BT = torch.zeros_like(at_T).expand(B, T) if first_BT is None else first_BT
    with mark("pcmp_all", settings, q_BTHE):
        is_seen = plain.is_compressed_visible(at_T, first_BT, keys.k_cmp.shape[1], z)
        cmp, weights_BTGM = plain.compressed(q_BTHE, keys.k_cmp, keys.v_cmp, is_seen)
    with mark("map_pcmp_to_pslc", settings, q_BTHE):
        blocks = plain.choose_blocks(weights_BTGM, at_T, first_BT, z)
    with mark("branch_attn", settings, q_BTHE):
        with mark(f"nsa.sel.ranges_{settings.ranges}", settings, q_BTHE):
            mask = plain.selected_mask(blocks, keys.k_sel.shape[1], at_T, first_BT, z, settings.ranges)
        sel = plain.masked(q_BTHE, keys.k_sel, keys.v_sel, mask)
        win = plain.window(q_BTHE, keys.k_win, keys.v_win, at_T, first_BT, z.w)
    return Branches(cmp, sel, win, blocks)


def _by_kernels(
    q_BTHE: Tensor, keys: Keys, first_BT: Tensor | None, settings: Settings
) -> Branches:
    from paceline.attention import ops  # with it comes Triton

    z, E = settings.sizes, q_BTHE.shape[-1]
    q, *padded = (ops.widen(x) for x in (q_BTHE, *keys))
    keys = Keys(*padded)
    with mark("pcmp_all", settings, q):
        cmp, lse = ops.attend_compressed(q, keys.k_cmp, keys.v_cmp, first_BT, z, E)
    if first_BT is None:
        first_BT = torch.zeros(q.shape[:2], dtype=torch.int32, device=q.device)
    with mark("topk+ranges", settings, q), torch.no_grad():
        blocks = ops.choose(q, keys.k_cmp, lse, first_BT, z, E)
    with mark("branch_attn", settings, q):
        sel = ops.attend_selected(q, keys.k_sel, keys.v_sel, blocks, first_BT, z, E)
        win = ops.attend_window(q, keys.k_win, keys.v_win, first_BT, z, E)
    return Branches(cmp[..., :E], sel[..., :E], win[..., :E], blocks)


def blend(branches: Branches, gates_BTH3: Tensor) -> Tensor:
    """Add the branches by their gates (B, T, H, E)."""
    cmp, sel, win = gates_BTH3[..., None].unbind(dim=-2)
    return cmp * branches.cmp + sel * branches.sel + win * branches.win


@contextmanager
def mark(name: str, settings: Settings, near: Tensor) -> Iterator[None]:
    """Name what runs inside in profiles, and for nsys. Compiled graphs have names of their own."""
    if not settings.marks or torch.compiler.is_compiling():
        yield
        return
    with torch.profiler.record_function(name):
        if not near.is_cuda:
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
