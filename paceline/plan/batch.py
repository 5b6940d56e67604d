"""How many samples a step takes, and how many steps a run: the batch of a plan."""

from typing import Any

from paceline.config.schema import RunConfig
from paceline.data.buckets import open_picks
from paceline.data.stream_shards import is_stream
from paceline.errors import ConfigError, DataError, PacelineError
from paceline.job import Job
from paceline.records import BatchSplit, Finding, Plan
from paceline.workloads.returns import data_failed, no_training_data


def split_batch(config: RunConfig, dp: int) -> tuple[BatchSplit, list[Finding]]:
    """Split the global batch: micro x accumulation x dp. What does not divide is a problem with
    a hint."""
    train, length = config.train, config.data.batch_length
    micro, asked = _micro(config), train.global_batch_size
    accum = 1 if train.grad_accum == "auto" else train.grad_accum
    problems = []
    if asked != "auto":
        accum, problem = _accumulation(config, asked, dp)
        problems = [problem] if problem else []
    split = BatchSplit(
        micro=micro,
        grad_accum=accum,
        dp=dp,
        global_size=micro * accum * dp,
        length=length if isinstance(length, float) and config.data.batch_by == "length" else None,
    )
    return split, problems


def _micro(config: RunConfig) -> int:
    """Return the samples of a microbatch; 1 where it is a batch that is filled by length."""
    return 1 if config.data.batch_by == "length" else config.train.micro_batch_size


def _accumulation(config: RunConfig, asked: int, dp: int) -> tuple[int, Finding | None]:
    """Return the forward passes per step that make up a global batch, or the problem with it."""
    micro, wanted = _micro(config), config.train.grad_accum
    where = "train.global_batch_size"
    noun = "batches" if config.data.batch_by == "length" else "samples"
    if asked < dp:
        return 1, Finding.error(
            where,
            f"{asked} {noun} cannot be shared by {dp} ranks: some would have none",
            hint=f"set it to a multiple of {dp}, or launch.nproc to {asked} or fewer",
        )
    if asked % (micro * dp):
        nearest = max(1, round(asked / (micro * dp))) * micro * dp
        fitting = next((n for n in range(micro, 0, -1) if asked % (n * dp) == 0), None)
        keeps = f"set train.micro_batch_size to {fitting}, which keeps it, or " if fitting else ""
        return 1, Finding.error(
            where,
            f"{asked} is not a multiple of micro_batch_size {micro} x {dp} ranks",
            hint=f"{keeps}set it to {nearest}",
        )
    accum = asked // (micro * dp)
    if wanted not in ("auto", accum):
        return accum, Finding.error(
            "train.grad_accum",
            f"{wanted} contradicts {where}={asked}, which needs {accum} ({asked} ="
            f" {micro} x {accum} x {dp})",
            hint="leave train.grad_accum at auto, or drop train.global_batch_size",
        )
    return accum, None


def count_steps(job: Job, plan: Plan) -> Plan:
    """Return the plan with the steps that its epochs take: as many whole steps as there are."""
    asked, size = f"train.epochs={plan.epochs:g}", plan.batch.global_size
    try:
        data: Any = job.workload.build_data(job.config, "train")
    except PacelineError:
        raise
    except Exception as error:
        raise data_failed(job.workload, "train", error) from error
    if data is None:
        raise no_training_data(job.workload)
    if is_stream(data) or not hasattr(data, "__len__"):
        raise ConfigError(
            f"{asked}: the training data has no length\n"
            "hint: set train.steps; with data.stream_repeat=false the run ends with the stream"
        )
    assert plan.epochs is not None
    found = open_picks(job.config, plan.batch, data).epoch_size if len(data) else 0
    steps = int(plan.epochs * found) // size
    if steps < 1:
        raise DataError(
            f"{asked} of {found} {plan.batch.counts} is less than one step, which takes {size}\n"
            "hint: more epochs, or a smaller train.micro_batch_size or train.grad_accum"
        )
    return plan.model_copy(update={"steps": steps})
