"""Number formats: weights and optimizer state are fp32, `precision.mode` is what is computed in."""

from contextlib import AbstractContextManager, nullcontext

import torch


def compute_context(mode: str, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in: autocast for bf16, nothing for fp32."""
    if mode == "fp32":
        return nullcontext()
    assert mode == "bf16", mode
    return torch.autocast(device.type, dtype=torch.bfloat16)
