"""The engine of a pipeline: a step is some passes of a schedule, then one exchange of gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.checkpoint.pieces import Piece, Source
from paceline.errors import ConfigError
from paceline.metrics import Items
from paceline.records import Proof
from paceline.records.phases import Phase
from paceline.schedules.actions import Schedule
from paceline.schedules.passes import Pass
from paceline.strategies.base import EngineParts, Totals, normalise
from paceline.strategies.clock import Clock
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.fp8 import fp8_proofs
from paceline.strategies.gather import global_norm, whole
from paceline.strategies.offload import is_offloading, offload_proofs
from paceline.strategies.pipeline.by_torch import TorchRunner
from paceline.strategies.pipeline.dualpipe import DualPipeRunner, Lane
from paceline.strategies.pipeline.holdings import Holdings, Stages, all_reduce_gradients
from paceline.strategies.pipeline.recorder import Recorder
from paceline.strategies.pipeline.stage import Relay, Stage
from paceline.strategies.stored import load_module
from paceline.workloads.returns import Pair, add_pairs, join_measured

Shapes = tuple[torch.Size, ...]


class Runner(Protocol):
    def run(self, microbatches: Sequence[Any]) -> None:
        """Accumulate the gradients of one pass."""
        ...


@dataclass(frozen=True)
class Line:
    """The pipeline that this rank is in. `lanes` are DualPipe's groups."""

    schedule: Schedule
    stages: Stages
    mesh: DeviceMesh
    holdings: Holdings
    lanes: dict[Lane, dist.ProcessGroup]
    is_sharded: bool

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("pp")

    def stage_list(self) -> list[Stage]:
        return [stage for stage in self.stages if isinstance(stage, Stage)]


