"""How long each stage takes for a microbatch: given, counted or measured. For the simulator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.schedules.actions import Action, Kind

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Seconds: one number for all stages, or one for each. `transfer_s` is between a stage and the
    next, either way (one fewer than stages); it is 0 where both are on one rank."""

    forward_s: PerStage
    input_s: PerStage
    weight_s: PerStage
    transfer_s: PerStage = 0.0
    backward_s: PerStage | None = None  # a whole backward, where it is not the sum of its halves
    overhead_s: float = 0.0  # of the host, for every action

    def of_stages(self, num_stages: int) -> "StageTimes":
        """One number a stage, checked."""
        inputs = spread("input_s", self.input_s, num_stages)
        weights = spread("weight_s", self.weight_s, num_stages)
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        if self.backward_s is not None:
            whole = spread("backward_s", self.backward_s, num_stages)
        seconds = {
            Kind.FORWARD: spread("forward_s", self.forward_s, num_stages),
            Kind.BACKWARD: whole,
            Kind.INPUT: inputs,
            Kind.WEIGHT: weights,
        }
        transfer_s = spread("transfer_s", self.transfer_s, num_stages - 1)
        return StageTimes(seconds, transfer_s, self.overhead_s)


@dataclass(frozen=True)
class StageTimes:
    """`Times` with one number a stage; `transfer_s[s]` is between stage s and s + 1."""

    seconds: dict[Kind, list[float]]
    transfer_s: list[float]
    overhead_s: float

    def of(self, action: Action) -> float:
        return self.seconds[action.kind][action.stage] + self.overhead_s


def spread(name: str, value: PerStage, length: int) -> list[float]:
    """One number for each of `length`; raises if they are too few, too many, or no durations."""
    values = [float(value)] * length if isinstance(value, int | float) else list(map(float, value))
    if len(values) != length:
        raise ConfigError(f"{name} has {len(values)} values\nhint: give one number, or {length}")
    if not all(math.isfinite(v) and v >= 0 for v in values):
        raise ConfigError(f"{name} has a value that is negative or not a number: {values}")
    return values
