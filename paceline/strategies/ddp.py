"""One replica a rank: DistributedDataParallel, and the plain model where there is one rank."""

from contextlib import AbstractContextManager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from paceline.config.schema import RunConfig
from paceline.records import Env, Finding, ModelSize, StateBytes
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.compose import build_module
from paceline.strategies.engine import ModuleEngine
from paceline.train.optim import build_optimizer

STATES = {"adamw": 2, "sgd": 1}


class Replicated:
    """`wrap=False` is `single`: the same engine without anyone to talk to."""

    def __init__(self, wrap: bool) -> None:
        self.wrap = wrap

    def problems(self, config: RunConfig, env: Env) -> list[Finding]:
        strategy = config.strategy
        if strategy.static_graph and strategy.find_unused_parameters:
            return [
                Finding(
                    severity="warning",
                    where="strategy.find_unused_parameters",
                    what="has no effect beside strategy.static_graph, which learns it at step 1",
                    hint="set one of the two",
                )
            ]
        return []

    def estimate(self, model: ModelSize, config: RunConfig, world_size: int) -> StateBytes:
        """Everything whole on every rank: 16 bytes a parameter with AdamW on fp32 weights."""
        states = STATES[config.optim.name]
        if config.optim.name == "sgd" and not config.optim.momentum:
            states = 0
        return StateBytes(
            parameters=model.trainable_bytes + model.frozen_bytes,
            gradients=model.trainable_bytes,
            optimizer=states * model.trainable_bytes,
        )

    def build(self, parts: EngineParts) -> Engine:
        module = build_module(parts)
        strategy = parts.config.strategy
        fused = parts.plan.fused_optimizer.value
        if not self.wrap:
            optimizer = build_optimizer(module.parameters(), parts.config.optim, fused)
            return ModuleEngine(parts, module, module, optimizer)
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=strategy.bucket_mb,
            # Gradients live inside the buckets: no copy after the all-reduce, no second set.
            gradient_as_bucket_view=True,
            static_graph=strategy.static_graph,
            find_unused_parameters=strategy.find_unused_parameters,
        )
        optimizer = build_optimizer(module.parameters(), parts.config.optim, fused)
        unsynced = _Unsynced(wrapped, parts.plan.batch.grad_accum - 1, strategy.static_graph)
        return ModuleEngine(parts, module, wrapped, optimizer, unsynced)


class _Unsynced:
    """no_sync for all but the last microbatch of a step, so that each step exchanges once.

    A static graph learns the order of the gradients in its very first backward pass and asserts
    if that was not exchanged: the first step exchanges every time. The sum stays right, as the
    mean of what all ranks hold already is what they hold.
    """

    def __init__(self, model: DistributedDataParallel, per_step: int, static: bool) -> None:
        self.model = model
        self.num_exchanged = per_step if static else 0

    def __call__(self) -> AbstractContextManager[None]:
        if self.num_exchanged:
            self.num_exchanged -= 1
            return nullcontext()
        return self.model.no_sync()


SINGLE = Replicated(wrap=False)
DDP = Replicated(wrap=True)
