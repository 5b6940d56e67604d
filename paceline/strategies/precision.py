"""Number formats: weights and optimizer state are fp32; `precision.mode` is the compute type."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

COMPUTE_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # everything except products of layers that cast for themselves
}
START_SCALE = 65536.0
OVERFLOWED = 2  # a step skipped while fp16 looks for its scale; 1 is one whose gradient is bad
GROWTH_STEPS = 2000  # steps without overflow before the scale doubles


def compute_context(mode: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context a forward pass runs in: autocast, or nothing for fp32."""
    if mode == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=COMPUTE_TYPES[mode])


class LossScale:
    """What fp16 needs: the loss is scaled up so that small gradients do not vanish, and the scale
    is halved when a gradient overflows. It lives on the device; the host never looks at it.

    Unlike torch's GradScaler it uses the gradient's norm, which all ranks know, so it is the same
    on every rank whatever the sharding.
    """

    def __init__(self, start: float, device: torch.device) -> None:
        self.value = torch.tensor(start, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Halve the scale if the step overflowed; double it after many that did not."""
        torch._amp_update_scale_(self.value, self._good_steps, overflowed, 2.0, 0.5, GROWTH_STEPS)
        self.value.clamp_(min=1.0)

    def judge(self, skipped: Tensor) -> Tensor:
        """Update with a step's `skipped`, 0 or 1, and return OVERFLOWED if that is not a fault. At
        a scale of 1 there is nothing left to halve: the gradient itself is then bad."""
        is_searching = (self.value > 1.0).float()
        self.update(skipped)
        return skipped * (1 + (OVERFLOWED - 1) * is_searching)

    def state(self) -> dict[str, Any]:
        return {"value": self.value.clone(), "good_steps": self._good_steps.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        self._good_steps.copy_(state["good_steps"])
