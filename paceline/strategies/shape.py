"""A model as sizes: enough to say, without weights, how many bytes each rank holds.

`blocks.measure_shape` makes one from a model; this file loads no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from paceline.records import ModelSize


@dataclass(frozen=True)
class ParameterShape:
    """`unit` numbers the block it is gathered with; the last unit is the rest of the model.
    `places`: the blocks it belongs to, if the rest of the model is cut up too; `is_matrix`: samples
    are multiplied with it; `is_hidden`: such a matrix, of two axes, inside a block; `is_linear`:
    the weight of an nn.Linear that is called, which another layer can replace; `is_tied`: several
    modules have it."""

    shape: tuple[int, ...]
    itemsize: int
    is_trainable: bool
    unit: int
    places: tuple[int, ...] = (0,)
    is_matrix: bool = True
    is_hidden: bool = False
    is_linear: bool = True
    is_tied: bool = False
    name: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ModelShape:
    """Every parameter once, tied ones too. `positions`: how many of a sample go through each block,
    if they differ. `num_batchnorms`: layers that normalise by one rank's part of a batch.
    `no_sharding`: why its weights cannot be sharded; empty: they can."""

    parameters: Sequence[ParameterShape]
    num_units: int
    shares_across_units: bool = False
    positions: Sequence[int] = ()
    num_batchnorms: int = 0
    no_sharding: str = ""

    @property
    def trainable(self) -> list[ParameterShape]:
        return [p for p in self.parameters if p.is_trainable]

    @property
    def frozen(self) -> list[ParameterShape]:
        return [p for p in self.parameters if not p.is_trainable]

    @property
    def num_blocks(self) -> int:
        return self.num_units - 1

    @property
    def block_costs(self) -> list[float]:
        """Count multiplications with the matrices of each block and of what belongs to it, for a
        sample if positions differ, else for one position."""
        costs = [0.0] * max(1, self.num_blocks)
        for parameter in self.parameters:
            if parameter.is_matrix:  # a table that is tied to the head multiplies there only
                place = parameter.places[-1]
                costs[place] += parameter.numel * self.positions_of(place)
        return costs

    def positions_of(self, block: int) -> int:
        return self.positions[block] if self.positions else 1

    def of_blocks(self, held: Sequence[range]) -> "ModelShape":
        """Return the shape of the part that a rank with these blocks holds."""
        kept = [
            p for p in self.parameters if any(place in part for part in held for place in p.places)
        ]
        return replace(self, parameters=kept)

    def size(self) -> ModelSize:
        return ModelSize(
            num_trainable=sum(p.numel for p in self.trainable),
            num_frozen=sum(p.numel for p in self.frozen),
            trainable_bytes=sum_bytes(self.trainable),
            frozen_bytes=sum_bytes(self.frozen),
        )


def sum_bytes(parameters: Iterable[ParameterShape]) -> int:
    return sum(parameter.num_bytes for parameter in parameters)
