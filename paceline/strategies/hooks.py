"""What DDP sends in place of fp32 gradients, and how many bytes that saves.

fp16 and bf16 halve them. PowerSGD sends two thin matrices for each large one and keeps the error
for the next step (https://arxiv.org/abs/1905.13727).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.config.schema import StrategyConfig
from paceline.records import Exchange
from paceline.strategies.shape import ParameterShape, sum_bytes

CAST_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MIN_RATE = 2.0  # torch's default: a matrix that shrinks less is sent whole


@dataclass
class Traffic:
    """Bytes of gradients that went through the hook, as they came and as they left."""

    plain: int = 0
    sent: int = 0
    power: PowerSGDState | None = field(default=None, repr=False)

    def forget(self) -> None:
        """After a vetoed step: its NaN must not come back as the error of the next one."""
        if self.power is not None:
            for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
                getattr(self.power, memory).clear()


def register_hook(wrapped: DistributedDataParallel, strategy: StrategyConfig) -> Traffic:
    """Install `strategy.comm_hook`; the traffic counts up with every bucket."""
    traffic = Traffic()
    if strategy.comm_hook in CAST_TYPES:
        dtype = CAST_TYPES[strategy.comm_hook]
        wrapped.register_comm_hook(traffic, _cast_hook(dtype))
    elif strategy.comm_hook == "powersgd":
        traffic.power = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=strategy.powersgd_rank,
            start_powerSGD_iter=strategy.powersgd_start,
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


def plan_exchange(parameters: Iterable[ParameterShape], strategy: StrategyConfig) -> Exchange:
    """Bytes a step before and after the hook."""
    kept = list(parameters)
    plain, hook = sum_bytes(kept), strategy.comm_hook
    if hook == "none":
        return Exchange(plain=plain, sent=plain, because="all gradients are reduced as they are")
    if hook in CAST_TYPES:
        sent = sum(p.numel * min(2, p.itemsize) for p in kept)
        why = f"sent as {hook}" if sent < plain else f"{hook} saves nothing: already 16 bits"
        return Exchange(plain=plain, sent=sent, because=why)
    sent = sum(_powersgd_numel(p, strategy.powersgd_rank) * p.itemsize for p in kept)
    why = f"powersgd of rank {strategy.powersgd_rank} after step {strategy.powersgd_start}"
    return Exchange(plain=plain, sent=sent, because=why)


def _powersgd_numel(parameter: ParameterShape, rank: int) -> int:
    """torch sees every tensor as a matrix of its first axis by all others."""
    if len(parameter.shape) < 2:
        return parameter.numel
    rows = parameter.shape[0]
    columns = parameter.numel // rows
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * MIN_RATE < parameter.numel else parameter.numel
