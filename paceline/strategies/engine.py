"""The engine of every strategy that is one module and one optimizer on each rank."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.strategies.base import EngineParts, StepInfo, Totals, normalise
from paceline.train.precision import compute_context
from paceline.train.timing import Clock


class ModuleEngine:
    """Forward and backward through `wrapped`; `unsynced` holds back the exchange of gradients.

    `wrapped` is what is called (DistributedDataParallel, say), `module` what holds the weights.
    """

    def __init__(
        self,
        parts: EngineParts,
        module: nn.Module,
        wrapped: nn.Module,
        optimizer: Optimizer,
        unsynced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.parts, self.module, self.wrapped = parts, module, wrapped
        self.optimizer, self.unsynced = optimizer, unsynced
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.clip = parts.config.optim.clip
        self.precision = parts.plan.precision.value
        self.not_skipped = torch.zeros((), device=parts.device)
        # On the device the fused kernel reads the veto itself; the host never has to look.
        self.veto_on_device = parts.plan.fused_optimizer.value and parts.device.type == "cuda"

    def forward_backward(
        self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
    ) -> Totals:
        loss_sums: list[Tensor] = []
        count: int | Tensor = 0
        for number, batch in enumerate(batches, 1):
            with self.unsynced() if number < len(batches) else nullcontext():
                clock.enter("forward")
                loss, units = self._loss(batch)
                objective = normalise(loss, scale)
                clock.enter("backward")
                objective.backward()
            loss_sums.append(loss.detach())
            count = count + units
        return Totals(loss_sums[0] if len(loss_sums) == 1 else torch.stack(loss_sums).sum(), count)

    def step(self, lr: float, clock: Clock) -> StepInfo:
        clock.enter("optimizer")
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        if self.clip != "off":
            clip_grads_with_norm_(self.parameters, self.clip, norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.veto_on_device:
            skipped = (norm - norm).isnan().float()  # 1 where the norm is inf or NaN
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif math.isfinite(norm.item()):
            skipped = self.not_skipped
            self.optimizer.step()
        else:
            skipped = 1 - self.not_skipped
        for parameter in self.parameters:
            parameter.grad = None
        return StepInfo(norm, skipped)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Totals:
        self.module.eval()
        loss, units = self._loss(batch)
        self.module.train()
        return Totals(loss, units)

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _loss(self, batch: Any) -> tuple[Tensor, int | Tensor]:
        with compute_context(self.precision, self.parts.device):
            result = self.parts.workload.loss(self.wrapped, batch)
        if not isinstance(result, tuple) or len(result) != 2 or result[0].dim() != 0:
            raise ConfigError(
                f"{type(self.parts.workload).__name__}.loss must return two things: the loss summed"
                " over the batch, a tensor without dimensions, and how many were summed\n"
                'hint: return cross_entropy(..., reduction="sum"), len(targets)'
            )
        return result
