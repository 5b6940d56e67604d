"""The seam between the one loop and every way of sharing its work.

A `Strategy` describes itself: its keys, what it cannot do, how it lays the ranks out, what it
costs, which cases prove it. Its `build` makes an `Engine`. The loop drives an engine without
knowing which one it is: it passes microbatches and one scale, so that whatever the strategy, the
gradient is that of  sum of losses / units in the global step.

Nothing here loads torch: `strategies/__init__.py` reads the keys of every strategy whenever a
config is read. So a strategy's file imports torch inside `build`, or leaves that to another file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from paceline.config.schema import RunConfig, StrategyConfig
from paceline.records import Crew, Exchange, Finding, PipelinePlan, Plan, Proof, StateBytes
from paceline.strategies.shape import ModelShape
from paceline.workloads.base import Workload
from paceline.workloads.returns import Pair

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from paceline.checkpoint.pieces import Piece, Source
    from paceline.metrics import Items
    from paceline.schedules.passes import Pass
    from paceline.strategies.clock import Clock


class Totals(NamedTuple):
    """Loss summed over units, and the units: zeros on a rank that computes no loss. `extras` is
    what the loss returned beside that: a sum and its count, by name."""

    loss_sum: Tensor
    units: int | Tensor
    extras: Mapping[str, Pair] = MappingProxyType({})


class StepInfo(NamedTuple):
    """Scalars on the device. `skipped` is 1 if the update was vetoed on every rank, and OVERFLOWED
    if that happened because fp16 is still searching for its loss scale."""

    grad_norm: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. `config` has the plan's attention instead of auto."""

    config: RunConfig
    plan: Plan
    workload: Workload
    device: torch.device


@dataclass(frozen=True)
class Share:
    """Which part of the state a rank holds: `index` among `size` ranks that shard together; None
    is the rank that holds most."""

    size: int
    index: int | None
    compute_bytes: int = 4  # of one number in the compute type
    num_microbatches: int = 1


@dataclass(frozen=True)
class Layout:
    """The ranks as a grid. The last axis of `mesh` varies fastest, so it stays inside a node: its
    ranks hold one state together. `dp` is the number of shares that a batch is cut into."""

    mesh: dict[str, int]
    dp: int
    pipeline: PipelinePlan | None = None
    problems: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Case:
    """One row of `paceline verify`. `chosen` are the overrides that define the case; `defaults` are
    what a small proof needs, and the user's own overrides win over them. `num_blocks`: the fewest
    that its model must have. `skipped` says why it cannot be tried here, `hint` what would help."""

    label: str
    chosen: Mapping[str, str] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    num_blocks: int = 0
    skipped: str = ""
    hint: str = ""


class Collective(NamedTuple):
    """What the profile of a step must show: `op` as torch names it, on numbers of type `dtype`;
    "A and B" if some are of one type and some of another."""

    what: str
    op: str
    dtype: str


class Unread(NamedTuple):
    """Keys of a strategy's own section that it does not read in this plan, and why."""

    keys: tuple[str, ...]
    because: str


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
        """Return the loss, without gradients. All ranks call it the same number of times."""
        ...

    def measure(self, batch: Any) -> dict[str, Pair | Items]:
        """Return the result of the workload's `evaluate` for a batch; nothing on a rank that does
        not see the model's output. All ranks call it the same number of times."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """While inside, the model has the weights to evaluate with: the average of `optim.ema` if
        `train.eval_ema` asks for it, else its own."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights and buffers by the model's own names. A collective."""
        ...

    def pieces(self) -> list[Piece]:
        """Return all that a checkpoint must keep, as this rank holds it. A collective. The tensors
        change with the next step."""
        ...

    def rehearse(self, batch: Callable[[], Any], clock: Clock) -> None:
        """Run one pass without side effects before `load`, if a library learns from its first pass
        how to do all others, so that a resumed run sums in the same order as one that never
        stopped."""
        ...

    def load(self, source: Source) -> None:
        """Load this rank's part of a state, whatever strategy wrote it on however many ranks."""
        ...

    def held(self) -> StateBytes:
        """Return the bytes of the tensors this rank really holds now."""
        ...

    def proofs(self) -> list[Proof]:
        """Return evidence of how the engine was really built, for the audit."""
        ...


