"""The workload's loss as a module: what a strategy wraps, and what each batch calls.

A wrapper must see one forward pass from its beginning to its end, and the workload must see its own
model: its methods, its items, its attributes. So the wrapper is around the loss, not around the
model, and whatever the loss does with the model happens inside.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.metrics import Items
from paceline.strategies.base import EngineParts
from paceline.strategies.precision import compute_context
from paceline.workloads.base import Workload
from paceline.workloads.generation import Request
from paceline.workloads.returns import Pair, read_loss, read_measured, without_graph


class Objective(nn.Module):
    """`model` is the workload's own, and holds all weights."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, batch: Any, evaluates: bool = False) -> Any:
        return ask_workload(self.workload, self.model, batch, evaluates)


def ask_workload(workload: Workload, model: nn.Module, batch: Any, evaluates: bool) -> Any:
    """Return the result of the workload's `evaluate` for a batch, or of its `loss`; for a request
    for text what it generates, a row of ids per prompt."""
    if isinstance(batch, Request):
        return {"texts": Items(workload.generate(model, batch))}
    if evaluates:
        return workload.evaluate(model, batch)
    return without_graph(workload.loss(model, batch))


def compute_loss(
    parts: EngineParts, objective: Callable[[Any], Any], batch: Any
) -> tuple[Tensor, int | Tensor, dict[str, Pair]]:
    """Return the summed loss of a batch, its units, and further sums by name; `objective` is
    wrapped or bare."""
    with compute_context(parts.plan.precision.value, parts.device):
        result = objective(batch)
    return read_loss(parts.workload, result)


def require_graph(workload: Workload, loss: Tensor) -> None:
    """Refuse to train by a loss from which no gradient reaches a weight."""
    if not loss.requires_grad:
        raise ConfigError(
            f"{type(workload).__name__}.loss returned a loss without a gradient: it does not depend"
            " on any weight that is trained\n"
            "hint: compute it from what the model returns, without .detach(), .item(), numpy or"
            " torch.no_grad() on the way"
        )


def compute_metrics(
    parts: EngineParts, objective: Callable[[Any, bool], Any], batch: Any
) -> dict[str, Pair | Items]:
    """Return what the workload measures on a batch of validation data, by name."""
    with compute_context(parts.plan.precision.value, parts.device):
        result = objective(batch, True)
    return read_measured(parts.workload, result)
