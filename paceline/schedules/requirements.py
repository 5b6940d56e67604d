"""What each schedule requires of ranks, microbatches and stages, with the nearest valid numbers;
and a model's blocks, with their costs, split into stages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from paceline.errors import ConfigError
from paceline.records import Finding


@dataclass(frozen=True)
class Requirement:
    """`microbatches(number, num_ranks)`: whether the number is valid; the sentences say what is."""

    stages_per_rank: int
    stages_sentence: str
    microbatches: Callable[[int, int], bool] = lambda microbatches, ranks: True
    microbatches_sentence: str = ""
    has_any_stages: bool = False  # more stages per rank than `stages_per_rank` will do too
    needs_even_ranks: bool = False

    def takes_stages(self, stages_per_rank: int) -> bool:
        if self.has_any_stages:
            return stages_per_rank >= self.stages_per_rank
        return stages_per_rank == self.stages_per_rank


def _whole_rounds(microbatches: int, ranks: int) -> bool:
    """Require rounds of equal size, of at least as many microbatches as ranks (or one smaller
    round)."""
    return microbatches % max(1, microbatches // ranks) == 0


_ONE = "has one stage per rank"
_ROUNDS = "runs in microbatches // ranks equal rounds"
_V = "has two stages per rank, placed as a V"

REQUIREMENTS: dict[str, Requirement] = {
    "gpipe": Requirement(1, f"{_ONE}; looped_bfs is the one with several"),
    "1f1b": Requirement(
        1,
        f"{_ONE}; interleaved_1f1b is the one with several",
        lambda microbatches, ranks: microbatches >= ranks,
        "needs as many microbatches as ranks",
    ),
    "interleaved_1f1b": Requirement(
        2, "has two stages per rank or more; 1f1b has one", _whole_rounds, _ROUNDS, True
    ),
    "looped_bfs": Requirement(
        2, "has two stages per rank or more; gpipe has one", has_any_stages=True
    ),
    "interleaved_zb": Requirement(1, "has a stage per rank or more", _whole_rounds, _ROUNDS, True),
    "zbv": Requirement(2, _V),
    "dualpipev": Requirement(
        2,
        _V,
        lambda microbatches, ranks: microbatches >= 2 * ranks,
        "needs as many microbatches as stages, which are two per rank",
    ),
    "dualpipe": Requirement(
        2,
        "has two stages per rank, one of each direction",
        lambda microbatches, ranks: microbatches % 2 == 0 and microbatches >= 2 * ranks,
        "needs an even number of microbatches, at least twice the ranks",
        needs_even_ranks=True,
    ),
}
# They run the two halves of a backward apart, which a compiled block does not have.
SPLIT_BACKWARDS = ("interleaved_zb", "zbv", "dualpipev", "dualpipe")
# What `"auto"` means: the fewest, but interleaved schedules interleave.
AUTO_STAGES = {name: rule.stages_per_rank for name, rule in REQUIREMENTS.items()}
AUTO_STAGES["interleaved_zb"] = 2


def check_shape(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Finding]:
    """Return all reasons why the schedule cannot be drawn with these numbers."""
    rule = REQUIREMENTS[name]
    found = []
    if not takes_ranks(name, num_ranks):
        near = nearest_ranks(name, num_ranks)
        even = "an even number of ranks" if rule.needs_even_ranks else "at least one rank"
        found.append(
            _refusal("launch.nproc", f"{name} on {num_ranks} ranks: it needs {even}", near)
        )
    if not rule.takes_stages(stages_per_rank):
        what = f"{name} with {stages_per_rank} per rank: it {rule.stages_sentence}"
        found.append(_refusal("strategy.stages_per_rank", what, rule.stages_per_rank))
    near = nearest_microbatches(name, nearest_ranks(name, num_ranks), num_microbatches)
    if near != num_microbatches:
        what = f"{name} with {num_microbatches} microbatches on {num_ranks} ranks: it "
        what += rule.microbatches_sentence if num_microbatches > 0 else "needs at least one"
        found.append(_refusal("strategy.microbatches", what, near))
    return found


def takes_ranks(name: str, num_ranks: int) -> bool:
    return num_ranks >= 1 and not (REQUIREMENTS[name].needs_even_ranks and num_ranks % 2)


def takes_microbatches(name: str, num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches >= 1 and REQUIREMENTS[name].microbatches(num_microbatches, num_ranks)


def nearest_ranks(name: str, wanted: int) -> int:
    """Return the valid number of ranks nearest to `wanted`; of two, the larger."""
    return next(near for near in _outwards(wanted) if takes_ranks(name, near))


def nearest_microbatches(name: str, num_ranks: int, wanted: int) -> int:
    """Return the valid number of microbatches nearest to `wanted`; of two, the larger."""
    return next(near for near in _outwards(wanted) if takes_microbatches(name, num_ranks, near))


def next_microbatches(name: str, num_ranks: int, least: int) -> int:
    """Return the smallest valid number of microbatches that is not below `least`."""
    return next(m for m in count(max(1, least)) if takes_microbatches(name, num_ranks, m))


def _outwards(wanted: int) -> Iterator[int]:
    yield wanted
    for distance in count(1):
        yield from (wanted + distance, wanted - distance)


def _refusal(where: str, what: str, near: int) -> Finding:
    hint = f"set {where} to {near}, the nearest that will do"
    return Finding.error(where, what, hint)


def split_blocks(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut a model's blocks into contiguous stages, the costliest as cheap as possible. Of splits
    with an equal costliest stage, a more even one is chosen."""
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
