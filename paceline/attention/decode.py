"""One layer's cache, and the attention of one more token from it.

A new token reads the compressed keys so far, n l' tokens of the blocks that it chooses and the last
w: not the whole past. So the cache has

    sel        every token's keys and values, by position
    win        the last w, in a ring: position p lies at p mod w
    recent     the last l of what will be compressed, in a ring
    cmp        a compressed key every d tokens, from the first l on

Rows of a batch may have different lengths: each has its own position, and caches count from its
first token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention import plain
from paceline.attention.nsa import Attended, Keys, blend
from paceline.attention.sizes import Sizes

Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Cache:
    """`compress` turns raw keys and values (B, S, G, E) into compressed ones (B, M, G, E)."""

    def __init__(self, sizes: Sizes, num_places: int, compress: Compress) -> None:
        self.sizes, self.num_places, self.compress = sizes, num_places, compress
        self.sel: tuple[Tensor, Tensor] | None = None

    def fill(self, raw: Keys, compressed: Keys, lengths_B: Tensor) -> None:
        """Store a prompt: `raw` has the tokens (B, T, G, E) from position 0 on, the first
        `lengths_B` of which are real; `compressed` has the result for its first two."""
        z, T = self.sizes, raw.k_sel.shape[1]
        like = raw.k_sel
        room = z.num_compressed(self.num_places) + 1  # and one for what is not whole
        self.sel = (_in_room(raw.k_sel, self.num_places), _in_room(raw.v_sel, self.num_places))
        self.cmp = (_in_room(compressed.k_cmp, room), _in_room(compressed.v_cmp, room))
        self.win = tuple(_ring(x, lengths_B, z.w) for x in (raw.k_win, raw.v_win))
        self.recent = tuple(_ring(x, lengths_B, z.l) for x in (raw.k_cmp, raw.v_cmp))
        assert T <= self.num_places, f"{T} tokens and {self.num_places} places of {like.shape}"

    def attend(
        self, q_B1HE: Tensor, new: Keys, gates_B1H3: Tensor, at_B: Tensor, longest: int
    ) -> Attended:
        """Store one token per row, at positions `at_B`, and attend from it. `longest` is the number
        of tokens of the longest row, with this one."""
        assert self.sel is not None, "filled by the prompt"
        z = self.sizes
        _put(self.sel, (new.k_sel, new.v_sel), at_B)
        _put(self.win, (new.k_win, new.v_win), at_B % z.w)
        _put(self.recent, (new.k_cmp, new.v_cmp), at_B % z.l)
        self._compress(at_B)
        at_B1, first = at_B[:, None], torch.zeros_like(at_B)[:, None]
        M = z.num_compressed(longest)
        k_cmp, v_cmp = (x[:, :M] for x in self.cmp)
        is_seen = plain.is_compressed_visible(at_B1, first, M, z)
        cmp, weights = plain.compressed(q_B1HE, k_cmp, v_cmp, is_seen)
        blocks = plain.choose_blocks(weights, at_B1, first, z)
        sel = self._selected(q_B1HE, blocks, at_B)
        slot_W = torch.arange(z.w, device=at_B.device)
        holds_BW = at_B1 - (at_B1 - slot_W) % z.w  # the position that a slot of the ring holds
        k_win, v_win = self.win
        win = plain.masked(q_B1HE, k_win, v_win, (holds_BW >= 0)[:, None, None])
        return Attended(blend(cmp, sel, win, gates_B1H3), cmp, sel, win, blocks)

    def _compress(self, at_B: Tensor) -> None:
        """Make a compressed key where a block is now complete; for other rows it goes to the last
        place, which is never read. So the host need not look at any row."""
        z = self.sizes
        since = at_B + 1 - z.l
        is_whole = (since >= 0) & (since % z.d == 0)
        order_BL = (since[:, None] + torch.arange(z.l, device=at_B.device)) % z.l
        k, v = (
            x.gather(1, order_BL[..., None, None].expand(-1, -1, *x.shape[2:])) for x in self.recent
        )
        place = (since // z.d).where(is_whole, self.cmp[0].shape[1] - 1)
        _put(self.cmp, self.compress(k, v), place)

    def _selected(self, q_B1HE: Tensor, blocks_B1GN: Tensor, at_B: Tensor) -> Tensor:
        """Attend to the chosen tokens alone, gathered from the cache."""
        assert self.sel is not None
        z = self.sizes
        within = torch.arange(z.l_sel, device=at_B.device)
        token_BGX = (blocks_B1GN[:, 0, :, :, None].long() * z.l_sel + within).flatten(2)
        sees = (token_BGX >= 0) & (token_BGX <= at_B[:, None, None])
        index = token_BGX.clamp(0, self.num_places - 1).transpose(1, 2)[..., None]
        k, v = (x.gather(1, index.expand(-1, -1, -1, x.shape[-1])) for x in self.sel)
        return plain.masked(q_B1HE, k, v, sees[:, :, None])


def _in_room(x_BTGE: Tensor, num_places: int) -> Tensor:
    return F.pad(x_BTGE, (0, 0, 0, 0, 0, num_places - x_BTGE.shape[1]))


def _ring(x_BTGE: Tensor, lengths_B: Tensor, size: int) -> Tensor:
    """Return the last `size` tokens of each row, position p at p mod size."""
    slot = torch.arange(size, device=lengths_B.device)
    last_B1 = lengths_B[:, None] - 1
    holds_BW = (last_B1 - (last_B1 - slot) % size).clamp(min=0)
    return x_BTGE.gather(1, holds_BW[..., None, None].expand(-1, -1, *x_BTGE.shape[2:]))


def _put(cache: tuple[Tensor, ...], new: tuple[Tensor, Tensor], place_B: Tensor) -> None:
    row = torch.arange(len(place_B), device=place_B.device)
    for kept, x_B1GE in zip(cache, new, strict=True):
        kept[row, place_B] = x_B1GE[:, 0].to(kept.dtype)
