"""DeepSpeed's engine as one of ours. The loss is scaled and the optimizer built as for every
strategy, so that DeepSpeed adds its sharding and nothing else."""

import copy
import json
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.checkpoint.pieces import Piece, Source
from paceline.errors import ConfigError
from paceline.records import Proof, StateBytes
from paceline.records.phases import Phase
from paceline.strategies.base import Engine, EngineParts, StepInfo
from paceline.strategies.clock import Clock
from paceline.strategies.compose import compose
from paceline.strategies.deepspeed.config import ZERO, DeepSpeedSettings
from paceline.strategies.deepspeed.state import (
    collect_pieces,
    flat_parts,
    is_cut,
    load_moments,
    load_weights,
)
from paceline.strategies.deepspeed.waits import CollectiveWaits, count_waits
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.gather import storage_bytes
from paceline.strategies.objective import Objective
from paceline.strategies.optim import build_optimizer, set_rate
from paceline.strategies.precision import COMPUTE_TYPES
from paceline.strategies.stored import fitting_slots, load_scale, scale_pieces

LOG = logging.getLogger("paceline")


def build_deepspeed(parts: EngineParts) -> Engine:
    deepspeed = import_deepspeed(parts.device)
    objective = compose(parts)
    optimizer = build_optimizer(parts, objective.model)
    return DeepSpeedTraining(parts, deepspeed, _start(deepspeed, parts, objective, optimizer))


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed, told which device it is on: it decides that once, when it is imported."""
    os.environ["DS_ACCELERATOR"] = device.type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.script, all over it
        import deepspeed

    # Each rank says the same things at the same time; what matters stands in our own log.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by their old names, which a reader of the log cannot change.
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed")
    if device.type == "cpu":
        # It would compile its own all-reduce over shared memory: minutes, and for ever once a
        # rank was killed while it did, as the lock of that build stays behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    module: ModuleType = deepspeed
    return module


def _start(
    deepspeed: ModuleType, parts: EngineParts, objective: Objective, optimizer: Optimizer
) -> Any:
    """Start DeepSpeed's engine on the process group that exists, with the config of the plan."""
    settings = copy.deepcopy(parts.plan.engine_config)
    LOG.info("DeepSpeed's config: %s", json.dumps(settings))
    tell_device(parts.device)
    try:
        engine, *_ = deepspeed.initialize(
            args=SimpleNamespace(device_rank=parts.device.index or 0),
            model=objective,
            optimizer=optimizer,
            config=settings,
            dist_init_required=False,
        )
    except ValidationError as error:
        raise ConfigError(
            f"DeepSpeed refuses its config: {error}\nhint: look at strategy.deepspeed_config"
        ) from error
    return engine


def tell_device(device: torch.device) -> None:
    """Set the variables from which DeepSpeed takes the device's number. It insists on LOCAL_RANK,
    which stage 3 believes more than the arguments: wrong where each process sees one GPU alone, as
    under srun --gpus-per-task, or where two share one. That of OpenMPI must agree with it."""
    of_mpi = "OMPI_COMM_WORLD_LOCAL_RANK"
    if device.index is None:  # CPUs have no numbers
        os.environ.setdefault("LOCAL_RANK", os.environ.get(of_mpi, "0"))
        return
    os.environ["LOCAL_RANK"] = str(device.index)
    if of_mpi in os.environ:
        os.environ[of_mpi] = str(device.index)


