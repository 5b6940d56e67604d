"""A batch through all stages, one after the other, forward only."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ConfigError
from paceline.strategies.pipeline.stage import Sent, Stage

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_AXES = 8


class Relay:
    """`homes[stage]`: the rank of the pipeline that has it; `stages`: those of this rank."""

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
        """The last stage notes its loss. `learns`: each notes what it takes and gives, which for a
        batch to evaluate may be another size."""
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
    """What a stage makes must not depend on what ghosts return. The loss would be NaN, and nobody
    would know why."""
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu):
        given = stage(handed)
    with torch.random.fork_rng(devices=on_gpu), stage.region.disguised():
        again = stage(handed)
    if _differ(given, again):
        raise ConfigError(
            f"stage {stage.index} uses what an earlier stage has computed, and only what flows from"
            " block to block is sent: the model has a connection around its blocks\n"
            "hint: hand it through the blocks, or use another strategy"
        )


def _differ(a: Tensor, b: Tensor) -> bool:
    """As a whole: a kernel that sums in another order may change the last bit of some numbers."""
    if not torch.equal(a.isnan(), b.isnan()):
        return True
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).norm() > 1e-3 * a.norm())
