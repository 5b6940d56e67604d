"""The plan of a pipeline: its keys, which rank holds which blocks, and how a batch is cut into
microbatches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from paceline.config.schema import RunConfig
from paceline.config.section import Positive
from paceline.records import Finding, PipelinePlan, StagePlan
from paceline.schedules.orders import place_stages
from paceline.schedules.requirements import (
    AUTO_STAGES,
    REQUIREMENTS,
    check_shape,
    nearest_microbatches,
    nearest_ranks,
    next_microbatches,
    split_blocks,
    takes_microbatches,
    takes_ranks,
)
from paceline.strategies.ddp import Buckets
from paceline.strategies.shape import ModelShape
from paceline.strategies.zero import Gathering

MAX_MICROBATCHES = 10_000  # every action of every one of them is drawn
MICROBATCHES_A_RANK = 4  # 1f1b then idles for less than a fifth of a step
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(REQUIREMENTS)]


class PipelineSettings(Buckets, Gathering):
    schedule: ScheduleName = Field("1f1b", description="The order of forwards and backwards.")
    stages: Literal["auto"] | Positive = Field(
        "auto", description="Parts of the model. auto: as many as all ranks can hold."
    )
    stages_per_rank: Literal["auto"] | Positive = Field(
        "auto", description="Stages on each rank. auto: the fewest of the schedule."
    )
    microbatches: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = Field(
        "auto",
        description="Parts of train.micro_batch_size that go through the stages one by one. auto:"
        " four for each rank, or what divides and the schedule takes.",
    )
    split: Literal["auto", "layers"] | list[Positive] = Field(
        "auto",
        description="Blocks of each stage. auto: by counted cost, head included; layers: equally"
        " many; or a list.",
    )
    inner: Literal["ddp", "zero2", "zero3"] = Field(
        "ddp", description="How ranks with the same stages share the batch."
    )


@dataclass(frozen=True)
class PipelineNumbers:
    """The requested pipeline, in numbers."""

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_stages: int
    num_microbatches: int

    @property
    def distinct(self) -> int:
        """Return the stages that each rank adds: dualpipe's second is another's copy."""
        return 1 if self.schedule == "dualpipe" else self.stages_per_rank


def choose_pipeline(
    config: RunConfig, world: int, model: ModelShape
) -> tuple[PipelinePlan | None, list[Finding]]:
    """Return the pipeline, or every reason against it."""
    asked = _read(config, world)
    problems = [*_rank_problems(asked, world, model)]
    problems += [*_shape_problems(asked, config, world), *_split_problems(asked, config, model)]
    if problems:
        return None, problems
    stages = list(_plan_stages(asked, config, model))
    empty = [n for n, s in enumerate(stages) if not _trains(model, s)]
    if empty:
        what = f"stages {empty} have nothing to train, and a stage without that is not supported"
        hint = "use fewer stages, or give them more blocks with strategy.split"
        return None, [Finding.error("strategy.stages", what, hint)]
    return PipelinePlan(
        schedule=asked.schedule,
        num_ranks=asked.num_ranks,
        stages_per_rank=asked.stages_per_rank,
        num_microbatches=asked.num_microbatches,
        stages=stages,
    ), []


def ranks_of_pipeline(config: RunConfig, world: int) -> int:
    """Return how many of `world` ranks hold one copy of the model."""
    return _read(config, world).num_ranks


def count_microbatches(config: RunConfig, num_ranks: int) -> int:
    """Return the parts that a batch is cut into on `num_ranks` ranks, as set or chosen: a divisor
    of the batch that the schedule accepts, with four per rank, or else the largest. If there is no
    such divisor, the number that a larger batch should have."""
    strategy = PipelineSettings.of(config)
    asked, schedule = strategy.microbatches, strategy.schedule
    if asked != "auto":
        return asked
    micro, enough = config.train.micro_batch_size, MICROBATCHES_A_RANK * num_ranks
    parts = [m for m in _divisors(micro) if m <= MAX_MICROBATCHES]
    fitting = [m for m in parts if takes_microbatches(schedule, num_ranks, m)]
    if not fitting:
        return next_microbatches(schedule, num_ranks, enough)
    return next((m for m in fitting if m >= enough), fitting[-1])


def _divisors(number: int) -> list[int]:
    """Return all numbers that divide it, the smallest first. Each below its root has a partner."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _read(config: RunConfig, world: int) -> PipelineNumbers:
    strategy = PipelineSettings.of(config)
    per_rank: Any = strategy.stages_per_rank
    if per_rank == "auto":
        per_rank = AUTO_STAGES[strategy.schedule]
    distinct = 1 if strategy.schedule == "dualpipe" else per_rank  # the second is another's copy
    num_stages = world * distinct if strategy.stages == "auto" else strategy.stages
    num_ranks = max(1, num_stages // distinct)
    microbatches = count_microbatches(config, num_ranks)
    return PipelineNumbers(strategy.schedule, num_ranks, per_rank, num_stages, microbatches)


def _fitting(asked: PipelineNumbers, world: int) -> list[int]:
    """Return every number of stages that can be laid over all ranks."""
    return [
        ranks * asked.distinct
        for ranks in range(2, world + 1)
        if world % ranks == 0 and takes_ranks(asked.schedule, ranks)
    ]


def _nearest(asked: PipelineNumbers, fitting: list[int]) -> int:
    return min(fitting, key=lambda n: (abs(n - asked.num_stages), -n), default=asked.num_stages)


def _rank_problems(asked: PipelineNumbers, world: int, model: ModelShape) -> Iterator[Finding]:
    fitting = _fitting(asked, world)
    if asked.num_ranks == 1:
        what = "a pipeline of one rank has no other rank to hand its results to"
        more = "set launch.nproc to 2 or more, or use another strategy"
        hint = f"set strategy.stages to {fitting[0]}" if fitting else more
        yield Finding.error("strategy.name", what, hint)
    elif not fitting:
        what = f"{asked.schedule} needs an even number of ranks, and there are {world}"
        near = nearest_ranks(asked.schedule, world)
        yield Finding.error(
            "launch.nproc", what, f"set launch.nproc to {near}, the nearest that will do"
        )
    elif asked.num_stages not in fitting:
        what = f"{asked.num_stages} stages of {asked.schedule} cannot be laid over {world} ranks"
        what += f" with {asked.stages_per_rank} a rank"
        near = _nearest(asked, fitting)
        yield Finding.error(
            "strategy.stages", what, f"set strategy.stages to {near}, the nearest that will do"
        )
    if asked.num_stages > model.num_blocks:
        near = max([n for n in fitting if n <= model.num_blocks], default=0)
        hint = f"set strategy.stages to {near}" if near else "use fewer ranks, or another strategy"
        what = f"{asked.num_stages} stages of a model of {model.num_blocks} blocks: each needs one"
        yield Finding.error("strategy.stages", what, hint)


def _shape_problems(asked: PipelineNumbers, config: RunConfig, world: int) -> Iterator[Finding]:
    """Yield what the schedule cannot do with these numbers, on the ranks that it would have if they
    were right; the nearest number of microbatches divides the batch, too."""
    ranks = _nearest(asked, _fitting(asked, world)) // asked.distinct
    ranks = nearest_ranks(asked.schedule, max(1, ranks))
    micro, parts = config.train.micro_batch_size, asked.num_microbatches
    whole = _divisors(micro)
    fitting = [m for m in whole if takes_microbatches(asked.schedule, ranks, m)]
    closest = min(fitting, key=lambda m: (abs(m - parts), -m), default=None)
    for found in check_shape(asked.schedule, ranks, parts, asked.stages_per_rank):
        if found.where != "strategy.microbatches":
            yield found
            continue
        near = nearest_microbatches(asked.schedule, ranks, parts)
        hint = f"set strategy.microbatches to {near}, and train.micro_batch_size to a multiple"
        if closest is not None:
            hint = f"set strategy.microbatches to {closest}, the nearest that will do"
        yield Finding.error(found.where, found.what, hint)
    if micro % parts and takes_microbatches(asked.schedule, ranks, parts):
        other = f", or strategy.microbatches to {closest}" if closest is not None else ""
        yield Finding.error(
            "train.micro_batch_size",
            f"{micro} samples cannot be cut into {parts} equal microbatches",
            f"set it to {max(1, round(micro / parts)) * parts}{other}",
        )


def _split_problems(
    asked: PipelineNumbers, config: RunConfig, model: ModelShape
) -> Iterator[Finding]:
    split = PipelineSettings.of(config).split
    if not isinstance(split, list):
        return
    if len(split) != asked.num_stages or sum(split) != model.num_blocks:
        even = split_blocks([1.0] * model.num_blocks, min(asked.num_stages, model.num_blocks))
        yield Finding.error(
            "strategy.split",
            f"{split} is {sum(split)} blocks in {len(split)} stages; there are"
            f" {model.num_blocks} blocks and {asked.num_stages} stages",
            f"for example strategy.split=[{','.join(str(len(part)) for part in even)}]",
        )


def _plan_stages(
    asked: PipelineNumbers, config: RunConfig, model: ModelShape
) -> Iterator[StagePlan]:
    costs, split = model.block_costs, PipelineSettings.of(config).split
    homes = place_stages(asked.schedule, asked.num_ranks, asked.stages_per_rank)
    if isinstance(split, list):
        ends = [sum(split[: number + 1]) for number in range(len(split))]
        parts = [range(end - length, end) for end, length in zip(ends, split, strict=True)]
    else:
        parts = split_blocks(costs if split == "auto" else [1.0] * len(costs), asked.num_stages)
    for number, part in enumerate(parts):
        yield StagePlan(
            first_block=part.start,
            end_block=part.stop,
            num_parameters=sum(p.numel for p in model.of_blocks([part]).parameters),
            cost=sum(costs[block] for block in part) / (sum(costs) or 1.0),
            ranks=sorted({direction[number] for direction in homes}),
        )


def _trains(model: ModelShape, stage: StagePlan) -> bool:
    return bool(model.of_blocks([range(stage.first_block, stage.end_block)]).trainable)
