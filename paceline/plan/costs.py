"""A model's blocks as pipelines see them, counted from its parameters: FLOPs, activations, state.

For one sample of N positions (tokens, where a workload has them), a matrix of R x C weights:

    forward             2 R C N
    input backward      2 R C N
    weight backward     2 R C N, nothing where it is frozen
    activations kept    (R + C) N numbers of the compute type: what goes in, what comes out
    state               weights, gradients and optimizer: 16 bytes a weight with AdamW on fp32

What the workload counts beyond its matrices (attention's two products) is shared by all blocks; its
backward is twice its forward, and it has no weights. Embeddings are lookups and count nothing; what
stands between blocks counts with the one before it, so the head does with the last.
train.activation_checkpointing=full adds a forward to the input backward and keeps a block's input
only; selective keeps what comes out of matrices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from paceline.config.schema import RunConfig
from paceline.strategies import find_strategy
from paceline.strategies.base import Share
from paceline.strategies.shape import ModelShape, ParameterShape
from paceline.workloads.base import Workload


@dataclass(frozen=True)
class CountedBlock:
    """Of one sample, but for `state_bytes`. `sent_bytes`: what goes on to the next block."""

    forward_flops: float
    input_flops: float
    weight_flops: float
    activation_bytes: float
    sent_bytes: float
    state_bytes: float

    @property
    def flops(self) -> float:
        return self.forward_flops + self.input_flops + self.weight_flops


@dataclass(frozen=True)
class Positions:
    """How many a sample has, and FLOPs of a sample that each block has besides its matrices."""

    number: float
    more_flops: float
    because: str


def count_blocks(
    workload: Workload, config: RunConfig, model: ModelShape, share: Share
) -> tuple[list[CountedBlock], str]:
    """Each block, and in words what was counted."""
    positions = count_positions(workload, config, model)
    return [
        _count(number, config, model, share, positions) for number in range(model.num_blocks)
    ], positions.because


def _count(
    number: int, config: RunConfig, model: ModelShape, share: Share, positions: Positions
) -> CountedBlock:
    recompute = config.train.activation_checkpointing
    # A table that is tied to the head multiplies there only.
    here = [p for p in model.parameters if p.is_matrix and p.places[-1] == number]
    passing = positions.number * model.positions_of(number)
    forward = 2 * passing * sum(p.numel for p in here) + positions.more_flops / 3
    again = forward if recompute == "full" else 0.0
    trained = sum(p.numel for p in here if p.is_trainable)
    width = block_width([p for p in model.parameters if p.unit == number])
    kept = sum(_kept(p, p.unit == number, recompute) for p in here)
    kept += width if recompute == "full" else 0
    held = model.of_blocks([range(number, number + 1)])
    return CountedBlock(
        forward_flops=forward,
        input_flops=forward + positions.more_flops / 3 + again,
        weight_flops=2 * passing * trained,
        activation_bytes=passing * share.compute_bytes * kept,
        sent_bytes=passing * share.compute_bytes * width,
        state_bytes=find_strategy("pipeline").estimate(held, config, share).total,
    )


def count_positions(workload: Workload, config: RunConfig, model: ModelShape) -> Positions:
    """Tokens where samples have them; else what the workload's own count of FLOPs comes to."""
    flops = workload.flops(config)
    matrices = sum(model.block_costs)
    if workload.unit == "tokens":
        known = workload.units_per_sample(config)
        tokens: int = getattr(config.data, "seq_len", 1) if known is None else known
        more = max(0.0, (flops or 0.0) - 6 * matrices * tokens) / max(1, model.num_blocks)
        return Positions(tokens, more, f"FLOPs of its matrices for {tokens} tokens a sample")
    if flops and matrices:
        because = "the workload's own FLOPs, dealt out to blocks by their matrices"
        return Positions(flops / (6 * matrices), 0.0, because)
    because = "FLOPs of its matrices for one position a sample: the workload does not say more"
    return Positions(1.0, 0.0, because)


def block_width(parameters: Sequence[ParameterShape]) -> int:
    """Numbers of a position that go from a block to the next: the length that most of its vectors
    have (norms, biases), else the rows of its last matrix."""
    vectors = Counter(p.shape[0] for p in parameters if len(p.shape) == 1)
    if vectors:
        return vectors.most_common(1)[0][0]
    matrices = [p for p in parameters if len(p.shape) > 1]
    return matrices[-1].shape[0] if matrices else 0


def _kept(matrix: ParameterShape, is_inside: bool, recompute: str) -> int:
    """Numbers of a position that are kept for backward; what is outside blocks, always."""
    rows, columns = matrix.shape[0], prod(matrix.shape[1:])
    if not is_inside or recompute == "none":
        return rows + columns
    return rows if recompute == "selective" else 0
