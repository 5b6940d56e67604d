"""Where the times of a model's blocks come from, besides counting: a file, or a run's passes.

    paceline plan lm_1b --schedule all --times times.yaml launch.nproc=4
    paceline plan lm_1b --schedule all --times runs/latest launch.nproc=4

Everything is for one microbatch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.plain import read_plain
from paceline.errors import ConfigError, DataError
from paceline.records import PipelineFacts, Plan
from paceline.records.rundir import RunDir
from paceline.records.words import did_you_mean
from paceline.schedules.account import account, times_measured
from paceline.schedules.actions import Kind
from paceline.schedules.measured import load_measured

# Keys of a times file: those with one number per block, and those with one number.
REQUIRED = ("forward_s", "input_s", "weight_s")
PER_BLOCK = (*REQUIRED, "backward_s", "activation_bytes", "state_bytes")
SINGLE = ("transfer_s", "overhead_s", "memory_bytes")
KEYS = (*PER_BLOCK, *SINGLE)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each block for a microbatch; unknown times are empty or None, and are estimated by
    counting. `because` says where they come from."""

    forward_s: list[float]
    input_s: list[float]
    weight_s: list[float]
    because: str
    backward_s: list[float] | None = None
    activation_bytes: list[float] | None = None
    state_bytes: list[float] | None = None
    transfer_s: float | None = None
    overhead_s: float | None = None
    memory_bytes: float | None = None
    notes: list[str] = field(default_factory=list)


def load_times_file(path: Path, num_blocks: int) -> BlockTimes:
    """Load times that somebody wrote down: YAML or JSON, one number or one for each block."""
    tree = read_plain(path)
    problems = [_unknown(key, path) for key in tree if key not in KEYS]
    problems += [f"{path} has no {key}\nhint: {_shape(num_blocks)}" for key in _missing(tree)]
    lists: dict[str, Any] = {}
    singles: dict[str, Any] = {}
    for key, value in tree.items():
        if key in KEYS:
            numbers = [_as_number(n) for n in (value if isinstance(value, list) else [value])]
            problem = _wrong(key, value, numbers, num_blocks)
            if problem:
                problems.append(f"{key} in {path} {problem}")
            elif key in SINGLE:
                singles[key] = numbers[0]
            else:
                spread = numbers if isinstance(value, list) else numbers * num_blocks
                lists[key] = list(spread)
    if not problems and not any(map(sum, (lists[key] for key in REQUIRED))):
        problems.append(f"all times in {path} are 0\nhint: give seconds of one microbatch")
    if problems:
        raise ConfigError(problems)
    return BlockTimes(because=f"given in {path}", **lists, **singles)


def _as_number(value: object) -> object:
    """Return text such as 1e-3 as a number: without a point YAML reads it as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _missing(tree: Mapping[str, Any]) -> list[str]:
    return [key for key in REQUIRED if key not in tree]


def _unknown(key: str, path: Path) -> str:
    guess = did_you_mean(str(key), KEYS)
    return f"{key} in {path} is not a time of a block\nhint: {guess}the keys are {', '.join(KEYS)}"


def _wrong(key: str, value: object, numbers: Sequence[object], num_blocks: int) -> str | None:
    """Say what is wrong with a value, as the end of a sentence."""
    if key in SINGLE and isinstance(value, list):
        return "is one number for all, not a list"
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            return f"has {number!r}, which is not a number\nhint: {_shape(num_blocks)}"
        if not math.isfinite(number) or number < 0:
            return f"has {number}: it takes finite numbers from 0 on"
    if isinstance(value, list) and len(numbers) != num_blocks:
        return f"has {len(numbers)} values, and the model has {num_blocks} blocks\nhint: " + _shape(
            num_blocks
        )
    return None


def _shape(num_blocks: int) -> str:
    return f"give one number, or a list of {num_blocks}: one for each block"


def load_measured_times(path: Path, costs: Sequence[float], samples: float) -> BlockTimes:
    """Load times that a run measured, for microbatches of `samples`. A stage's time is divided
    among its blocks by their `costs`; halves of a backward that was never split count as equal."""
    run = RunDir.open(path)
    plan = Plan.load(run.plan)
    if plan.pipeline is None:
        raise ConfigError(
            f"{path} ran {plan.strategy.value}, not a pipeline, so it has no times of stages\n"
            "hint: give --times a run with strategy.name=pipeline, or a file"
        )
    num_blocks = plan.pipeline.stages[-1].end_block
    if num_blocks != len(costs):
        raise ConfigError(
            f"{path} ran a model of {num_blocks} blocks, and this one has {len(costs)}\n"
            "hint: give the recipe and the overrides of that run, or times in a file"
        )
    measured = load_measured(run, plan)
    if measured is None:
        raise DataError(
            f"{path} has no pass that all its ranks measured\n"
            "hint: it may have ended before its first step; run it again"
        )
    facts = account(measured, plan.pipeline, {})
    own_samples = plan.batch.micro / plan.pipeline.num_microbatches
    scale = samples / own_samples
    times = times_measured(facts.stages).of_stages(len(facts.stages))
    shares = [_shares(costs[stage.first_block : stage.end_block]) for stage in plan.pipeline.stages]

    def dealt(kind: Kind) -> list[float]:
        whole = zip(times.seconds[kind], shares, strict=True)
        return [seconds * scale * share for seconds, parts in whole for share in parts]

    return BlockTimes(
        dealt(Kind.FORWARD),
        dealt(Kind.INPUT),
        dealt(Kind.WEIGHT),
        because=f"measured in {path}: {facts.schedule} on {facts.num_ranks} ranks, the median of"
        f" {facts.num_passes} passes",
        backward_s=dealt(Kind.BACKWARD),
        transfer_s=facts.transfer_s * scale,
        overhead_s=facts.overhead_s,
        notes=list(_measured_notes(facts, own_samples, samples)),
    )


def _measured_notes(facts: PipelineFacts, measured: float, wanted: float) -> Iterator[str]:
    if measured != wanted:
        yield f"measured with microbatches of {measured:g} samples, scaled to {wanted:g}"
    if any(stage.input_s is None for stage in facts.stages):
        yield f"{facts.schedule} does not split every backward: those halves are taken as equal"


def _shares(costs: Sequence[float]) -> list[float]:
    total = sum(costs)
    return [cost / total if total else 1 / len(costs) for cost in costs]
