"""Gates and choices in a few numbers, on the device, for training.csv and the report.

gate_cmp, gate_sel, gate_win   mean of each gate
gate_entropy                   of the three gates as shares, in nats; even ones have 1.0986
gate_collapse                  share of (token, head) where one gate has all: its share is above
                               0.95 and the entropy below 0.1
selection_entropy              how evenly blocks are chosen: 1 all alike, 0 always the same one
selection_reach                tokens from a query back to the blocks that it chose, on average
"""

import math

import torch
from torch import Tensor

NAMES = (
    "gate_cmp", "gate_sel", "gate_win", "gate_entropy", "gate_collapse",
    "selection_entropy", "selection_reach",
)  # fmt: skip


@torch.no_grad()
def measure(gates_BTH3: Tensor, blocks_BTGN: Tensor, l_sel: int) -> Tensor:
    """Return the numbers in the order of NAMES, fp32."""
    gates = gates_BTH3.float()
    shares = gates / gates.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    entropy = -(shares * shares.clamp(min=1e-9).log()).sum(dim=-1)
    collapsed = (entropy < 0.1) & (shares.amax(dim=-1) > 0.95)
    means = gates.mean(dim=(0, 1, 2))
    chosen = _of_choice(blocks_BTGN, l_sel)
    return torch.cat((means, entropy.mean()[None], collapsed.float().mean()[None], chosen))


def _of_choice(blocks_BTGN: Tensor, l_sel: int) -> Tensor:
    """Return entropy and reach of what was chosen."""
    T = blocks_BTGN.shape[1]
    J = -(-T // l_sel)
    is_real = blocks_BTGN >= 0
    counts = torch.zeros(J + 1, device=blocks_BTGN.device)
    counts.scatter_add_(
        0, blocks_BTGN.long().where(is_real, J).flatten(), is_real.float().flatten()
    )
    shares = counts[:J] / counts[:J].sum()
    entropy = -(shares * shares.clamp(min=1e-9).log()).sum() / math.log(max(J, 2))
    at_T = torch.arange(T, device=blocks_BTGN.device)[:, None, None]
    back = (at_T - blocks_BTGN * l_sel).where(is_real, 0).float().sum() / is_real.sum()
    return torch.stack((entropy, back))
