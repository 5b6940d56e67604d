"""A strategy that another package brings, all of it: replicas, gradients summed without DDP.

Its tests install it as an entry point of `paceline.strategies`; nothing in paceline/ knows of it.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from paceline.config.schema import RunConfig, StrategyConfig
from paceline.config.section import Positive
from paceline.records import Exchange, StateBytes
from paceline.strategies.base import Engine, EngineParts, Share, Strategy
from paceline.strategies.ddp import replica_bytes
from paceline.strategies.shape import ModelShape, sum_bytes


class ToySettings(StrategyConfig):
    toy_pieces: Positive = Field(1, description="In how many pieces a gradient is sent.")


class Toy(Strategy):
    name = "toy"
    summary = "replicas, one all-reduce after another"
    aliases = ("plaything",)
    Settings = ToySettings

    def estimate(self, model: ModelShape, config: RunConfig, share: Share) -> StateBytes:
        return replica_bytes(model, config)

    def exchange(self, model: ModelShape, config: RunConfig, share: Share) -> Exchange:
        sent = sum_bytes(model.trainable)
        return Exchange(plain=sent, sent=sent, because="one gradient after another")

    def build(self, parts: EngineParts) -> Engine:
        import torch.distributed as dist
        from torch import Tensor

        from paceline.strategies.base import Totals
        from paceline.strategies.clock import Clock
        from paceline.strategies.compose import compose
        from paceline.strategies.engine import ModuleEngine, Wrapping
        from paceline.strategies.optim import build_optimizer

        pieces = ToySettings.of(parts.config).toy_pieces

        class ToyEngine(ModuleEngine):
            def forward_backward(
                self, batches: Sequence[Any], scale: float | Tensor, clock: Clock
            ) -> Totals:
                totals = super().forward_backward(batches, scale, clock)
                clock.enter("comm")
                for parameter in self.parameters:
                    for piece in parameter.grad.div_(dist.get_world_size()).view(-1).chunk(pieces):
                        dist.all_reduce(piece)
                return totals

        objective = compose(parts)
        module = objective.model
        optimizer = build_optimizer(parts, module)
        return ToyEngine(parts, module, optimizer, Wrapping(objective))


TOY = Toy()