class DeepSpeedTraining(ModuleEngine):
    """`engine` is DeepSpeed's. Its optimizer is ours at stage 0, and has ours inside above."""

    def __init__(self, parts: EngineParts, deepspeed: ModuleType, engine: Any) -> None:
        wrapping = Wrapping(
            engine,
            unsynced=lambda: _before_the_last(engine),
            proofs=lambda: live_proofs(parts, engine),
            waits=CollectiveWaits(),
        )
        super().__init__(parts, engine.module.model, engine.basic_optimizer, wrapping)
        self.deepspeed, self.engine = deepspeed, engine
        self.knows_blocked = count_waits(deepspeed, engine, wrapping.waits, parts.device)
        self.stage = int(engine.zero_optimization_stage())
        # With an accumulation of 1 in its config DeepSpeed divides by nothing; where a step ends
        # it must be told, for every microbatch.
        engine.set_gradient_accumulation_boundary(True)
        # torch's GradScaler, once per group and blind to other ranks: ours takes its place.
        engine.torch_autocast_z0_gradscaler = None
        if self.stage > 0:
            engine.optimizer.torch_autocast_gradscaler = None

    def scaled(self, scale: float | Tensor) -> float | Tensor:
        """Apply fp16's loss scale: from stage 1 on DeepSpeed multiplies and divides by it."""
        if self.scaler is None or self.stage == 0:
            return super().scaled(scale)
        self.engine.optimizer.override_loss_scale(self.scaler.value.item())
        return scale

    def backward(self, objective: Tensor) -> None:
        self.engine.backward(objective)

    def step(self, lr: float, clock: Clock) -> StepInfo:
        clock.enter(Phase.OPTIMIZER)
        set_rate(self.inner, lr)
        norm, skipped = self._update_replica() if self.stage == 0 else self._update_sharded()
        if self.scaler is not None:
            skipped = self.scaler.judge(skipped)
        return StepInfo(norm, skipped)

    def _update_replica(self) -> tuple[Tensor, Tensor]:
        """Look at the norm before the update: stage 0 tells none and applies NaN. All ranks have
        the same gradient."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = get_total_norm(gradients, foreach=True)
        if self.scaler is not None:
            norm = norm / self.scaler.value
        if not math.isfinite(norm.item()):
            self.engine.zero_grad()
            return norm, 1 - self.zero
        if self.scaler is not None:
            torch._foreach_div_(gradients, self.scaler.value)
        self.engine.step()
        return norm, self.zero

    def _update_sharded(self) -> tuple[Tensor, Tensor]:
        """Update and read the norm: stages 1 to 3 find it over all ranks, before clipping, and skip
        by themselves where it is not finite; then they say inf."""
        self.engine.step()
        found = self.engine.get_global_grad_norm()
        norm = torch.as_tensor(found, dtype=torch.float32, device=self.zero.device)
        return norm, self.zero if self.engine.was_step_applied() else 1 - self.zero

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights by the module's own names. A collective."""
        found = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            with self._whole(value):
                found[name] = value.detach().clone()
        return found

    def _whole(self, value: Tensor) -> Any:
        """While inside, a weight of stage 3 is whole."""
        return self.deepspeed.zero.GatheredParameters([value], enabled=is_cut(value))

    def pieces(self) -> list[Piece]:
        if self.stage == 0:
            return super().pieces()
        found = collect_pieces(self.module, self.engine.optimizer, self.inner, self.parts.device)
        return [*found, *(scale_pieces(self.scaler) if self.scaler is not None else [])]

    @torch.no_grad()
    def load(self, source: Source) -> None:
        """Load what this rank holds, from whatever ranks it was written by. A collective."""
        if self.stage == 0:
            super().load(source)
            return
        load_weights(source, self.module, self.engine.optimizer)
        found = fitting_slots(source, self.wanted_slots())
        load_moments(source, self.module, self.engine.optimizer, self.inner, found)
        if self.scaler is not None:
            load_scale(self.scaler, source)

    def held(self) -> StateBytes:
        return found_bytes(self.module, self.engine.optimizer, self.inner)


@contextmanager
def _before_the_last(engine: Any) -> Iterator[None]:
    """While inside, a microbatch does not end its step."""
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


def live_proofs(parts: EngineParts, engine: Any) -> list[Proof]:
    """Compare what DeepSpeed's engine says of itself with what was asked."""
    clip, settings = parts.config.optim.clip, parts.plan.engine_config
    stage, offloads = (
        DeepSpeedSettings.of(parts.config).stage,
        "offload_optimizer" in settings[ZERO],
    )
    weights = {p.dtype for p in engine.module.parameters()}
    computes = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else torch.float32
    asked = (torch.float32, COMPUTE_TYPES[parts.plan.precision.value])
    return [
        _proof("stage", stage, int(engine.zero_optimization_stage())),
        _proof("clipping", 0.0 if clip == "off" else clip, engine.gradient_clipping()),
        _proof("accumulation", 1, engine.gradient_accumulation_steps()),
        _proof("optimizer on CPU", offloads, bool(engine.zero_use_cpu_optimizer())),
        _proof("weights and compute type", asked, (*weights, computes)),
    ]


def _proof(what: str, asked: object, found: object) -> Proof:
    return Proof(
        what=f"DeepSpeed {what}",
        requested=str(asked),
        effective=str(found),
        proof="the live engine",
        ok=asked == found,
    )


def found_bytes(module: nn.Module, optimizer: Any, inner: torch.optim.Optimizer) -> StateBytes:
    """Walk the tensors of a live engine; memory that two of them share counts once, where it is
    first found. `optimizer` is DeepSpeed's, `inner` the one that does the arithmetic."""
    seen: set[int] = set()
    parameters = _new_bytes(_weights(module), seen)
    state = _new_bytes(_optimizer_tensors(optimizer, inner), seen)
    gradients = _new_bytes(_gradients(module, optimizer), seen)
    return StateBytes(parameters=parameters, gradients=gradients, optimizer=state)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # stage 3: this rank's part
            yield parameter.ds_tensor


def _optimizer_tensors(optimizer: Any, inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from flat_parts(optimizer)
    for entry in inner.state.values():
        yield from (value for value in entry.values() if torch.is_tensor(value))


def _gradients(module: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Yield the gradients of the model, of the flat parts (offloaded), on their way, and kept for
    the update."""
    owners = [*module.parameters(), *flat_parts(optimizer)]
    yield from (owner.grad for owner in owners if owner.grad is not None)
    names = ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu")
    for name in (*names, "grad_partitions_flat_buffer"):
        yield from _tensors(getattr(optimizer, name, None))
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield from _tensors(bucket.buffer)


def _tensors(value: Any) -> Iterator[Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    new = [t for t in tensors if t.untyped_storage().data_ptr() not in seen]
    seen |= {t.untyped_storage().data_ptr() for t in new}
    return storage_bytes(new)
