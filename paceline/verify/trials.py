"""The trials of one strategy on paper, and their run: plans in, files of every rank out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config.load import dump_config, read_draft, validate
from paceline.data.cursor import Order, StepSlice
from paceline.job import Job, job_schema
from paceline.launch import find_launcher
from paceline.launch.base import with_short_limits
from paceline.launch.ending import Ending, load_verdicts, untold_cause
from paceline.plan.planner import estimate_rank, make_plan, measure_model
from paceline.plan.policy import effective_config
from paceline.records import Env, Plan, StateBytes
from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.run.flow import order_for, require_feasible, run_short_task
from paceline.verify.trial import AFTER, BEFORE, BROKEN, BYTES, EQUAL, POISONED, VERIFY, trial_dir
from paceline.workloads.base import find_workload

WORKLOAD = "uneven"
MICRO, ACCUM, STEPS = 2, 2, 8
TOTAL_S = 300.0  # trials of one strategy that take longer have hung
COMMON = (
    "name=verify", f"workload={WORKLOAD}", "precision.mode=fp32", "precision.matmul=highest",
    "train.seed=7", "train.log_every=1", "train.max_skips=1", "data.num_workers=0",
    "checkpoint.at_end=false",
)  # fmt: skip
# The norms of these steps lie around the limit: some steps are clipped, some are not.
SGD = ("optim.name=sgd", "optim.lr=0.3", "optim.weight_decay=0.01", "optim.clip=0.9")
CHANGING = ("optim.schedule.name=cosine", "optim.schedule.warmup_steps=2")
CONSTANT = ("optim.schedule.name=constant",)
EVALUATED = ("train.eval_every=4", "train.eval_samples=9")
RECOMPUTED = ("train.activation_checkpointing=full",)


@dataclass(frozen=True)
class Trials:
    """`world` is the number of ranks of the strategy on trial, also for its reference."""

    root: Path
    env: Env
    world: int

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root)

    def run(self, settings: Sequence[str], only_equal: bool = False) -> str:
        """Plan all trials, launch once; return what went wrong, or ""."""
        batch = self._batch(is_reference=only_equal)
        plans = {}
        for name, more in self._differences().items():
            if name == EQUAL or not only_equal:
                plans[name] = self._prepare(name, [*COMMON, *RECOMPUTED, *batch, *more, *settings])
        job, plan = plans[EQUAL]
        launcher = find_launcher(plan.crew.launcher.value)
        order = order_for(job, self.env, plan, str(self.root))
        launcher.require_ready(order)
        launch = with_short_limits(launcher.plan(replace(order, task=VERIFY)), TOTAL_S)
        _save_plans(self.run_dir, job, plan)
        return self._failure(run_short_task(launcher, launch, self.run_dir, VERIFY))

    def _batch(self, is_reference: bool) -> list[str]:
        """Set the batch: one process takes in one pass what the ranks take in several."""
        micro, accum = (MICRO * ACCUM * self.world, 1) if is_reference else (MICRO, ACCUM)
        return [f"train.micro_batch_size={micro}", f"train.grad_accum={accum}"]

    def _differences(self) -> dict[str, list[str]]:
        sample = _sample_of(rank=self.world - 1, step=2, world=self.world)
        return {
            EQUAL: [*SGD, *CHANGING, f"train.steps={STEPS}", *EVALUATED],
            BEFORE: [*SGD, *CONSTANT, "train.steps=1"],
            POISONED: [*SGD, *CONSTANT, "train.steps=2", f"data.poison={sample}"],
            AFTER: [*SGD, *CONSTANT, "train.steps=3", f"data.poison={sample}"],
            BYTES: ["optim.name=adamw", "train.steps=1"],
            BROKEN: [*SGD, *CHANGING, f"train.steps={STEPS}"],
        }

    def _prepare(self, name: str, settings: list[str]) -> tuple[Job, Plan]:
        job = build_job(settings)
        plan = make_plan(job, self.env)
        require_feasible(plan)
        _save_plans(trial_dir(self.run_dir, name), job, plan)
        return job, plan

    def _failure(self, ending: Ending) -> str:
        """Return what went wrong, or "". A trial's verdicts say more than those of the strategy."""
        if (untold := untold_cause(self.run_dir, ending.seen)) is not None:
            rank, why = untold
            return why if rank is None else f"rank {rank}: {why}"
        for trial in sorted((self.root / "trials").iterdir()):
            for rank, verdict in load_verdicts(RunDir(trial), ending.num_ranks).items():
                if verdict.error is not None:
                    return f"{trial.name}, rank {rank}: {verdict.error.message}"
        failed = [rank for rank, ended in ending.seen.ends.items() if ended.failed]
        log = self.run_dir.rank_log(failed[0]) if failed else ""
        return f"rank {failed[0]} left no verdict; its log: {log}" if failed else ""


def build_job(settings: Sequence[str]) -> Job:
    kind = find_workload(WORKLOAD, typed=True)
    draft = read_draft(None, [f"workload={WORKLOAD}", *settings])
    return Job(validate(draft, job_schema(kind)), kind(), tuple(settings))


def expected_bytes(settings: Sequence[str], env: Env) -> Callable[[int], StateBytes]:
    """Return what the plan has for each rank after one AdamW step."""
    job = build_job([*COMMON, "optim.name=adamw", f"train.micro_batch_size={MICRO}", *settings])
    plan = make_plan(job, env)
    config = effective_config(job.config, plan.attention.value, plan.kernels.value)
    model = measure_model(job.workload, config)
    return lambda rank: estimate_rank(plan, config, model, rank)


def _sample_of(rank: int, step: int, world: int) -> int:
    """Return a sample that `rank` meets in `step`."""
    job = build_job(COMMON)
    order = Order(job.config.data.num_samples, job.config.train.seed)  # type: ignore[attr-defined]
    positions = StepSlice(MICRO, ACCUM, world, rank).positions((step - 1) * ACCUM)
    return int(order.at(positions)[0])


def _save_plans(run: RunDir, job: Job, plan: Plan) -> None:
    run.root.mkdir(parents=True, exist_ok=True)
    write_atomic(run.config, dump_config(job.config))
    write_atomic(run.data, json.dumps({}))
    plan.save(run.plan)
