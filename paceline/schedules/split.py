"""Blocks of a model, with costs -> stages: contiguous, the dearest stage as cheap as it can be."""

from collections.abc import Sequence
from itertools import accumulate

from paceline.errors import ConfigError


def split_blocks(costs: Sequence[float], num_stages: int) -> list[range]:
    """The blocks of each stage. Of splits whose dearest stage costs the same, a more even one."""
    if not 1 <= num_stages <= len(costs):
        raise ConfigError(
            f"{num_stages} stages of a model of {len(costs)} blocks: each stage needs one\n"
            f"hint: set strategy.stages to {max(1, min(num_stages, len(costs)))}"
        )
    sums = [0.0, *accumulate(costs)]
    # best[b]: (dearest stage, sum of squares, where the last stage starts) of the first b blocks
    best = {end: (sums[end], sums[end] ** 2, 0) for end in range(1, len(costs) + 1)}
    starts: list[dict[int, int]] = []
    for stage in range(1, num_stages):
        best = {
            end: min(
                (
                    max(best[start][0], sums[end] - sums[start]),
                    best[start][1] + (sums[end] - sums[start]) ** 2,
                    start,
                )
                for start in range(stage, end)
            )
            for end in range(stage + 1, len(costs) + 1)
        }
        starts.append({end: last for end, (_, _, last) in best.items()})
    bounds = [len(costs)]
    for cut in reversed(starts):
        bounds.append(cut[bounds[-1]])
    bounds = [0, *reversed(bounds)]
    return [range(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
