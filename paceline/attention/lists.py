"""Which queries chose a block: the inverse of a choice, by tensor operations that wait for nothing.

    order    (B G t N) numbers of pairs, t N + n inside each (b, g), sorted by (b, g) and block
    items    (W, 4) work for programs: b G + g, block, and from where to where in `order`

Lists differ in length, and the first block is in all of them: a list is cut into items of at most
`longest` pairs. How many items there are depends on the choice, but never more than W = B G J +
pairs / longest: so the grid is known without asking the device, and the last items are empty.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Lists(NamedTuple):
    order: Tensor
    items: Tensor


def build_lists(blocks_BtGN: Tensor, num_blocks: int, longest: int) -> Lists:
    """Return the lists of some queries' choice."""
    B, t, G, N = blocks_BtGN.shape
    J, device = num_blocks, blocks_BtGN.device
    of_group = blocks_BtGN.transpose(1, 2).reshape(B * G, t * N).long()
    # Empty places go to a list of their own behind the others, which no item reads.
    key = torch.where(of_group < 0, J, of_group)
    key = (key + torch.arange(B * G, device=device)[:, None] * (J + 1)).int().flatten()
    key, order = key.sort(stable=True)
    edges = torch.searchsorted(key, torch.arange(B * G * (J + 1) + 1, device=device).int())
    begin = edges[:-1].view(B * G, J + 1)[:, :J].flatten()
    end = edges[1:].view(B * G, J + 1)[:, :J].flatten()
    num_items = (end - begin + longest - 1) // longest
    last = num_items.cumsum(dim=0)
    W = B * G * J + B * G * t * N // longest
    item = torch.arange(W, device=device)
    owner = torch.searchsorted(last, item, right=True)
    is_real = owner < B * G * J
    owner = owner.clamp(max=B * G * J - 1)
    start = begin[owner] + (item - (last - num_items)[owner]) * longest
    stop = torch.minimum(start + longest, end[owner]).where(is_real, start)
    items = torch.stack((owner // J, owner % J, start, stop), dim=1).int()
    return Lists((order % (t * N)).int(), items)
