"""Turns a run directory and new overrides into the job that is resumed in it.

What has changed is shown. What changes the shape of the model is refused, what changes what is
computed must be allowed, and how the same thing is computed may differ freely. So may the number of
steps: it is why most runs go on, and what it does to the learning rate is said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.pieces import named_tensors, require_same_shapes
from paceline.checkpoint.tensors import TensorFiles
from paceline.config.describe import differing
from paceline.config.load import load_config, read_draft, validate
from paceline.config.schema import RunConfig
from paceline.config.training import DEFAULT_STEPS
from paceline.errors import ConfigError, RestoreError
from paceline.job import Job, job_schema
from paceline.plan.planner import sketch_model
from paceline.plan.policy import keep_route
from paceline.records import LaunchPlan, Plan
from paceline.records.rundir import RunDir
from paceline.records.words import count
from paceline.strategies import lossy_keys
from paceline.strategies.optim import learning_rate
from paceline.trust import strangers
from paceline.workloads.base import Workload, load_trusted
from paceline.workloads.given import pack
from paceline.workloads.job_file import Approve, absolute_name, require_trusted

# Where ranks run, what is watched, how the work is shared: the same thing is computed.
FREE = ("name", "launch.", "observe.", "audit.", "checkpoint.", "strategy.")
FREE_KEYS = (
    "data.num_workers", "data.prefetch", "data.timeout_s", "train.log_every", "train.stop_after",
    "train.sample_prompts", "train.sample_tokens",
)  # fmt: skip
BATCH = ("train.micro_batch_size", "train.grad_accum", "train.global_batch_size")
STEPS, EPOCHS = "train.steps", "train.epochs"
# What would be different from the checkpoint on, by how a key begins; the first that fits.
REASONS = {
    "optim.ema": "the average of the weights would begin, end or weigh its steps differently",
    "optim.schedule": "the learning rate would leave the curve that it has followed",
    "optim.": "the optimizer would make other updates of the same gradients",
    "data.": "the steps to come would see other samples than this run was begun with",
    "train.seed": "the data would come in another order, and dropout would draw other numbers",
    "train.eval": "validation losses would not compare with those before",
    "train.best": "the best checkpoint would be the best by another measure than so far",
    "train.max_skips": "more or fewer bad steps would be borne than so far",
    "train.deterministic": "other kernels round differently: no step would be the same bit for bit",
    "train.compile": "compiled kernels round differently: no step would be bit for bit the same",
    "train.activation_checkpointing": "what is computed again rounds as it likes",
    "precision.": "numbers would be rounded differently from here on",
    "attention.": "another kernel rounds differently",
    "model.": "the model would compute something else with the same weights",
    "strategy.": "gradients would be computed or sent differently",
    "train.micro_batch_size": "a step would take another number of samples, unless as many more"
    " ranks or passes make up for it",
    **dict.fromkeys(
        BATCH[1:], "a step would take another number of samples at the same learning rate"
    ),
}


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    after: Any

    @property
    def is_free(self) -> bool:
        if self.key in lossy_keys():
            return False
        return self.key.startswith(FREE) or self.key in (*FREE_KEYS, STEPS, EPOCHS)

    @property
    def reason(self) -> str:
        """Why it is not free, in plain words."""
        fitting = (why for begin, why in REASONS.items() if self.key.startswith(begin))
        return next(fitting, "the rest of the run would compute something else")

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Resumption:
    """A run to be resumed: its directory, its job, and what has changed."""

    run: RunDir
    job: Job
    changes: list[Change]
    global_size: int  # samples per step of the run so far
    allow_change: bool = False  # settings that change the training are accepted

    def with_same_batch(self) -> "Resumption":
        """Keep the samples per step on another number of ranks, unless the user has set the batch,
        so that the training stays the same."""
        if any(change.key in BATCH for change in self.changes):
            return self
        train = self.job.config.train.model_copy(
            update={"global_batch_size": self.global_size, "grad_accum": "auto"}
        )
        config = self.job.config.model_copy(update={"train": train})
        return replace(self, job=replace(self.job, config=config))


def load_resumption(
    path: Path, overrides: Sequence[str], allow_change: bool, approve: Approve | None = None
) -> Resumption:
    """Read the run of a directory, with overrides on top; ConfigError lists what may not change.
    `approve` is asked about a workload's file that was never typed here."""
    run = RunDir.open(path)
    launch = LaunchPlan.load(run.launch)
    draft = read_draft(str(run.config), overrides)
    draft.is_ours = not strangers([run.config])
    if draft.typed("workload") is not None:
        raise ConfigError("a run goes on with its own workload; --resume cannot change it")
    written: Any = OmegaConf.to_container(draft.tree, resolve=False)
    _require_same_workload(run, str(written.get("workload")), launch.workload)
    require_trusted(launch.workload, run.root, approve)
    kind = load_trusted(launch.workload)
    schema = job_schema(kind)
    config = validate(draft, schema)
    changes = list(differences(load_config(run.config, schema), config))
    begun = Plan.load(run.plan)
    config = keep_route(config, begun)
    if absolute_name(config.workload) != launch.workload:  # typed in another folder
        config = config.model_copy(update={"workload": launch.workload})
    job = Job(config, kind(), ("--resume", str(path), *overrides), pack(launch.workload))
    _require_same_model(run, job, changes)
    if not allow_change:
        _require_free(changes)
    return Resumption(run, job, changes, begun.batch.global_size, allow_change)


