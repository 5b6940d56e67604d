"""One replica per rank, built: DistributedDataParallel, and what it sends instead of gradients.

fp16 and bf16 halve them. PowerSGD sends two thin matrices for each large one and keeps the error
for the next step (https://arxiv.org/abs/1905.13727).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.records import Proof
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.compose import compose
from paceline.strategies.ddp import MIN_RATE, DDPSettings
from paceline.strategies.engine import ModuleEngine, Wrapping
from paceline.strategies.objective import Objective
from paceline.strategies.optim import build_optimizer, by_kernel, optimizer_kind, parameter_groups

MIB = 2**20
CAST_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Traffic:
    """Bytes of gradients that went through the hook, as they came and as they left."""

    plain: int = 0
    sent: int = 0
    power: PowerSGDState | None = field(default=None, repr=False)

    def forget(self) -> None:
        """Forget the error of a vetoed step: its NaN must not come back in the next one."""
        if self.power is not None:
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self.power, memory).clear()


def build_single(parts: EngineParts) -> Engine:
    """Build the plain model, without a wrapper: there are no other ranks."""
    objective = compose(parts)
    module = objective.model
    return ModuleEngine(parts, module, build_optimizer(parts, module), Wrapping(objective))


def build_ddp(parts: EngineParts) -> Engine:
    objective = compose(parts)
    module = objective.model
    wrapping = wrap_ddp(parts, objective)
    return ModuleEngine(parts, module, build_optimizer(parts, module), wrapping)


def build_zero1(parts: EngineParts) -> Engine:
    """Build DDP with an optimizer that deals its state out by whole parameters."""
    # It compiles eight optimizers with TorchScript: 0.2 s that other strategies need not wait for.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    objective = compose(parts)
    module = objective.model
    wrapping, optim = wrap_ddp(parts, objective), parts.config.optim
    fused = parts.plan.fused_optimizer.value
    kind, settings = optimizer_kind(optim, fused, by_kernel(parts, module))
    groups = parameter_groups(module, optim)
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=kind, **settings)
    wrapping.waits.around(optimizer, "_sync_params")
    return ModuleEngine(parts, module, optimizer, replace(wrapping, dealt=optimizer.optim))


def wrap_ddp(parts: EngineParts, objective: Objective) -> Wrapping:
    settings = DDPSettings.of(parts.config)
    wrapped = DistributedDataParallel(
        objective,
        bucket_cap_mb=parts.plan.bucket_mb.value,
        # Gradients live inside the buckets: no copy after the all-reduce, no second set.
        gradient_as_bucket_view=True,
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
    )
    # The engine spreads buffers after a step: a checkpoint needs them equal. (Set here: torch 2.13
    # warns of the argument, and has another name for it.)
    wrapped.broadcast_buffers = False
    traffic = register_hook(wrapped, settings)
    shared = _share_memory(parts, wrapped)
    unsynced = _Unsynced(wrapped, parts.plan.batch.grad_accum - 1, settings.static_graph)
    return Wrapping(
        wrapped,
        unsynced,
        proofs=lambda: [*_proofs(parts, wrapped, traffic), *exchange_proofs(parts, shared)],
        forget=traffic.forget if traffic.power is not None else None,
        # It sorts its buckets by the order in which the first gradients came; PowerSGD, which
        # counts passes, must not see one more.
        rehearsed=unsynced.has_learnt if traffic.power is None else None,
    )


def _share_memory(parts: EngineParts, wrapped: DistributedDataParallel) -> Any:
    """Sum gradients through symmetric memory, if the plan says so."""
    if parts.plan.exchange_by.value != "symmetric":
        return None
    from paceline.strategies.symmetric import Exchange, ddp_hook

    assert dist.group.WORLD is not None, "ranks have met"
    shared = Exchange(dist.group.WORLD)
    wrapped.register_comm_hook(shared, ddp_hook)
    return shared


def exchange_proofs(parts: EngineParts, shared: Any) -> list[Proof]:
    """Show the bytes that went through symmetric memory, if that was planned."""
    if shared is None:
        return []
    return [
        Proof(
            what="exchange",
            requested=parts.plan.exchange_by.value,
            effective=f"{shared.num_bytes:,} bytes through symmetric memory so far",
            proof="counted where they are copied",
            ok=shared.num_bytes > 0,
        )
    ]


class _Unsynced:
    """Holds the exchange back (no_sync) for all but the last microbatch of a step, so that each
    step exchanges once.

    A static graph learns the order of the gradients in its very first backward pass and asserts if
    that was not exchanged: the first step exchanges every time. The sum stays right, as the mean of
    what all ranks hold already is what they hold.
    """

    def __init__(self, model: DistributedDataParallel, per_step: int, static: bool) -> None:
        self.model = model
        self.num_exchanged = per_step if static else 0

    def __call__(self) -> AbstractContextManager[None]:
        if self.num_exchanged:
            self.num_exchanged -= 1
            return nullcontext()
        return self.model.no_sync()

    def has_learnt(self) -> None:
        self.num_exchanged = 0


def _proofs(parts: EngineParts, wrapped: DistributedDataParallel, traffic: Traffic) -> list[Proof]:
    """Show the buckets as DDP logs them, and the bytes that went through the hook."""
    settings, told = DDPSettings.of(parts.config), wrapped._get_ddp_logging_data()
    asked = parts.plan.bucket_mb.value
    sizes = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes", ""))
    largest = max((int(size) for size in sizes.replace(" ", "").split(",") if size), default=0)
    buckets = Proof(
        what="DDP buckets",
        requested=f"{asked:g} MiB each",
        effective=f"{sizes.count(',') + 1} of up to {largest / MIB:.3g} MiB",
        proof="DDP's logging data",
        ok=int(told.get("bucket_cap_bytes", 0)) == int(asked * MIB),
    )
    if settings.comm_hook == "none":
        return [buckets]
    ratio = traffic.sent / traffic.plain if traffic.plain else 1.0
    expected = 0.5 if settings.comm_hook in CAST_TYPES else 1.0
    hook = Proof(
        what="DDP hook",
        requested=settings.comm_hook,
        effective=f"{traffic.sent:,} of {traffic.plain:,} bytes of gradients sent so far",
        proof="counted in the hook, bucket by bucket",
        ok=traffic.plain > 0 and ratio <= expected,
    )
    return [buckets, hook]


def register_hook(wrapped: DistributedDataParallel, settings: DDPSettings) -> Traffic:
    """Install `strategy.comm_hook`; the traffic counts up with every bucket."""
    traffic = Traffic()
    if settings.comm_hook in CAST_TYPES:
        dtype = CAST_TYPES[settings.comm_hook]
        wrapped.register_comm_hook(traffic, _cast_hook(dtype))
    elif settings.comm_hook == "powersgd":
        traffic.power = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=settings.powersgd_start,
            min_compression_rate=MIN_RATE,
        )
        wrapped.register_comm_hook(traffic, _power_hook)
    return traffic


def _cast_hook(dtype: torch.dtype) -> Any:
    """Sum in `dtype`. torch's own bf16 hook is the same, but refuses every backend except NCCL."""

    def hook(traffic: Traffic, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        # Divided before the sum: a sum over many ranks could leave fp16's range.
        small = (gradients / dist.get_world_size()).to(dtype)
        traffic.plain += gradients.nbytes
        traffic.sent += small.nbytes
        done = dist.all_reduce(small, async_op=True).get_future()

        def widen(future: Any) -> torch.Tensor:
            return gradients.copy_(future.value()[0])

        return done.then(widen)

    return hook


def _power_hook(traffic: Traffic, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    state, gradients = traffic.power, bucket.buffer()
    assert state is not None, "registered with its state"
    traffic.plain += gradients.nbytes
    has_begun = state.iter >= state.start_powerSGD_iter
    before = state.total_numel_after_compression
    future = powerSGD_hook(state, bucket)
    if dist.get_backend() == "gloo":
        # Its later collectives start in callbacks, which gloo runs as they come: two buckets at
        # once would meet in another order on another rank. NCCL keeps the order of its stream.
        future.wait()
    numel = state.total_numel_after_compression - before if has_begun else gradients.numel()
    traffic.sent += numel * gradients.element_size()
    return future