class PipelineEngine(ModuleEngine):
    """A `ModuleEngine` whose module is this rank's stages."""

    def __init__(
        self, parts: EngineParts, optimizer: Optimizer, line: Line, wrapping: Wrapping
    ) -> None:
        super().__init__(parts, line.stages, optimizer, wrapping)
        self.line = line
        assert parts.plan.pipeline is not None
        self.num_microbatches = parts.plan.pipeline.num_microbatches
        self.recorder = Recorder(parts.device)
        one_way = {stage.index: stage for stage in self._stages_of(direction=0)}
        self.relay = Relay(one_way, line.schedule.homes[0], line.group, parts.device)
        self.runners: dict[Shapes, Runner] = {}
        self.scale: float | Tensor = 1.0

    def forward_backward(
        self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
    ) -> Totals:
        self.scale = self.scaled(scale)
        self.wrapping.waits.clock, clock.knows_blocked = clock, self.knows_blocked
        cut = [cut_batch(batch, self.num_microbatches) for batch in batches]
        runners = [self._runner(microbatches[0]) for microbatches in cut]
        self._clear()
        for number, (runner, microbatches) in enumerate(zip(runners, cut, strict=True)):
            self.recorder.begin(clock, number)
            runner.run(microbatches)
        clock.enter(Phase.COMM)
        self._exchange()
        return self._totals()

    def _objective(self, output: Tensor) -> Tensor:
        return normalise(output.sum(), self.scale)

    def _exchange(self) -> None:
        self.line.holdings.sum_copies()
        self.line.holdings.spread_buffers()
        if not self.line.is_sharded and self.line.mesh.size(1) > 1:
            group, size = self.line.mesh.get_group("dp"), self.line.mesh.size(1)
            bucket_mb = self.parts.plan.bucket_mb.value
            all_reduce_gradients(self.parameters, group, bucket_mb, divisor=size)

    @property
    def norm_is_shared(self) -> bool:
        return True

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient norm; each weight counts once, whichever ranks hold it."""
        counted = [p.grad for p in self.line.holdings.counted if p.grad is not None]
        group = dist.group.WORLD if self.line.is_sharded else self.line.group
        return global_norm(counted, self.parts.device, group)

    def evaluate(self, batch: Any) -> Totals:
        self._relay_pieces(batch)
        return self._totals()

    def measure(self, batch: Any) -> dict[str, Pair | Items]:
        stages = self.line.stage_list()
        for stage in stages:
            stage.evaluates = True
        try:
            self._relay_pieces(batch)
        finally:
            for stage in stages:
                stage.evaluates = False
        return join_measured([found for stage in stages for found in stage.measured])

    @torch.no_grad()
    def _relay_pieces(self, batch: Any) -> None:
        # In microbatches, as in training: a stage's results for the whole batch may not fit.
        num_samples = len(tree_flatten(batch)[0][0])
        pieces = cut_batch(batch, min(self.num_microbatches, num_samples))
        # Other pipelines may have more pieces, and gather sharded weights with this one for each
        # pass: all run equally many. Those for nothing come first, and leave nothing.
        for _ in range(self.num_microbatches - len(pieces)):
            self._relay(pieces[0])
        self._clear()
        for piece in pieces:
            self._relay(piece)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole model on every rank, for proofs. A rank's own copies are used as they
        are, so that copies which drift apart are noticed; others come from a holder."""
        own = {name: whole(value) for name, value in self.module.state_dict().items()}
        holdings, group = self.line.holdings, self.line.group
        found = {}
        for name, form in holdings.tensors.items():
            source, sent = holdings.holders[name][0], form.empty(self.parts.device)
            if holdings.here == source:
                sent.copy_(own[name])
            dist.broadcast(sent, group_src=source, group=group)
            found[name] = own.get(name, sent)
        return found

    def pieces(self) -> list[Piece]:
        return [self._with_holders(piece) for piece in super().pieces()]

    def _with_holders(self, piece: Piece) -> Piece:
        """Add all ranks that hold the same rows: of every stage that reads it, in every
        pipeline."""
        name = piece.name if piece.section == "model" else piece.name.partition("/")[2]
        ranks = self.line.holdings.holders.get(name)
        if ranks is None:  # fp16's scale, which all have
            return piece
        size = self.line.mesh.size(1)
        rows = [rank % size for rank in piece.holders] if self.line.is_sharded else range(size)
        held = {rank * size + offset for rank in ranks for offset in rows}
        return piece._replace(holders=tuple(sorted(held)))

    @torch.no_grad()
    def load(self, source: Source) -> None:
        load_module(source, self.module, self.line.holdings.kept)
        self.line.stages.spread_buffers()
        self.wrapping.replaced()
        self.load_updates(source)

    def passes(self) -> list[Pass]:
        return self.recorder.passes()

    def proofs(self) -> list[Proof]:
        drawn = list(self.line.schedule.iter_actions(self.line.holdings.here))
        ran = self.recorder.order()
        where = next((n for n, (a, b) in enumerate(zip(drawn, ran, strict=False)) if a != b), None)
        same = f"{len(ran)} actions in that order"
        if drawn != ran:
            at = min(len(drawn), len(ran)) if where is None else where
            same = f"another order from action {at} on: {' '.join(map(str, ran[at : at + 4]))}"
        return [
            Proof(
                what="pipeline schedule",
                requested=f"{self.line.schedule.name}: {len(drawn)} actions on this rank",
                effective=same,
                proof="recorded as they ran, held against the drawn schedule",
                ok=drawn == ran,
            ),
            *self.wrapping.proofs(),
            *fp8_proofs(self.parts.plan, self.module),
            *(offload_proofs(self.module) if is_offloading(self.parts) else []),
        ]

    def _runner(self, microbatch: Any) -> Runner:
        """Return the runner for this shape of a microbatch: torch makes its buffers beforehand."""
        leaves, _ = tree_flatten(microbatch)
        key = tuple(leaf.shape for leaf in leaves if torch.is_tensor(leaf))
        if key not in self.runners:
            self._learn_shapes(microbatch)
            self.runners[key] = self._build_runner()
        return self.runners[key]

    def _learn_shapes(self, microbatch: Any) -> None:
        """Learn what stages send by sending a microbatch through: none of it is kept, and it draws
        no random number."""
        on_gpu = [self.parts.device] if self.parts.device.type == "cuda" else []
        self.recorder.clock = None
        with torch.random.fork_rng(devices=on_gpu):
            self._relay(microbatch, learns=True)
        stages = self.line.stage_list()
        if self.line.schedule.num_copies > 1:
            _tell_other_direction(stages, self.line.schedule, self.line.group)

    def _build_runner(self) -> Runner:
        line, stages = self.line, self.line.stage_list()
        if line.schedule.name == "dualpipe":
            return DualPipeRunner(line.schedule, stages, line.lanes, self.recorder, self._objective)
        return TorchRunner(
            line.schedule.name, stages, line.group, self.recorder,
            self.num_microbatches, self._objective,
        )  # fmt: skip

    def _relay(self, batch: Any, learns: bool = False) -> None:
        self.module.eval()
        self.relay.run(batch, learns)
        self.module.train()
        self.wrapping.settle()

    def _clear(self) -> None:
        for stage in self.line.stage_list():
            stage.done.clear()
            stage.measured.clear()

    def _totals(self) -> Totals:
        done = [each for stage in self.line.stage_list() for each in stage.done]
        count: int | Tensor = 0
        extras: dict[str, Pair] = {}
        for _, units, more in done:
            count = count + units
            add_pairs(extras, more)
        loss = torch.stack([loss for loss, *_ in done]).sum() if done else self.zero
        return Totals(loss, count, extras)

    def _stages_of(self, direction: int) -> list[Stage]:
        stages = self.line.stage_list()
        return [stages[direction]] if self.line.schedule.num_copies > 1 else stages


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """Cut a batch by samples: every tensor along its first axis."""
    leaves, form = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in tensors}
    if len(tensors) != len(leaves) or len(sizes) != 1 or None in sizes:
        raise ConfigError(
            "a pipeline cuts a batch by samples, and this one is not made of tensors with one row"
            f" per sample: {[getattr(leaf, 'shape', type(leaf).__name__) for leaf in leaves]}\n"
            "hint: return tensors with one row per sample from the data set"
        )
    cut = [leaf.tensor_split(parts) for leaf in tensors]
    return [tree_unflatten([pieces[n] for pieces in cut], form) for n in range(parts)]


def _tell_other_direction(
    stages: Sequence[Stage], schedule: Schedule, group: dist.ProcessGroup
) -> None:
    """Exchange shapes: a stage sends the same in both directions, and its copy is on another
    rank."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (stages[0].takes, stages[0].gives), group=group)
    stages[1].takes, stages[1].gives = told[schedule.homes[0][stages[1].index]]
