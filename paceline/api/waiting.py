"""Where a loop that is not ours waits for other ranks, as far as its model shows: in DDP, in FSDP2.

Everything else that the script exchanges by itself counts as its work: a rank that waits there is
not told from one that works, so who is slow before it may stay unnamed, and nobody else is named.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.strategies.waits import Waits


def find_waits(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Waits | None:
    """Return what tells a clock where this model waits, from now on; None: nobody knows."""
    waits = Waits()
    if isinstance(model, DistributedDataParallel):
        waits.around(model, "_sync_buffers")
    elif hasattr(model, "_get_fsdp_state"):
        from paceline.strategies.fsdp import tell_waits  # torch's FSDP takes a while to import

        tell_waits(model, waits, device)
    else:
        return None
    if hasattr(optimizer, "_sync_params"):  # torch's ZeroRedundancyOptimizer
        waits.around(optimizer, "_sync_params")
    return waits


def tell_backward(waits: Waits, output: Any) -> None:
    """Tell of the waiting at the end of the backward pass that will begin at a model's output."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor):
            waits.until_done(value)
