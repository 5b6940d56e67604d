"""The seam between the one loop and every way of sharing its work.

A `Strategy` says what it cannot do, what it would cost, and builds an `Engine`. The loop drives
an engine without knowing which one it is: it hands over microbatches and one scale, so that
whatever the strategy, the gradient is that of  sum of losses / units in the global step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import Piece, Source
from paceline.config.schema import RunConfig
from paceline.records import Env, Exchange, Finding, Plan, Proof, StateBytes
from paceline.schedules.passes import Pass
from paceline.strategies.clock import Clock
from paceline.strategies.shape import ModelShape
from paceline.workloads.base import Workload


class Totals(NamedTuple):
    """Loss summed over units, and the units: zeros on a rank that computes no loss."""

    loss_sum: Tensor
    units: int | Tensor


class StepInfo(NamedTuple):
    """Scalars on the device. `skipped` is 1 where the update was vetoed on every rank, and
    OVERFLOWED where that is what fp16 does while it looks for its loss scale."""

    grad_norm: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. `config` has the plan's attention in place of auto."""

    config: RunConfig
    plan: Plan
    workload: Workload
    device: torch.device


@dataclass(frozen=True)
class Share:
    """Which part of the state a rank holds: `index` among `size` ranks that shard together; None
    is the one that holds most."""

    size: int
    index: int | None
    compute_bytes: int = 4  # of one number in the compute type
    num_microbatches: int = 1


class Engine(Protocol):
    """`module` holds this rank's weights, under the model's own names."""

    module: nn.Module

    def forward_backward(
        self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
    ) -> Totals:
        """Accumulate the gradient of this rank's share of a step, through `normalise`."""
        ...

    def step(self, lr: float, clock: Clock) -> StepInfo:
        """Clip and update, unless the gradient of any rank is not finite; clear the gradient."""
        ...

    def evaluate(self, batch: Any) -> Totals:
        """Loss without gradients. All ranks call it the same number of times."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Whole weights and buffers by the model's own names: all ranks ask together."""
        ...

    def pieces(self) -> list[Piece]:
        """All that a checkpoint must keep, as this rank holds it: all ranks ask together. The
        tensors change with the next step."""
        ...

    def rehearse(self, batch: Callable[[], Any], clock: Clock) -> None:
        """Before `load`: one pass that leaves nothing behind, where a library learns from its first
        pass how to do all others. So a run that goes on sums in the order of one that never
        stopped."""
        ...

    def load(self, source: Source) -> None:
        """Take this rank's part of a state, whatever strategy wrote it on however many ranks."""
        ...

    def held(self) -> StateBytes:
        """Bytes of the tensors this rank really holds now."""
        ...

    def proofs(self) -> list[Proof]:
        """What the engine can show of how it was really built, for the audit."""
        ...


class Strategy(Protocol):
    def problems(self, config: RunConfig, env: Env, model: ModelShape) -> list[Finding]:
        """What is wrong with asking for this strategy here; empty when nothing is."""
        ...

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Bytes one rank will hold."""
        ...

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        """Bytes of gradients a rank gives to its collectives for one step."""
        ...

    def build(self, parts: EngineParts) -> Engine: ...


@runtime_checkable
class Configured(Protocol):
    """A strategy that drives a library with a config of its own."""

    def settings(self, config: RunConfig, plan: Plan) -> dict[str, Any]:
        """That config, whole: it stands in the plan, and is what runs."""
        ...


@runtime_checkable
class Recorded(Protocol):
    """An engine that knows when each part of its last passes ran."""

    def passes(self) -> list[Pass]: ...


def normalise(loss_sum: Tensor, scale: float | Tensor) -> Tensor:
    """The one place where a loss is scaled. A loss that is not finite makes its gradient NaN.

    `x - x` is 0 for a number and NaN for inf or NaN. So one rank's bad loss reaches every
    rank inside the gradients that they exchange anyway, and all veto the step together: no
    collective, no look at the value from the host.
    """
    value = loss_sum.detach()
    return loss_sum * (scale + (value - value))
