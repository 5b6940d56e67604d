"""The position of a run in its steps and data: read from a checkpoint, and written into one."""

import logging
from collections.abc import Callable

import torch

from paceline import __version__
from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.restore import Found, choose_checkpoint, require_never_saved
from paceline.checkpoint.tensors import TensorFiles
from paceline.data.rng import restore_rng, seed_rng
from paceline.errors import DataError
from paceline.job import Job
from paceline.records import Attempt, BestMetric, DataPosition, Kept, Plan, StreamPlaces
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.table_file import TableFile
from paceline.records.tables import SAMPLES, STEPS
from paceline.strategies import find_strategy
from paceline.strategies.optim import rate_of
from paceline.train.feed import TrainData
from paceline.train.loop import Start

LOG = logging.getLogger("paceline")


def load_attempt(run: RunDir) -> Attempt:
    """Return the record of this attempt; that of a first one if there is no file."""
    if run.attempt.is_file():
        return Attempt.load(run.attempt)
    return Attempt(number=1, resume=False, started_at=wall_time())


class History:
    """The step, the position in the data and the best loss: of a new run, or of a checkpoint."""

    def __init__(self, job: Job, plan: Plan, attempt: Attempt, data: TrainData) -> None:
        self.job, self.plan, self.attempt = job, plan, attempt
        self.num_samples, self.data_fingerprint = data.num_samples, data.fingerprint
        self.epoch_size = data.epoch_size
        self.start, self.start_position = Start(), 0
        self.stream: StreamPlaces | None = None
        # Where the readers of a stream stand: the feed will say, once there is one.
        self.gather_places: Callable[[], StreamPlaces | None] = lambda: None
        self.best: BestMetric | None = None
        self.num_worse = 0

    def restore(
        self,
        run: RunDir,
        rank: int,
        device: torch.device,
        load: Callable[[TensorFiles], None],
        notes: list[str],
    ) -> Found | None:
        """Resume from the newest sound checkpoint, where this attempt is to resume. A collective.

        `load` takes the state out of the files; what a person should know is added to `notes`.
        """
        folder = CheckpointFolder.of_run(run, self.job.config.checkpoint)
        if rank == 0:
            folder.sweep()
        if not self.attempt.resume:
            return None
        found = choose_checkpoint(folder, device, load)
        if found is None:
            require_never_saved(run.checkpoint_log, folder)
            notes.append("there was no checkpoint yet: this attempt began with step 1")
            if rank == 0:
                _cut_absent_ranks(run, self.plan.world_size, 0)
            return None
        self.resume_from(found.kept)
        step = found.kept.step
        notes += [f"{damage}; step_{step} was used instead" for damage in found.damages]
        notes += find_strategy(self.plan.strategy.value).lost_on_resume(self.job.config)
        LOG.info("resumes from the checkpoint of step %d", step)
        if self.stream is not None:
            notes.append(f"the stream was resumed {self.stream.how}")
            LOG.info("the stream is resumed %s", self.stream.how)
        if rank == 0:
            known = {"first_step": step + 1, "notes": notes}
            run.lost.keep(run.attempt, self.attempt.model_copy(update=known).to_json())
            self._drop_what_lies_beyond(run, folder, found.kept)
        return found

    def _drop_what_lies_beyond(self, run: RunDir, folder: CheckpointFolder, kept: Kept) -> None:
        """Remove what belongs to steps after the checkpoint: they will be taken again."""
        _cut_absent_ranks(run, self.plan.world_size, kept.step)
        for newer in [step for step in folder.steps() if step > kept.step]:
            folder.set_aside(newer)
        best = kept.best  # the kill may have come between a checkpoint and its mark
        if best is not None and best.step in folder.steps():
            folder.mark_best(best.step)

    def resume_from(self, kept: Kept) -> None:
        """Take over the step, the position in the data and the best loss of a checkpoint."""
        self._require_same_base(kept)
        self._require_same_data(kept.data)
        self.start = Start(kept.step + 1, kept.num_skips, kept.evaluation_is_due)
        self.start_position, self.stream = kept.data.position, kept.data.stream
        self.best, self.num_worse = kept.best, kept.num_worse

    @property
    def _base(self) -> str:
        return str(self.job.workload.prepared.get("base_hash", ""))

    def _require_same_base(self, kept: Kept) -> None:
        """Refuse to put trained weights over others than those that they were trained with."""
        if kept.base and kept.base != self._base:
            raise DataError(
                f"the checkpoint of step {kept.step} has trained weights alone, for the base model"
                f" {kept.base}, and this one is {self._base or 'unknown'}\n"
                "hint: bring the base model back as it was: model.hf, its files, train.seed"
            )

    def _require_same_data(self, data: DataPosition) -> None:
        """Refuse other data: a position means the same sample only in the same data, in the same
        order."""
        if self.attempt.allow_change:
            return
        changes = {
            "samples": (data.num_samples, self.num_samples),
            "fingerprint": (data.fingerprint, self.data_fingerprint),
        }
        told = [f"{name} {old} -> {new}" for name, (old, new) in changes.items() if old != new]
        if told:
            raise DataError(
                f"the training data is not what the checkpoint was made with: {', '.join(told)}\n"
                "hint: bring the data back, or accept other samples with --allow-change"
            )

    def describe(self, step: int, reason: str, num_skips: int) -> Kept:
        """Return what state.json says after `step`."""
        plan, config = self.plan, self.job.config
        return Kept(
            step=step,
            reason=reason,
            saved_at=wall_time(),
            data=self._position_after(step),
            num_skips=num_skips,
            lr=rate_of(step, plan.steps, config, self.job.workload),
            num_steps=plan.steps,
            best=self.best,
            strategy=plan.strategy.value,
            world_size=plan.world_size,
            precision=plan.precision.value,
            global_size=plan.batch.global_size,
            config_fingerprint=self.job.fingerprint,
            base=self._base if config.checkpoint.weights == "trained" else "",
            versions={"paceline": __version__, "torch": torch.__version__},
        )

    def _position_after(self, step: int) -> DataPosition:
        size = self.plan.batch.global_size
        position = self.start_position + (step - self.start.first_step + 1) * size
        stream = self.gather_places()
        epoch, index = divmod(position, self.epoch_size) if self.epoch_size else (0, position)
        if stream is not None:
            epoch = min(place[0] for place in stream.places)
        return DataPosition(
            position=position,
            num_samples=self.num_samples,
            seed=self.job.config.train.seed,
            epoch=epoch,
            segment=-(-index // size),
            start_index=max(0, index - size),
            end_index=index,
            fingerprint=self.data_fingerprint,
            stream=stream,
        )


def settle_rng(found: Found | None, job: Job, plan: Plan, rank: int, device: torch.device) -> None:
    """Set the random generators as they were at the checkpoint, or seed them.

    On another number of ranks there is no state for each of them: they are seeded by the step.
    Ranks are seeded apart, for dropout must differ between them.
    """
    seed = job.config.train.seed
    if found is None:
        seed_rng(seed, rank)
    elif found.kept.world_size == plan.world_size:
        restore_rng(found.rng(rank), device)
    else:
        seed_rng(seed, rank, found.kept.step)


def _cut_absent_ranks(run: RunDir, num_ranks: int, kept: int) -> None:
    """Cut the tables of ranks that no longer take part: other ranks take their steps again."""
    for folder in run.ranks.glob("rank*"):
        number = folder.name.removeprefix("rank")
        if number.isdigit() and int(number) >= num_ranks:
            if run.steps(int(number)).is_file():
                TableFile(run.steps(int(number)), STEPS, kept, run.lost).close()
            if run.samples(int(number)).is_file():
                TableFile(run.samples(int(number)), SAMPLES, kept, run.lost).close()
