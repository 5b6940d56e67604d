"""What strategies are proven on: a small model of ours that shows their mistakes, or a user's job.

A subject names the trials and builds the job of each, without running it. Every strategy is
compared with one process that takes the same samples in each step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from paceline.config.load import read_draft, validate
from paceline.data.cursor import Order, StepSlice
from paceline.data.stream_shards import is_stream
from paceline.errors import ConfigError
from paceline.job import Job, job_schema, load_job
from paceline.records import Plan
from paceline.run.fit import is_open
from paceline.strategies import lossy_keys
from paceline.train.feed import build_split, prepare_data
from paceline.verify.trial import (
    AFTER,
    BEFORE,
    BROKEN,
    BYTES,
    EQUAL,
    POISONED,
    WHOLE,
    without_own_updates,
)
from paceline.workloads.base import find_workload

Say = Callable[[str], None]
Jobs = dict[str, Job]  # by the name of the trial
Words = Sequence[str]  # KEY=VALUE


class Batch(NamedTuple):
    """How a process cuts the samples of a step into microbatches."""

    micro: int
    accum: int


class Subject(Protocol):
    prepared: Mapping[str, Any]  # what the workload's `prepare` returned

    @property
    def total_s(self) -> float:
        """Return the time limit for all trials of one strategy."""
        ...

    def refusals(self, overrides: Words) -> Iterator[str]:
        """Yield the reasons for refusing these overrides."""
        ...

    def overruled(self, overrides: Words) -> list[str]:
        """Return notes on overrides that a proof replaces by its own."""
        ...

    def build(self, settings: Words) -> Job:
        """Return the job with these settings, ready to be planned."""
        ...

    def prepare(self, job: Job, say: Say) -> None:
        """Call the workload's `prepare`, once, before ranks start."""
        ...

    def default_names(self, overrides: Words) -> list[str]:
        """Return the strategies to prove if none is named; empty: all that can run here."""
        ...

    def trials(self, settings: Words, world: int) -> Jobs:
        """Return the trials that `world` ranks run."""
        ...

    def alone(self, job: Job, plan: Plan) -> Batch:
        """Return the batch with which one process takes the samples that the ranks share."""
        ...

    def reference(self, settings: Words, batch: Batch, world: int) -> Jobs:
        """Return the trials of one process, with which those of `world` ranks are compared."""
        ...


WORKLOAD, MICRO, ACCUM, STEPS = "uneven", 2, 2, 8
COMMON = (
    "name=verify", f"workload={WORKLOAD}", "precision.mode=fp32", "precision.matmul=highest",
    "train.seed=7", "train.log_every=1", "train.max_skips=1", "data.num_workers=0",
    "checkpoint.at_end=false", "train.activation_checkpointing=full",
)  # fmt: skip
# The norms of these steps lie around the limit: some steps are clipped, some are not.
SGD = ("optim.name=sgd", "optim.lr=0.3", "optim.weight_decay=0.01", "optim.clip=0.9")
CHANGING = ("optim.schedule.name=cosine", "optim.schedule.warmup_steps=2")
CONSTANT = ("optim.schedule.name=constant",)
EVALUATED = ("train.eval_every=4", "train.eval_samples=9")


