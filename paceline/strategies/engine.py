"""The engine of every strategy that is one module and one optimizer on each rank."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from paceline.checkpoint.pieces import Piece, Source
from paceline.data.loader import to_device
from paceline.metrics import Items
from paceline.records import Proof, StateBytes
from paceline.records.phases import Phase
from paceline.strategies.average import Average
from paceline.strategies.base import EngineParts, StepInfo, Totals, normalise
from paceline.strategies.batchnorm import SharedBuffers, count_exchange
from paceline.strategies.clock import Clock
from paceline.strategies.fp8 import fp8_proofs
from paceline.strategies.gather import global_norm, locals_of, storage_bytes, whole
from paceline.strategies.objective import compute_loss, compute_metrics, require_graph
from paceline.strategies.offload import is_offloading, offload_proofs
from paceline.strategies.optim import set_rate, trained_parameters
from paceline.strategies.optimizers import builds_own, state_shapes
from paceline.strategies.precision import START_SCALE, LossScale
from paceline.strategies.stored import (
    OwnState,
    Slots,
    load_module,
    load_optimizer,
    load_scale,
    module_pieces,
    moment_pieces,
    scale_pieces,
)
from paceline.strategies.waits import Waits
from paceline.workloads.returns import Pair, add_pairs

TINY = 1e-6  # as in torch's clip_grad_norm_


@dataclass(frozen=True)
class Wrapping:
    """What a strategy put around the objective.

    `model` is called with a batch; `unsynced` holds back the exchange of gradients; `settle` frees
    what a forward pass without a backward leaves; `forget` drops what the exchange remembers of a
    step that was vetoed; `replaced` is called, on all ranks, when weights were changed by anything
    but an update; `shards` are the ranks that each hold a piece of every gradient; `rehearsed` is
    called after a rehearsal, for a wrapper that behaves differently after its first pass; `dealt`
    is the optimizer that does the arithmetic, inside one that deals its state out by whole
    parameters; `waits` notes where it waits for other ranks.
    """

    model: nn.Module
    unsynced: Callable[[], AbstractContextManager[None]] = nullcontext
    proofs: Callable[[], list[Proof]] = list
    settle: Callable[[], None] = lambda: None
    forget: Callable[[], None] | None = None
    replaced: Callable[[], None] = lambda: None
    shards: ProcessGroup | None = None
    rehearsed: Callable[[], None] | None = None
    dealt: Optimizer | None = None
    waits: Waits = field(default_factory=Waits)


class ModuleEngine:
    """Runs forward and backward through `wrapping.model`; `module` holds the weights: the
    workload's model, under its own names."""

    # True: the clock sees all waiting for other ranks; False: a library waits where it likes.
    knows_blocked = True

    def __init__(
        self, parts: EngineParts, module: nn.Module, optimizer: Optimizer, wrapping: Wrapping
    ) -> None:
        self.parts, self.module, self.wrapping = parts, module, wrapping
        self.optimizer, self.inner = optimizer, wrapping.dealt or optimizer
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.clip = parts.config.optim.clip
        self.precision = parts.plan.precision.value
        self.zero = torch.zeros((), device=parts.device)
        self.scaler = build_scaler(parts)
        self.buffers = SharedBuffers(module)
        parts.workload.waiting_for_ranks = wrapping.waits.counted
        if parts.plan.compile.value == "off":  # a graph has no room for a clock
            count_exchange(module, wrapping.waits)
        decay = parts.config.optim.ema
        self.average = Average(module, decay, wrapping.replaced) if decay != "off" else None
        self.own = OwnState(module, self.inner) if builds_own(parts.workload) else None
        # On the device the fused kernel itself reads the veto and divides the gradient; the host
        # never has to look. What remembers a bad step must be told of it, so the host must look.
        on_cuda = parts.plan.fused_optimizer.value and self.parameters[0].device.type == "cuda"
        self.veto_on_device = on_cuda and wrapping.forget is None

    def forward_backward(
        self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
    ) -> Totals:
        loss_sums: list[Tensor] = []
        count: int | Tensor = 0
        extras: dict[str, Pair] = {}
        scale = self.scaled(scale)
        waits, clock.knows_blocked = self.wrapping.waits, self.knows_blocked
        waits.clock = clock
        for number, batch in enumerate(batches, 1):
            with self.wrapping.unsynced() if number < len(batches) else nullcontext():
                clock.enter(Phase.FORWARD)
                loss, units, more = compute_loss(self.parts, self.wrapping.model, batch)
                require_graph(self.parts.workload, loss)
                objective = normalise(loss, scale)
                clock.enter(Phase.BACKWARD)
                waits.until_returned(objective)
                self.backward(objective)
                clock.unblock()
            loss_sums.append(loss.detach())
            count = count + units
            add_pairs(extras, more)
        if self.buffers.by_type:
            with clock.blocked():
                self.buffers.agree()
        loss_sum = loss_sums[0] if len(loss_sums) == 1 else torch.stack(loss_sums).sum()
        return Totals(loss_sum, count, extras)

    def scaled(self, scale: float | Tensor) -> float | Tensor:
        """Multiply by fp16's loss scale, where there is one."""
        return scale if self.scaler is None else scale * self.scaler.value

    def backward(self, objective: Tensor) -> None:
        objective.backward()

    def step(self, lr: float, clock: Clock) -> StepInfo:
        clock.enter(Phase.OPTIMIZER)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        with clock.blocked() if self.norm_is_shared else nullcontext():
            norm = self.norm(gradients)
        # One divisor for both: out of fp16's scale, and down to the largest norm allowed.
        divisor = self.scaler.value if self.scaler is not None else None
        if divisor is not None:
            norm = norm / divisor
        if self.clip != "off":
            excess = ((norm + TINY) / self.clip).clamp(min=1.0)
            divisor = excess if divisor is None else divisor * excess
        skipped = self._update(lr, gradients, norm, divisor)
        if self.own is not None:
            self.own.require_storable()
        for parameter in self.parameters:
            parameter.grad = None
        if self.scaler is not None:
            skipped = self.scaler.judge(skipped)
        return StepInfo(norm, skipped)

    @property
    def norm_is_shared(self) -> bool:
        """Say whether ranks sum the norm together, and so wait for each other."""
        return self.wrapping.shards is not None

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient norm over all parameters of the model, the same on every rank."""
        return global_norm(gradients, self.parts.device, self.wrapping.shards)

    def _update(
        self, lr: float, gradients: list[Tensor], norm: Tensor, divisor: Tensor | None
    ) -> Tensor:
        """Step unless the norm is not finite; return 1 if it was not."""
        set_rate(self.optimizer, lr)
        if self.veto_on_device:
            skipped = (norm - norm).isnan().float()  # 1 where the norm is inf or NaN
            self.inner.found_inf, self.inner.grad_scale = skipped, divisor  # type: ignore[attr-defined]
            self.optimizer.step()
            if self.average is not None:
                self.average.update(skipped)
            return skipped
        if math.isfinite(norm.item()):
            if gradients and divisor is not None and divisor.item() != 1.0:
                divisor = divisor.to(gradients[0].device)
                torch._foreach_div_(locals_of(gradients), divisor)
            self.optimizer.step()
            if self.average is not None:
                self.average.update()
            return self.zero
        if self.wrapping.forget is not None:
            self.wrapping.forget()
        return 1 - self.zero

    def evaluate(self, batch: Any) -> Totals:
        with self._evaluating():
            return Totals(*compute_loss(self.parts, self.wrapping.model, batch))

    def measure(self, batch: Any) -> dict[str, Pair | Items]:
        with self._evaluating():
            return compute_metrics(self.parts, self.wrapping.model, batch)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()
            self.wrapping.settle()

    def averaged(self) -> AbstractContextManager[None]:
        if self.average is None or not self.parts.config.train.eval_ema:
            return nullcontext()
        return self.average.in_place()

    def weights(self) -> dict[str, Tensor]:
        """Return whole tensors, even of what is sharded. A collective."""
        return {name: whole(value) for name, value in self.module.state_dict().items()}

    def pieces(self) -> list[Piece]:
        # State that is dealt out by whole parameters: what is here is nowhere else.
        holders = (dist.get_rank(),) if self.wrapping.dealt is not None else None
        moments = moment_pieces(self.module, self.inner, holders)
        trained_only = self.parts.config.checkpoint.weights == "trained"
        return [*module_pieces(self.module, trained_only), *moments, *self.other_pieces()]

    def other_pieces(self) -> list[Piece]:
        """Return what is kept beside weights and moments."""
        return [
            *(scale_pieces(self.scaler) if self.scaler is not None else []),
            *(self.average.pieces() if self.average is not None else []),
            *(self.own.pieces() if self.own is not None else []),
        ]

    def rehearse(self, batch: Callable[[], Any], clock: Clock) -> None:
        if self.wrapping.rehearsed is None:
            return
        self.forward_backward([to_device(batch(), self.parts.device)], 0.0, clock)
        for parameter in self.parameters:
            parameter.grad = None
        self.wrapping.rehearsed()

    @torch.no_grad()
    def load(self, source: Source) -> None:
        """Load all that this rank holds, from whatever ranks it was written by."""
        load_module(source, self.module)
        self.wrapping.replaced()
        self.load_updates(source)

    def load_updates(self, source: Source) -> None:
        """Load what later updates depend on, beside the weights, which are loaded already."""
        load_optimizer(source, self.module, self.inner, self.wanted_slots())
        if self.scaler is not None:
            load_scale(self.scaler, source)
        if self.average is not None:
            self.average.load(source)
        if self.own is not None:
            self.own.load(source)

    def wanted_slots(self) -> Slots | None:
        """Return what `optim.name` keeps for each parameter; None: whatever the workload's own
        optimizer keeps."""
        if self.own is not None:
            return None
        optim = self.parts.config.optim
        return {n.name: set(state_shapes(n, optim)) for n in trained_parameters(self.module)}

    def held(self) -> StateBytes:
        entries = self.inner.state.values()
        return StateBytes(
            parameters=storage_bytes(self.module.parameters()),
            gradients=storage_bytes(p.grad for p in self.parameters if p.grad is not None),
            optimizer=storage_bytes(
                value for entry in entries for value in entry.values() if torch.is_tensor(value)
            )
            + storage_bytes(self.average.values.values() if self.average is not None else ()),
        )

    def proofs(self) -> list[Proof]:
        return [
            *self.wrapping.proofs(),
            *fp8_proofs(self.parts.plan, self.module),
            *(offload_proofs(self.module) if is_offloading(self.parts) else []),
        ]


def build_scaler(parts: EngineParts) -> LossScale | None:
    if parts.plan.precision.value != "fp16":
        return None
    asked = parts.config.precision.loss_scale
    assert asked != "off", "refused by the plan"
    return LossScale(START_SCALE if asked == "auto" else asked, parts.device)
