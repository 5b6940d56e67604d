"""One stage, and a batch relayed through all of them.

A stage is a part of the workload's own forward pass, as a module: its input is what the stage
before sends, and it returns what the next one needs, or the loss.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.metrics import Items
from paceline.strategies.base import EngineParts
from paceline.strategies.objective import (
    ask_workload,
    compute_loss,
    compute_metrics,
    require_graph,
)
from paceline.strategies.pipeline.ghosts import Reached, Region
from paceline.workloads.returns import Pair

# A tensor is announced by a header of whole numbers: its type's place here, its axes, its sizes.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_AXES = 8


class Sent(NamedTuple):
    """What a tensor between stages looks like."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Stage(nn.Module):
    """`batch` is the microbatch to run; `done` collects the losses, where this stage has one, and
    `measured` what `evaluate` found while it `evaluates`.

    `wire` is the device of tensors that travel between ranks. gloo cannot read a GPU's memory from
    peer to peer ("writev: Bad address"), so with it they pass through the host: the two copies are
    part of the graph, and gradients go back the same way.
    """

    def __init__(
        self, parts: EngineParts, model: nn.Module, region: Region, index: int, num_stages: int
    ) -> None:
        super().__init__()
        self.parts, self.model, self.region = parts, model, region
        self.index, self.num_stages = index, num_stages
        self.batch: Any = None
        self.done: list[tuple[Tensor, int | Tensor, dict[str, Pair]]] = []
        self.evaluates = False
        self.measured: list[dict[str, Pair | Items]] = []
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
        """Run this part of the model. The first stage may be given anything: it reads its batch."""
        handed = None if self.is_first or received is None else received.to(self.parts.device)
        self.region.begin(handed)
        try:
            loss = self._measure() if self.evaluates else self._compute_loss()
        except Reached as reached:
            return _ownable(reached.hidden.to(self.wire))
        finally:
            self.region.end()
        if not self.is_last:
            raise ConfigError(
                f"stage {self.index}: the model's forward never called the next stage's first"
                " block\nhint: a pipeline needs a model that calls its blocks one after the other"
            )
        return torch.stack([loss])  # with an axis, along which torch puts microbatches together

    def _compute_loss(self) -> Tensor:
        loss, units, extras = compute_loss(self.parts, self._objective, self.batch)
        if torch.is_grad_enabled():
            require_graph(self.parts.workload, loss)
        self.done.append((loss.detach(), units, extras))
        return loss

    def _measure(self) -> Tensor:
        self.measured.append(compute_metrics(self.parts, self._objective, self.batch))
        return torch.zeros((), device=self.parts.device)  # nobody waits for it

    def _objective(self, batch: Any, evaluates: bool = False) -> Any:
        workload = self.parts.workload
        try:
            return ask_workload(workload, self.model, batch, evaluates)
        except ConfigError as error:
            if not evaluates:
                raise
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"{type(workload).__name__}.evaluate in a pipeline, which can run the model once"
                f" for a batch, and not several times as to generate: {first}\n"
                "hint: measure what one forward pass gives, or choose another strategy.name"
            ) from error


def _ownable(hidden: Tensor) -> Tensor:
    """Return a tensor that torch can send. It must be dense, and torch detaches it from its graph
    in place, which is not possible for a view: what a Linear or a transpose returns."""
    if hidden._is_view() or not hidden.is_contiguous():
        return hidden.clone(memory_format=torch.contiguous_format)
    return hidden


class Relay:
    """Runs a batch through all stages, one after the other, forward only.

    `homes[stage]`: the rank of the pipeline that has it; `stages`: those of this rank.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        homes: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages, self.homes, self.group, self.device = stages, homes, group, device
        self.here = dist.get_rank(group)

    @torch.no_grad()
    def run(self, batch: Any, learns: bool = False) -> None:
        """Relay a batch; the last stage notes its loss. `learns`: each stage notes what it receives
        and sends, whose size may differ for a batch to evaluate."""
        handed: Tensor | None = None
        for index, stage in sorted(self.stages.items()):
            if index > 0 and self.homes[index - 1] != self.here:
                handed = self._receive(self.homes[index - 1])
            stage.batch = batch
            stage.region.learns = learns
            if learns:
                _require_no_ghosts(stage, handed, self.device)
            given = stage(handed)
            stage.region.learns = False
            if learns:
                stage.takes = Sent(handed.shape, handed.dtype) if handed is not None else None
                stage.gives = Sent(given.shape, given.dtype)
            handed = given
            if not stage.is_last and self.homes[index + 1] != self.here:
                self._send(given, self.homes[index + 1])

    def _send(self, value: Tensor, target: int) -> None:
        header = torch.zeros(2 + MAX_AXES, dtype=torch.int64)
        header[:2] = torch.tensor([DTYPES.index(value.dtype), value.dim()])
        header[2 : 2 + value.dim()] = torch.tensor(value.shape)
        dist.send(header.to(value.device), group_dst=target, group=self.group)
        dist.send(value.contiguous(), group_dst=target, group=self.group)

    def _receive(self, source: int) -> Tensor:
        wire = next(iter(self.stages.values())).wire
        header = torch.zeros(2 + MAX_AXES, dtype=torch.int64, device=wire)
        dist.recv(header, group_src=source, group=self.group)
        kind, axes, *sizes = header.tolist()
        value = torch.empty(sizes[:axes], dtype=DTYPES[kind], device=wire)
        dist.recv(value, group_src=source, group=self.group)
        return value


def _require_no_ghosts(stage: Stage, handed: Tensor | None, device: torch.device) -> None:
    """Refuse a stage whose result depends on what ghosts return: the loss would be NaN, and nothing
    would say why."""
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):
        given = stage(handed)
    with torch.random.fork_rng(devices=on_gpu), stage.region.filled_with_ones():
        again = stage(handed)
    if _differ(given, again):
        raise ConfigError(
            f"stage {stage.index} uses what an earlier stage has computed, and only what flows from"
            " block to block is sent: the model has a connection around its blocks\n"
            "hint: hand it through the blocks, or use another strategy"
        )


def _differ(a: Tensor, b: Tensor) -> bool:
    """Compare the tensors as a whole: a kernel that sums in another order may change the last bit
    of some numbers."""
    if not torch.equal(a.isnan(), b.isnan()):
        return True
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() > 1e-3 * a.norm())