class MadeModel:
    """A small language model on sentences of unequal length (workloads/uneven.py). On request the
    loss of one of them is NaN."""

    # Other keys would change what is proven.
    ALLOWED = (
        "launch.", "strategy.", "attention.", "train.compile", "train.activation_checkpointing",
    )  # fmt: skip
    total_s = 300.0
    prepared: Mapping[str, Any] = MappingProxyType({})

    def refusals(self, overrides: Words) -> Iterator[str]:
        for text in overrides:
            key = key_of(text)
            if not key.startswith(self.ALLOWED):
                yield f"{text}: a proof fixes this\nhint: it takes {', '.join(self.ALLOWED)}"
            elif key in lossy_keys():
                yield f"{text}: this changes the gradients\nhint: prove without it"

    def overruled(self, overrides: Words) -> list[str]:
        return []

    def build(self, settings: Words) -> Job:
        kind = find_workload(WORKLOAD, typed=True)
        usual = [f"workload={WORKLOAD}", f"train.micro_batch_size={MICRO}"]
        draft = read_draft(None, [*usual, *settings])
        return Job(validate(draft, job_schema(kind)), kind(), tuple(settings))

    def prepare(self, job: Job, say: Say) -> None:
        pass

    def default_names(self, overrides: Words) -> list[str]:
        return []

    def trials(self, settings: Words, world: int) -> Jobs:
        poison = f"data.poison={self._sample_of(rank=world - 1, step=2, world=world)}"
        constant = [*SGD, *CONSTANT]
        return {
            name: self._job(Batch(MICRO, ACCUM), [*more, *settings])
            for name, more in {
                EQUAL: [*SGD, *CHANGING, f"train.steps={STEPS}", *EVALUATED],
                BEFORE: [*constant, "train.steps=1"],
                POISONED: [*constant, "train.steps=2", poison],
                AFTER: [*constant, "train.steps=3", poison],
                BYTES: ["optim.name=adamw", "train.steps=1"],
                BROKEN: [*SGD, *CHANGING, f"train.steps={STEPS}"],
            }.items()
        }

    def alone(self, job: Job, plan: Plan) -> Batch:
        """Return a batch of one pass over all samples of a step: a mean of means would differ."""
        return Batch(MICRO * ACCUM * plan.world_size, 1)

    def reference(self, settings: Words, batch: Batch, world: int) -> Jobs:
        """Return one run on the same device, without any setting of the strategy."""
        same = ("attention.", "launch.device=", "launch.devices=", "model.")
        kept = [text for text in settings if text.startswith(same)]
        more = [*SGD, *CHANGING, f"train.steps={STEPS}", *EVALUATED]
        return {EQUAL: on_one_rank(self._job(batch, [*more, *kept]))}

    def _job(self, batch: Batch, settings: Words) -> Job:
        cut = [f"train.micro_batch_size={batch.micro}", f"train.grad_accum={batch.accum}"]
        return self.build([*COMMON, *cut, *settings])

    def _sample_of(self, rank: int, step: int, world: int) -> int:
        """Return a sample that `rank` trains on in `step`."""
        config: Any = self.build(COMMON).config
        order = Order(config.data.num_samples, config.train.seed)
        positions = StepSlice(MICRO, ACCUM, world, rank).positions((step - 1) * ACCUM)
        return int(order.at(positions)[0])


OWN_STEPS, OWN_ACCUM, CLIP = 4, 2, 1.0
# The user's keys that a proof sets itself. SGD, because adaptive optimizers hide a gradient that is
# wrong by a factor; fp32, because a difference is then an error and not rounding.
FIXED: dict[str, dict[str, Any]] = {
    "precision": {"mode": "fp32", "matmul": "highest"},
    "optim": {"name": "sgd", "lr": 0.1, "weight_decay": 0.01, "momentum": "auto", "ema": "off"},
    "train": {
        "steps": OWN_STEPS, "epochs": "off", "global_batch_size": "auto", "log_every": 1,
        "eval_every": "off", "eval_ema": False, "sample_prompts": [], "best": "auto",
        "stop_after": "off", "max_skips": 0,
    },
    "checkpoint": {"every": "off", "every_s": "off", "at_end": False, "dir": "run"},
    "observe": {"trackers": [], "profile": "off", "memory": "off"},
    # A loader process seeds its generators by the microbatch's place in the run, on any rank.
    "data": {"num_workers": 1},
    "audit": {"strict": False},
}  # fmt: skip
ALSO_FIXED = "optim.schedule."