class Strategy(ABC):
    """Base of every strategy. `estimate`, `exchange` and `build` are required; override whatever
    else differs from one replica per rank."""

    name: str
    summary: str = ""  # what it really is, in a line: `paceline recipes --keys` shows it
    aliases: tuple[str, ...] = ()
    # Its keys, in a section of their own. On the command line all sections are one: strategy.KEY.
    Settings: ClassVar[type[StrategyConfig]] = StrategyConfig
    # Keys of Settings that change the gradients, not only how they are summed.
    lossy: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[str] = ""  # the strategy that replaces it on one rank
    # True: one graph may hold the whole model, for nothing is exchanged inside it.
    compiles_whole: ClassVar[bool] = False
    # True: ranks may stop in the middle of a forward pass to exchange BatchNorm's statistics.
    syncs_batchnorm: ClassVar[bool] = True
    # True: products may take the weights in parts, as they arrive (strategy.exchange=fused).
    fuses: ClassVar[bool] = False
    # Why ranks cannot exchange through symmetric memory; empty: they can.
    no_symmetric: ClassVar[str] = ""
    # True: a library updates the weights, and the audit looks for no optimizer of ours.
    updates_itself: ClassVar[bool] = False
    # Why layers cannot be replaced by torchao's; empty: they can.
    no_fp8: ClassVar[str] = ""
    # Why it cannot take an optimizer that the workload has built; empty: it can.
    no_own_optimizer: ClassVar[str] = ""

    @abstractmethod
    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        """Return the bytes that one rank will hold."""

    @abstractmethod
    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        """Return the bytes of gradients that each rank gives to its collectives per step."""

    @abstractmethod
    def build(self, parts: EngineParts) -> Engine:
        """Build the engine, on every rank together."""

    def lay_out(self, config: RunConfig, crew: Crew, model: ModelShape) -> Layout:
        """Return the mesh. By default one axis of all ranks, each with its share of a batch."""
        return Layout({"dp": crew.world_size}, crew.world_size)

    def problems(self, config: RunConfig, crew: Crew, model: ModelShape) -> list[Finding]:
        """Return the problems of using this strategy here."""
        return []

    def unread(self, config: RunConfig, plan: Plan) -> Iterator[Unread]:
        """Yield the keys of its own section that have no effect in this plan."""
        yield from ()

    def shards(self, config: RunConfig) -> bool:
        """Return True if weights are DTensors, of which each rank holds a piece."""
        return False

    def zero_stage(self, config: RunConfig) -> int | None:
        """Return the stage of ZeRO that this corresponds to, or None."""
        return None

    def device_bytes(self, config: RunConfig, state: StateBytes) -> int:
        """Return how much of `state` is on the device at its peak: less if some of it is
        offloaded."""
        return state.peak

    def updates_on_host(self, config: RunConfig) -> bool:
        """Return True if the CPU updates the weights of GPUs."""
        return False

    def collectives(self, config: RunConfig, plan: Plan) -> list[Collective]:
        """Return the collectives that the audit must find in the profile of a step."""
        return []

    def engine_config(self, config: RunConfig, plan: Plan) -> dict[str, Any]:
        """Return the complete config of the library that it drives, as shown in the plan and used
        in the run. Empty if there is no such library."""
        return {}

    def lost_on_resume(self, config: RunConfig) -> list[str]:
        """Return what its engine remembers but checkpoints do not hold, one sentence each."""
        return []

    def cases(self, config: RunConfig, world: int, micro: int) -> list[Case]:
        """Return what `paceline verify` tries on `world` ranks with `micro` samples per rank in
        each pass; `config` has the user's overrides."""
        return [Case(self.name)]


@runtime_checkable
class Recorded(Protocol):
    """An engine that knows when each part of its last passes ran."""

    def passes(self) -> list[Pass]: ...


def normalise(loss_sum: Tensor, scale: float | Tensor) -> Tensor:
    """Scale a loss; the only place that does. A loss that is not finite makes its gradient NaN.

    `x - x` is 0 for a number and NaN for inf or NaN. So one rank's bad loss reaches every rank
    inside the gradients that they exchange anyway, and all veto the step together: no collective,
    no look at the value from the host.
    """
    value = loss_sum.detach()
    return loss_sum * (scale + (value - value))
