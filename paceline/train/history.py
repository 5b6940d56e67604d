"""Where a run stands in its steps and its data, and what a checkpoint says of that."""

import time

import torch

from paceline import __version__
from paceline.errors import DataError
from paceline.job import Job
from paceline.records import Attempt, BestMetric, DataPosition, Kept, Plan
from paceline.records.rundir import RunDir
from paceline.strategies.optim import learning_rate
from paceline.train.loop import Start


def load_attempt(run: RunDir) -> Attempt:
    """Which start of the ranks this is; the first one where nobody has said."""
    if run.attempt.is_file():
        return Attempt.load(run.attempt)
    return Attempt(number=1, resume=False, started_at=time.time())


class History:
    """Begins with step 1 at position 0, or goes on from what a checkpoint kept."""

    def __init__(
        self, job: Job, plan: Plan, attempt: Attempt, num_samples: int, data_fingerprint: str
    ) -> None:
        self.job, self.plan, self.attempt = job, plan, attempt
        self.num_samples, self.data_fingerprint = num_samples, data_fingerprint
        self.start, self.start_position = Start(), 0
        self.best: BestMetric | None = None

    def go_on_from(self, kept: Kept) -> None:
        self._require_same_data(kept.data)
        self.start = Start(kept.step + 1, kept.num_skips, kept.evaluation_is_due)
        self.start_position = kept.data.position
        self.best = kept.best

    def _require_same_data(self, data: DataPosition) -> None:
        """A position means the same sample only in the same data, in the same order."""
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
        """state.json after `step`."""
        plan, config = self.plan, self.job.config
        return Kept(
            step=step,
            reason=reason,
            saved_at=time.time(),
            data=self._position_after(step),
            num_skips=num_skips,
            lr=learning_rate(step, plan.steps, config.optim),
            num_steps=plan.steps,
            best=self.best,
            strategy=plan.strategy.value,
            world_size=plan.world_size,
            precision=plan.precision.value,
            global_size=plan.batch.global_size,
            config_fingerprint=self.job.fingerprint,
            versions={"paceline": __version__, "torch": torch.__version__},
        )

    def _position_after(self, step: int) -> DataPosition:
        size = self.plan.batch.global_size
        position = self.start_position + (step - self.start.first_step + 1) * size
        epoch, index = divmod(position, self.num_samples)
        return DataPosition(
            position=position,
            num_samples=self.num_samples,
            seed=self.job.config.train.seed,
            epoch=epoch,
            segment=-(-index // size),
            start_index=max(0, index - size),
            end_index=index,
            fingerprint=self.data_fingerprint,
        )
