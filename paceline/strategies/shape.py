"""A model as sizes: what is needed to say, without its weights, how many bytes each rank holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from paceline.records import ModelSize
from paceline.strategies.blocks import find_blocks


@dataclass(frozen=True)
class ParameterShape:
    """`unit` numbers the block it is gathered with; the last unit is the rest of the model."""

    shape: tuple[int, ...]
    itemsize: int
    is_trainable: bool
    unit: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ModelShape:
    """Every parameter once, tied ones too."""

    parameters: Sequence[ParameterShape]
    num_units: int
    shares_across_units: bool = False

    @property
    def trainable(self) -> list[ParameterShape]:
        return [p for p in self.parameters if p.is_trainable]

    @property
    def frozen(self) -> list[ParameterShape]:
        return [p for p in self.parameters if not p.is_trainable]

    @property
    def unit_numels(self) -> list[int]:
        """Elements of each unit, the rest of the model last."""
        numels = [0] * self.num_units
        for parameter in self.parameters:
            numels[parameter.unit] += parameter.numel
        return numels

    def size(self) -> ModelSize:
        return ModelSize(
            num_trainable=sum(p.numel for p in self.trainable),
            num_frozen=sum(p.numel for p in self.frozen),
            trainable_bytes=sum_bytes(self.trainable),
            frozen_bytes=sum_bytes(self.frozen),
        )


def sum_bytes(parameters: Iterable[ParameterShape]) -> int:
    return sum(parameter.num_bytes for parameter in parameters)


def measure_shape(model: nn.Module) -> ModelShape:
    """The sizes of a model, which may lie on meta."""
    blocks = find_blocks(model)
    unit_of: dict[int, int] = {}
    is_shared = False
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            is_shared |= unit_of.setdefault(id(parameter), number) != number
    parameters = [
        ParameterShape(
            tuple(p.shape), p.element_size(), p.requires_grad, unit_of.get(id(p), len(blocks))
        )
        for p in model.parameters()
    ]
    return ModelShape(parameters, len(blocks) + 1, is_shared)
