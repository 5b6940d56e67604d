"""DualPipe, run from its plain data: two directions at once.

Each rank holds stage r for microbatches that enter at rank 0, and stage P - 1 - r for those that
enter at the last rank. Over gloo receives are posted one ahead on each lane (a direction, and
forward or backward), so that results travel while ranks compute; a lane has a group of its own, in
which messages between two ranks keep their order.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from paceline.schedules.actions import Action, Kind, Schedule
from paceline.strategies.pipeline.by_torch import Objective, TimedStage
from paceline.strategies.pipeline.recorder import Recorder
from paceline.strategies.pipeline.stage import Stage

Lane = tuple[int, bool]  # direction, and whether what travels are gradients
LANES: tuple[Lane, ...] = tuple((direction, back) for direction in (0, 1) for back in (False, True))


class _Flying(NamedTuple):
    """A microbatch between its forward and the last part of its backward."""

    received: Tensor | None
    output: Tensor
    gradient: Tensor | None = None
    groups: Any = None  # where the backward of the inputs left off that of the weights


class _Post(NamedTuple):
    buffer: Tensor
    work: dist.Work


class DualPipeRunner:
    """`stages[direction]` are this rank's; `groups[lane]` as above."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        groups: dict[Lane, dist.ProcessGroup],
        recorder: Recorder,
        objective: Objective,
    ) -> None:
        self.schedule, self.stages, self.groups = schedule, stages, groups
        self.recorder, self.objective = recorder, objective
        self.here = dist.get_rank(groups[LANES[0]])
        self.wire = stages[0].wire
        self.torch_stages = [TimedStage(stage, groups[LANES[0]], recorder) for stage in stages]
        self.flying: dict[Action, _Flying] = {}
        self.posted: dict[Action, _Post] = {}
        self.waiting: dict[Lane, deque[Action]] = {}
        self.sent: dict[Lane, deque[tuple[dist.Work, Tensor]]] = {lane: deque() for lane in LANES}
        self.forms = [(stage.takes, stage.gives) for stage in stages]
        # With NCCL a receive posted early could block a send behind it in the device's one queue.
        self.is_eager = dist.get_backend(groups[LANES[0]]) == "gloo"

    def run(self, microbatches: Sequence[Any]) -> None:
        order = list(self.schedule.iter_actions(self.here))
        self.waiting = _lanes_of(order, self.schedule.num_stages)
        for lane in self.waiting if self.is_eager else ():
            self._post_next(lane)
        for action in order:
            given = self._take(action)
            self.stages[action.direction].batch = microbatches[action.microbatch]
            with self.recorder.timed(action):
                result = self._compute(action, given)
            self._send(action, result)
        for lane in LANES:
            self._settle(lane, left=0)
        for stage in self.torch_stages:
            stage.perform_reduce_grad(1)

    def _compute(self, action: Action, given: Tensor | None) -> Tensor | None:
        """Return what the neighbour waits for, or None."""
        key = Action(Kind.FORWARD, action.stage, action.microbatch, action.direction)
        stage = self.stages[action.direction]
        if action.kind == Kind.FORWARD:
            received = given.requires_grad_() if given is not None else None
            output = stage(received)
            self.flying[key] = _Flying(
                received, self.objective(output) if stage.is_last else output
            )
            return None if stage.is_last else output.detach()
        flying = self.flying.pop(key)
        if action.kind == Kind.BACKWARD:
            return self._backward(action, flying._replace(gradient=given))
        if action.kind == Kind.INPUT:
            made, flying = self._backward_input(action, flying._replace(gradient=given))
            self.flying[key] = flying
            return made
        if flying.groups is None:
            self._backward(action, flying)
        else:
            self._run_backward(action, "weight", flying, param_groups=flying.groups)
        return None

    def _backward(self, action: Action, flying: _Flying) -> Tensor | None:
        made, _ = self._run_backward(action, "full", flying)
        return made[0] if made else None

    def _backward_input(self, action: Action, flying: _Flying) -> tuple[Tensor | None, _Flying]:
        """Run the half that a neighbour waits for. The first stage has none: all of it runs
        later."""
        if flying.received is None:
            return None, flying
        made, groups = self._run_backward(action, "input", flying)
        return made[0], flying._replace(groups=groups)

    def _run_backward(self, action: Action, kind: str, flying: _Flying, **more: Any) -> Any:
        """Run a backward through torch's own stage: it knows what to do if a stage is sharded."""
        # Without a gradient the output is the loss, which torch takes bare and not in a tuple.
        is_loss = flying.gradient is None and kind == "full"
        values = {
            "stage_output": flying.output if is_loss else (flying.output,),
            "output_grads": None if flying.gradient is None else (flying.gradient,),
            "input_values": [] if flying.received is None else [flying.received],
        }
        return self.torch_stages[action.direction].backward_maybe_with_nosync(kind, values | more)

    def _take(self, action: Action) -> Tensor | None:
        if not _receives(action, self.schedule.num_stages):
            return None
        if not self.is_eager:
            self._post_next(_lane(action))
        post = self.posted.pop(action)
        post.work.wait()
        if self.is_eager:
            self._post_next(_lane(action))
        return post.buffer

    def _post_next(self, lane: Lane) -> None:
        if not self.waiting[lane]:
            return
        action = self.waiting[lane].popleft()
        is_back = lane[1]
        form = self.forms[action.direction][is_back]
        assert form is not None, "shapes are learnt before the first pass"
        buffer = form.empty(self.wire)
        source = self._home(action, action.stage + 1 if is_back else action.stage - 1)
        work = dist.irecv(buffer, group_src=source, group=self.groups[lane])
        assert work is not None
        self.posted[action] = _Post(buffer, work)

    def _send(self, action: Action, result: Tensor | None) -> None:
        if result is None:
            return
        is_back = action.kind != Kind.FORWARD
        target = self._home(action, action.stage - 1 if is_back else action.stage + 1)
        value = result.contiguous()
        lane = (action.direction, is_back)
        work = dist.isend(value, group_dst=target, group=self.groups[lane])
        assert work is not None
        self.sent[lane].append((work, value))
        # No rank has more in flight: what was sent before that has arrived.
        self._settle(lane, left=self.schedule.num_ranks + 1)

    def _settle(self, lane: Lane, left: int) -> None:
        while len(self.sent[lane]) > left:
            work, _ = self.sent[lane].popleft()
            work.wait()

    def _home(self, action: Action, stage: int) -> int:
        return self.schedule.homes[action.direction][stage]


def _lane(action: Action) -> Lane:
    return action.direction, action.kind != Kind.FORWARD


def _receives(action: Action, num_stages: int) -> bool:
    if action.kind == Kind.FORWARD:
        return action.stage > 0
    return action.kind != Kind.WEIGHT and action.stage < num_stages - 1


def _lanes_of(order: Sequence[Action], num_stages: int) -> dict[Lane, deque[Action]]:
    lanes: dict[Lane, deque[Action]] = defaultdict(deque)
    for action in order:
        if _receives(action, num_stages):
            lanes[_lane(action)].append(action)
    return dict(lanes)
