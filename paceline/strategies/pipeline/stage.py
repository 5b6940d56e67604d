"""One stage: a part of the workload's own forward pass, as a module that takes what the stage
before sends, and returns what the next one needs, or the loss."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.strategies.base import EngineParts
from paceline.strategies.objective import compute_loss
from paceline.strategies.pipeline.ghosts import Reached, Region


class Sent(NamedTuple):
    """What a tensor between stages looks like."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Stage(nn.Module):
    """`batch` is the microbatch to run; `done` collects the losses, where this stage has one.

    `wire` is where tensors lie that travel between ranks. gloo cannot read a GPU's memory from
    peer to peer ("writev: Bad address"), so under it they pass through the host: the two copies are
    part of the graph, and gradients take the same way back.
    """

    def __init__(
        self, parts: EngineParts, model: nn.Module, region: Region, index: int, num_stages: int
    ) -> None:
        super().__init__()
        self.parts, self.model, self.region = parts, model, region
        self.index, self.num_stages = index, num_stages
        self.batch: Any = None
        self.done: list[tuple[Tensor, int | Tensor]] = []
        on_gloo = parts.plan.backend.value == "gloo"
        self.wire = torch.device("cpu") if on_gloo else parts.device
        self.takes: Sent | None = None
        self.gives: Sent | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def forward(self, received: Tensor | None = None) -> Tensor:
        """The first stage may be given anything: it reads its batch."""
        handed = None if self.is_first or received is None else received.to(self.parts.device)
        self.region.begin(handed)
        try:
            loss, units = compute_loss(self.parts, self._objective, self.batch)
        except Reached as reached:
            return _ownable(reached.hidden.to(self.wire))
        finally:
            self.region.end()
        if not self.is_last:
            raise ConfigError(
                f"stage {self.index}: the model's forward never called the next stage's first"
                " block\nhint: a pipeline needs a model that calls its blocks one after the other"
            )
        self.done.append((loss.detach(), units))
        return torch.stack([loss])  # with an axis, along which torch puts microbatches together

    def _objective(self, batch: Any) -> Any:
        return self.parts.workload.loss(self.model, batch)


def _ownable(hidden: Tensor) -> Tensor:
    """A tensor that torch can send, which wants it dense, and cut off from its graph in place,
    which it cannot do to a view: what a Linear or a transpose returns."""
    if hidden._is_view() or not hidden.is_contiguous():
        return hidden.clone(memory_format=torch.contiguous_format)
    return hidden
