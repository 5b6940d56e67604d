"""Where a script's own loop waits for other ranks, as far as its model shows: in DDP, in FSDP2.

Whatever else the script exchanges counts as its work. A rank that waits there looks like one that
works, so a rank that is slow just before may go unnoticed; no other rank is blamed for it.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from paceline.strategies.waits import Waits


def find_waits(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Waits | None:
    """Count this model's waiting from now on; None for a model of which it is not known."""
    waits = Waits()
    if isinstance(model, DistributedDataParallel):
        waits.around(model, "_sync_buffers")
    elif hasattr(model, "_get_fsdp_state"):
        from paceline.strategies.fsdp import count_waits  # torch's FSDP takes a while to import

        count_waits(model, waits, device)
    else:
        return None
    if hasattr(optimizer, "_sync_params"):  # torch's ZeroRedundancyOptimizer
        waits.around(optimizer, "_sync_params")
    return waits


def count_backward(waits: Waits, output: Any) -> None:
    """Count the waiting at the end of the backward pass that will begin at a model's output."""
    for value in tree_leaves(output):
        if isinstance(value, torch.Tensor):
            waits.until_done(value)
