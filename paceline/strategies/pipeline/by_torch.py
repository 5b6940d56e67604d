"""The schedules that torch has, run by torch.

Our stages read their batch themselves, so torch gets numbers instead of inputs and targets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from paceline.errors import ConfigError
from paceline.schedules.actions import Action, Kind
from paceline.strategies.pipeline.recorder import Recorder
from paceline.strategies.pipeline.stage import Sent, Stage

SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
Objective = Callable[[Tensor], Tensor]


class TimedStage(PipelineStage):
    """A torch stage that passes the microbatch to its module, and records when it ran."""

    microbatches: Sequence[Any] = ()

    def __init__(self, stage: Stage, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(
            stage,
            stage.index,
            stage.num_stages,
            stage.wire,  # torch makes its receive buffers there
            input_args=_example(stage.takes) or (torch.zeros(1, device=stage.wire),),
            output_args=_example(stage.gives),
            group=group,
        )
        self.stage, self.recorder = stage, recorder

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Connect to neighbours on other ranks only: in a V the next stage may be on this one, and
        gloo has no connection to itself (torch 2.11; later versions ask otherwise)."""
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.stage.batch = self.microbatches[fwd_chunk_id]
        with self.recorder.timed(Action(Kind.FORWARD, self.stage_index, fwd_chunk_id)):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            except RuntimeError as error:
                # torch wraps any error in one of its own.
                raise error.__cause__ or error from None

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        kind = Kind.BACKWARD if full_backward else Kind.INPUT
        with self.recorder.timed(Action(kind, self.stage_index, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            made = self.bwd_cache.get(bwd_chunk_id, ())  # sent on; autograd promises no layout
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in made)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        with self.recorder.timed(Action(Kind.WEIGHT, self.stage_index, bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        try:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except RuntimeError as error:
            if backward_type != "weight" or "a second time" not in str(error):
                raise error.__cause__ or error from None
            raise ConfigError(
                f"stage {self.stage_index} uses a weight twice, one use after the other: the two"
                " halves of such a backward cannot run apart\n"
                "hint: set strategy.schedule=1f1b, or interleaved_1f1b"
            ) from error


class TorchRunner:
    """Runs one pass of torch's schedule over the microbatches of a batch."""

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        group: dist.ProcessGroup,
        recorder: Recorder,
        num_microbatches: int,
        objective: Objective,
    ) -> None:
        self.stages = [TimedStage(stage, group, recorder) for stage in stages]
        settings = {
            "n_microbatches": num_microbatches,
            "loss_fn": lambda output, target: objective(output),
            "scale_grads": False,  # the loss is normalised already
        }
        if name in SINGLE:
            self.schedule = SINGLE[name](self.stages[0], **settings)
        else:
            self.schedule = SEVERAL[name](self.stages, **settings)
        self.numbers = torch.zeros(num_microbatches, device=stages[0].parts.device)

    def run(self, microbatches: Sequence[Any]) -> None:
        for stage in self.stages:
            stage.microbatches = microbatches
        given = (self.numbers,) if any(stage.is_first for stage in self.stages) else ()
        target = self.numbers if any(stage.is_last for stage in self.stages) else None
        self.schedule.step(*given, target=target, return_outputs=False)


def _example(sent: Sent | None) -> tuple[Tensor, ...] | None:
    """Return example tensors from which torch sizes its receive buffers."""
    if sent is None:
        return None
    return (torch.empty(sent.shape, dtype=sent.dtype, device="meta", requires_grad=True),)
