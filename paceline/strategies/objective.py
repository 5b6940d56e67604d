"""The workload's loss as a module: what a strategy wraps, and what is called for every batch.

A wrapper must see one forward pass from its beginning to its end, and the workload must see its own
model: its methods, its items, its attributes. So the wrapper is around the loss, not around the
model, and whatever the loss does with the model happens inside.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.strategies.base import EngineParts
from paceline.strategies.precision import compute_context
from paceline.workloads.base import Workload


class Objective(nn.Module):
    """`model` is the workload's own, and holds all weights."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, batch: Any) -> Any:
        return self.workload.loss(self.model, batch)


def compute_loss(
    parts: EngineParts, objective: Callable[[Any], Any], batch: Any
) -> tuple[Tensor, int | Tensor]:
    """Return the summed loss of a batch and its units; `objective` is wrapped or bare."""
    with compute_context(parts.plan.precision.value, parts.device):
        result = objective(batch)
    if not _is_sum_and_count(result):
        raise ConfigError(
            f"{type(parts.workload).__name__}.loss must return two things: the loss summed"
            " over the batch, a tensor without dimensions, and how many were summed; it returned"
            f" {_describe(result)}\n"
            'hint: return cross_entropy(..., reduction="sum"), len(targets)'
        )
    loss, units = result
    return loss, units


def _is_sum_and_count(result: object) -> bool:
    if not isinstance(result, tuple) or len(result) != 2:
        return False
    loss, units = result
    is_scalar = isinstance(loss, Tensor) and loss.dim() == 0
    is_count = units.numel() == 1 if isinstance(units, Tensor) else isinstance(units, int | float)
    return is_scalar and is_count


def _describe(value: object) -> str:
    """Describe a value, `a tuple of (a tensor of shape [8], 8)`: enough to see what is wrong with
    it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(_describe(item) for item in value)})"
    if isinstance(value, int | float):
        return repr(value)
    return "None" if value is None else f"a {type(value).__name__}"
