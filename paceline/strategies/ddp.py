"""One replica a rank: DistributedDataParallel, and the plain model where there is one rank."""

from torch.nn.parallel import DistributedDataParallel

from paceline.config.schema import RunConfig
from paceline.records import Env, Finding, StateBytes
from paceline.strategies.base import Engine, EngineParts
from paceline.strategies.compose import build_module
from paceline.strategies.engine import ModuleEngine
from paceline.train.optim import build_optimizer

FP32 = 4
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

    def estimate(self, num_parameters: int, config: RunConfig, world_size: int) -> StateBytes:
        """Everything whole on every rank: 16 bytes a parameter with AdamW."""
        states = STATES[config.optim.name]
        if config.optim.name == "sgd" and not config.optim.momentum:
            states = 0
        weights = FP32 * num_parameters
        return StateBytes(parameters=weights, gradients=weights, optimizer=states * weights)

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
        return ModuleEngine(parts, module, wrapped, optimizer, wrapped.no_sync)


SINGLE = Replicated(wrap=False)
DDP = Replicated(wrap=True)
