"""Native sparse attention in torch's own operations, on any device and in any type.

    compress        keys, values of l tokens -> one           (B, S, G, E) -> (B, M, G, E)
    compressed      queries over compressed keys, and the weight of each
    choose_blocks   from that, the n blocks of l' tokens that all heads of a group read
    selected_mask   the tokens of those blocks
    window          queries over the last w tokens
    masked          attention where a mask says so

`first_BT` is the first token that a query may see: 0, or where its document begins. A query that
sees nothing in a branch gets 0 from it.

Shape letters: B batch, T queries, S keys, H query heads, G key/value groups, R heads of a group,
E head width, M compressed keys, J selection blocks, N chosen blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention.ranges import RANGES, ranges_to_mask
from paceline.attention.sizes import Sizes


def mean_blocks(x_BSGE: Tensor, sizes: Sizes) -> Tensor:
    """Return the mean of every compression block (B, M, G, E). Blocks share pieces of d tokens,
    which are summed once."""
    B, S, G, E = x_BSGE.shape
    M, pieces = sizes.num_compressed(S), sizes.l // sizes.d
    if M == 0:
        return x_BSGE[:, :0]
    whole = x_BSGE[:, : (M + pieces - 1) * sizes.d]
    piece_BPGE = whole.reshape(B, -1, sizes.d, G, E).mean(dim=2)
    return sum(piece_BPGE[:, k : k + M] for k in range(pieces)) / pieces  # type: ignore[return-value]


def is_compressed_visible(at_T: Tensor, first_BT: Tensor, M: int, sizes: Sizes) -> Tensor:
    """Return (B, T, M), True where all tokens of a compression block lie in a query's past."""
    start_M = torch.arange(M, device=at_T.device) * sizes.d
    is_past = start_M + sizes.l - 1 <= at_T[..., None]
    return is_past & (start_M >= first_BT[..., None])


def compressed(
    q_BTHE: Tensor, k_BMGE: Tensor, v_BMGE: Tensor, is_seen_BTM: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend to compressed keys; return the output (B, T, H, E) and the weights, summed over the
    heads of a group (B, T, G, M)."""
    B, T, H, E = q_BTHE.shape
    G = k_BMGE.shape[2]
    q_BTGRE = q_BTHE.reshape(B, T, G, H // G, E)
    scores = torch.einsum("btgre,bmge->btgrm", q_BTGRE, k_BMGE) * E**-0.5
    wide = torch.promote_types(scores.dtype, torch.float32)
    seen = is_seen_BTM[:, :, None, None]
    # Not -inf: a row without a single key would be NaN. Its weights are cut to 0 below.
    weights = scores.to(wide).masked_fill(~seen, torch.finfo(wide).min).softmax(dim=-1)
    weights = weights * seen
    out = torch.einsum("btgrm,bmge->btgre", weights.to(v_BMGE.dtype), v_BMGE)
    return out.reshape(B, T, H, E), weights.detach().sum(dim=3)


def overlaps(M: int, J: int, sizes: Sizes, like: Tensor) -> Tensor:
    """Return (M, J): tokens that a compression block shares with a selection block, over d; what
    eq. 9 of the paper sums (1, 2, 2, 2, 1 for its sizes)."""
    begin_M = (torch.arange(M, device=like.device) * sizes.d)[:, None]
    begin_J = torch.arange(J, device=like.device) * sizes.l_sel
    end = torch.minimum(begin_M + sizes.l, begin_J + sizes.l_sel)
    shared = (end - torch.maximum(begin_M, begin_J)).clamp(min=0)
    return (shared / sizes.d).to(like.dtype)


@torch.no_grad()
def choose_blocks(weights_BTGM: Tensor, at_T: Tensor, first_BT: Tensor, sizes: Sizes) -> Tensor:
    """Return the chosen blocks (B, T, G, N), ascending, -1 where there are fewer: the first one,
    that of the query and the one before it, then those with the highest scores; of equal ones the
    earlier. `at_T` may be (T) or (B, T)."""
    B, T, G, M = weights_BTGM.shape
    J = sizes.num_blocks(M * sizes.d + sizes.l)  # no fewer than the keys have
    scores_BTGJ = weights_BTGM @ overlaps(M, J, sizes, weights_BTGM)
    block_J = torch.arange(J, device=at_T.device)
    at = torch.broadcast_to(at_T, (B, T))[..., None]
    own, first = at // sizes.l_sel, first_BT[..., None] // sizes.l_sel
    may = (block_J <= own) & (block_J >= first)
    must = (block_J == own) | (block_J == own - 1) | (block_J == first)
    scores_BTGJ = scores_BTGJ.masked_fill((must & may)[:, :, None], torch.inf)
    scores_BTGJ = scores_BTGJ.masked_fill(~may[:, :, None], -torch.inf)
    best, order = scores_BTGJ.sort(dim=-1, descending=True, stable=True)
    best, order = best[..., : sizes.n_sel], order[..., : sizes.n_sel]
    # Ascending, and empty places last, as ranges and kernels want them.
    order = order.masked_fill(best == -torch.inf, J).sort(dim=-1).values
    return order.masked_fill(order == J, -1).int()


def selected_mask(
    blocks_BTGN: Tensor, S: int, at_T: Tensor, first_BT: Tensor, sizes: Sizes, ranges: str = "v2"
) -> Tensor:
    """Return (B, G, T, S), True for the tokens of the chosen blocks that a query may see."""
    found = RANGES[ranges](blocks_BTGN, sizes.l_sel, S, at_T)
    key_S = torch.arange(S, device=blocks_BTGN.device)
    return ranges_to_mask(found, S) & (key_S >= first_BT[..., None])[:, None]


def window(
    q_BTHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, at_T: Tensor, first_BT: Tensor, w: int
) -> Tensor:
    """Attend to the last w tokens, the query's own among them (B, T, H, E)."""
    key_S = torch.arange(k_BSGE.shape[1], device=q_BTHE.device)
    at = at_T[..., None]
    mask = (key_S <= at) & (key_S > at - w) & (key_S >= first_BT[..., None])
    return masked(q_BTHE, k_BSGE, v_BSGE, mask[:, None])


def masked(q_BTHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, mask_BGTS: Tensor) -> Tensor:
    """Attend where the mask is True, which every query has somewhere. The mask has one row for all
    heads of a group; heads of a group stand beside each other."""
    B, T, H, E = q_BTHE.shape
    G = k_BSGE.shape[2]
    R = H // G
    q = q_BTHE.reshape(B, T, G, R, E).permute(0, 2, 3, 1, 4).reshape(B * G, R, T, E)
    k, v = (
        x.permute(0, 2, 1, 3).reshape(B * G, 1, -1, E).expand(-1, R, -1, -1)
        for x in (k_BSGE, v_BSGE)
    )
    mask = mask_BGTS.expand(B, G, -1, -1).reshape(B * G, 1, T, -1)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    return out.view(B, G, R, T, E).permute(0, 3, 1, 2, 4).reshape(B, T, H, E)