@dataclass
class OwnJob:
    """A user's own model, data, loss and metrics, updated by SGD. One process takes the same
    microbatches as the ranks."""

    source: str
    overrides: Words
    prepared: Mapping[str, Any] = field(default_factory=dict)
    is_stream: bool = False
    has_val: bool = False

    @property
    def total_s(self) -> float:
        asked = self.build(self.overrides).config.launch.total_s
        return 600.0 if asked == "off" else float(asked)

    def refusals(self, overrides: Words) -> Iterator[str]:
        strategy = self.build(overrides).config.strategy
        usual = type(strategy)()
        for key in sorted(lossy_keys() - {"strategy.sync_batchnorm"}):
            name = key.partition(".")[2]
            if getattr(strategy, name) != getattr(usual, name):
                yield (
                    f"{key}={getattr(strategy, name)}: this changes the gradients\n"
                    f"hint: prove with {key}={getattr(usual, name)}"
                )

    def overruled(self, overrides: Words) -> list[str]:
        keys = dict.fromkeys(key_of(text) for text in overrides)
        fixed = {f"{section}.{name}" for section, named in FIXED.items() for name in named}
        found = [key for key in keys if key in fixed or key.startswith(ALSO_FIXED)]
        if not found:
            return []
        return [f"set by the proof, in {OWN_STEPS} steps of SGD in fp32: {', '.join(found)}"]

    def build(self, settings: Words) -> Job:
        job = load_job(self.source, settings)
        if is_open(job):
            raise ConfigError(
                "data.batch_length=auto: a proof does not look for what fits\n"
                "hint: set it to a number"
            )
        workload = without_own_updates(type(job.workload))()
        workload.prepared = self.prepared  # a model may have a class for each label that was found
        return replace(job, workload=workload)

    def prepare(self, job: Job, say: Say) -> None:
        job.workload.prepared = self.prepared = prepare_data(job, say)
        self.is_stream = is_stream(build_split(job, "train"))
        self.has_val = build_split(job, "val") is not None

    def default_names(self, overrides: Words) -> list[str]:
        return [self.build(overrides).config.strategy.name]

    def trials(self, settings: Words, world: int) -> Jobs:
        job = self._fix(self.build(settings), world)
        return {
            EQUAL: self._evaluated(job),
            BYTES: job.with_keys(optim={"name": "adamw"}, train={"steps": 1}),
            BROKEN: job,
        }

    def alone(self, job: Job, plan: Plan) -> Batch:
        batch, config = plan.batch, job.config
        if config.strategy.sync_batchnorm:  # normalises by what all ranks take in one pass
            return Batch(batch.micro * batch.dp, batch.grad_accum)
        return Batch(config.train.micro_batch_size, batch.grad_accum * batch.dp)

    def reference(self, settings: Words, batch: Batch, world: int) -> Jobs:
        """Return the same job on one process: with the ranks' microbatches and, if that leaves the
        order of samples as it is, with each batch in one piece."""
        job = on_one_rank(self._fix(self.build(settings), world))
        cut = {"micro_batch_size": batch.micro, "grad_accum": batch.accum}
        trials = {EQUAL: self._evaluated(job).with_keys(train=cut)}
        if batch.accum > 1 and job.config.data.num_buckets is None and not self.is_stream:
            cut = {"micro_batch_size": batch.micro * batch.accum, "grad_accum": 1}
            trials[WHOLE] = self._evaluated(job).with_keys(train=cut)
        return trials

    def _fix(self, job: Job, world: int) -> Job:
        """Set what a proof sets, but keep the user's batch size and clipping."""
        config, fixed = job.config, {name: dict(values) for name, values in FIXED.items()}
        schedule = config.optim.schedule.model_copy(update={"name": "constant", "warmup_steps": 0})
        clip = CLIP if config.optim.clip == "off" else config.optim.clip
        fixed["optim"] |= {"schedule": schedule, "clip": clip}
        if config.train.grad_accum == "auto":
            fixed["train"]["grad_accum"] = 1 if config.strategy.sync_batchnorm else OWN_ACCUM
        if self.is_stream and config.data.stream_readers == "auto":  # or ranks decide the order
            fixed["data"]["stream_readers"] = world
        return job.with_keys(**fixed)

    def _evaluated(self, job: Job) -> Job:
        """Return the job with an evaluation after its last step, if it has validation data. The
        ranks cannot share its samples evenly."""
        train = job.config.train
        if not self.has_val:
            return job.with_keys(train={"eval_samples": "all"})
        few = 2 * train.micro_batch_size + 1
        samples = few if train.eval_samples == "all" else train.eval_samples
        return job.with_keys(train={"eval_every": train.steps, "eval_samples": samples})


def on_one_rank(job: Job) -> Job:
    """Return the job on one rank, of the same device."""
    devices = job.config.launch.devices
    first = devices if devices == "auto" else devices[:1]
    place = {"launcher": "local", "nproc": 1, "nnodes": 1, "hostfile": "none", "devices": first}
    return job.with_keys(launch=place, strategy={"name": "ddp"})


def key_of(text: str) -> str:
    """Return the key of KEY=VALUE, however it is written."""
    return text.lstrip("+~").partition("=")[0]