def explain_schedule(resumption: Resumption, last_step: int) -> str:
    """Say what another number of steps does to the learning rate after `last_step`; empty if
    nothing."""
    optim, workload = resumption.job.config.optim, resumption.job.workload
    changes = {change.key: change for change in resumption.changes}
    change = changes.get(EPOCHS) or changes.get(STEPS)
    if change is None:
        return ""
    if type(workload).learning_rate is not Workload.learning_rate:
        return f"{type(workload).__name__}.learning_rate says what the steps to come take"
    name = optim.schedule.name
    if name == "constant":
        return "the learning rate is constant: more or fewer steps do not change it"
    if optim.schedule.total_steps != "auto":
        end = optim.schedule.total_steps
        return f"the learning rate follows its {name} to step {end}, as before"
    if change.key == EPOCHS:
        return f"the {name} of the learning rate ends with the run, whose length has changed"
    before, after = (DEFAULT_STEPS if n == "auto" else n for n in (change.before, change.after))
    if not 0 < last_step < after:
        return f"the {name} of the learning rate ends at step {after}"
    then = learning_rate(last_step, before, optim)
    now = learning_rate(last_step + 1, after, optim)
    return (
        f"the {name} of the learning rate now ends at step {after}, not {before}:"
        f" step {last_step} took {then:.3g}, step {last_step + 1} takes {now:.3g}, and the last one"
        f" {learning_rate(after, after, optim):.3g}"
    )


def require_steps_ahead(wanted: int, kept: Sequence[int]) -> None:
    """Refuse a run that would end before its newest checkpoint, the first of `kept`: steps are
    never undone."""
    if kept and wanted < kept[0]:
        raise ConfigError(
            f"the run is to end after {count(wanted, 'step')}, and its newest checkpoint is of"
            f" step {kept[0]} already\n"
            f"hint: set train.steps to {kept[0] + 1} or more; only a new run takes fewer"
        )


def differences(before: RunConfig, after: RunConfig) -> Iterator[Change]:
    """Yield every key whose value has changed."""
    trees = (config.model_dump(mode="json") for config in (before, after))
    return (Change(*difference) for difference in differing(*trees))


def _require_same_workload(run: RunDir, written: str, launched: str) -> None:
    """Refuse a run.yaml that names another workload than launch.json, which has the full path of a
    file. run.yaml may name that file relative to the folder where it was typed; then only names are
    compared."""
    if ".py:" in written and not Path(written).is_absolute():
        is_same = Path(written).name == Path(launched).name
    else:
        is_same = absolute_name(written) == launched
    if not is_same:
        raise ConfigError(
            f"{run.config} names the workload {written}, and launch.json {launched}: one of"
            " them was changed\nhint: start a new run with the workload that you want"
        )


def _require_free(changes: Sequence[Change]) -> None:
    problems = [
        f"{change}: {change.reason}\nhint: --allow-change accepts it; a new run keeps both apart"
        for change in changes
        if not change.is_free
    ]
    if problems:
        raise ConfigError(problems)


def _require_same_model(run: RunDir, job: Job, changes: Sequence[Change]) -> None:
    """Compare the model with the newest checkpoint that lists its tensors; ranks check again what
    they load."""
    if not any(change.key.startswith("model.") for change in changes):
        return
    folder = CheckpointFolder.of_run(run, job.config.checkpoint)
    for step in folder.steps():
        try:
            source = TensorFiles(folder.path(step), folder.manifest(step))
        except RestoreError:
            continue
        model = sketch_model(job.workload, job.config)
        shapes = {name: tuple(value.shape) for name, value in named_tensors(model)}
        try:
            require_same_shapes(source, shapes)
        except ConfigError as error:
            changed = ", ".join(str(c) for c in changes if c.key.startswith("model."))
            raise ConfigError(f"{changed}: {error}") from error
        return
