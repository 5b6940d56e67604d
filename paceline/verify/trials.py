"""The trials of one strategy, planned and then run: plans in, files of every rank out."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.load import dump_config
from paceline.job import Job
from paceline.launch import find_launcher
from paceline.launch.base import with_short_limits
from paceline.launch.ending import Ending, load_verdicts, said_by, untold_cause
from paceline.plan.planner import estimate_rank, make_plan, measure_model
from paceline.plan.policy import effective_config
from paceline.records import Env, Finding, Plan, RankVerdict, StateBytes
from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.records.words import few
from paceline.run.flow import order_for, require_feasible, run_short_task
from paceline.verify.trial import EQUAL, VERIFY, WHOLE, trial_dir, try_rank


@dataclass
class Trials:
    """What one strategy, or one process, runs: a job for each trial, and their plans."""

    root: Path
    env: Env
    jobs: Mapping[str, Job]
    plans: dict[str, Plan] = field(default_factory=dict)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root)

    def plan(self) -> None:
        """Plan them all; raise what is wrong with any."""
        for name, job in self.jobs.items():
            self.plans[name] = make_plan(job, self.env)
            require_feasible(self.plans[name])

    def run(self, prepared: Mapping[str, Any], total_s: float) -> str:
        """Launch once for all trials; return what went wrong, or ""."""
        job, plan = self.jobs[EQUAL], self.plans[EQUAL]
        launcher = find_launcher(plan.crew.launcher.value)
        task = replace(VERIFY, work=partial(try_rank, packed=job.packed)) if job.packed else VERIFY
        order = replace(order_for(job, self.env, plan, str(self.root)), task=task)
        launcher.require_ready(order)
        launch = with_short_limits(launcher.plan(order), total_s)
        for name in self.jobs:
            self._save(trial_dir(self.run_dir, name), self.jobs[name], self.plans[name], prepared)
        self._save(self.run_dir, job, plan, prepared)
        return self._failure(run_short_task(launcher, launch, self.run_dir, task))

    def failure_of(self, name: str) -> str:
        """Return what a rank said that failed in this trial, or ""."""
        found = load_verdicts(trial_dir(self.run_dir, name), self.plans[name].world_size)
        told = ((rank, said_by(verdict) or _not_finite(verdict)) for rank, verdict in found.items())
        return next((f"rank {rank}: {said}" for rank, said in told if said), "")

    def notes(self) -> list[str]:
        """Return what the first rank noticed about the job while it ran."""
        found = load_verdicts(trial_dir(self.run_dir, EQUAL), 1)
        return [note for verdict in found.values() for note in verdict.notes]

    def warnings(self) -> list[Finding]:
        """Return what the plan warns of."""
        return [found for found in self.plans[EQUAL].findings if found.severity == "warning"]

    def _save(self, run: RunDir, job: Job, plan: Plan, prepared: Mapping[str, Any]) -> None:
        run.root.mkdir(parents=True, exist_ok=True)
        write_atomic(run.config, dump_config(job.config))
        write_atomic(run.data, json.dumps(dict(prepared)))
        plan.save(run.plan)

    def _failure(self, ending: Ending) -> str:
        """Return what went wrong, or "". A trial's verdicts say more than the strategy's."""
        if (untold := untold_cause(self.run_dir, ending.seen)) is not None:
            rank, why = untold
            return why if rank is None else f"rank {rank}: {why}"
        for name in sorted(self.jobs.keys() - {WHOLE}):
            if said := self.failure_of(name):
                return f"{name}, {said}"
        failed = [rank for rank, ended in ending.seen.ends.items() if ended.failed]
        log = self.run_dir.rank_log(failed[0]) if failed else ""
        return f"rank {failed[0]} left no verdict; its log: {log}" if failed else ""


def expected_bytes(job: Job, plan: Plan) -> Callable[[int], StateBytes]:
    """Return what the plan has for each rank after one step."""
    config = effective_config(job.config, plan.attention.value, plan.kernels.value)
    model = measure_model(job.workload, config)
    return lambda rank: estimate_rank(plan, config, model, rank)


def _not_finite(verdict: RankVerdict) -> str:
    if verdict.bad_step is None:
        return ""
    what = "gradient" if verdict.loss_was_finite else "loss"
    samples = few(map(str, verdict.bad_sample_ids))
    return f"the {what} of step {verdict.bad_step} is not finite (samples {samples})"
