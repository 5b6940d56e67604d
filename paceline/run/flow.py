"""One run from config to report: read this file first, then one folder per stage, in this order.

asked (run.yaml) -> found (env.json) -> decided (plan.json) -> launched -> recorded -> reported
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.folder import CheckpointFolder
from paceline.config.load import dump_config
from paceline.errors import (
    ClusterError,
    ConfigError,
    DataError,
    Outcome,
    PacelineError,
)
from paceline.job import Job
from paceline.launch import find_launcher
from paceline.launch.archive import (
    archive_left_over,
    begin_attempt,
    find_halt,
    put_back_decisions,
)
from paceline.launch.base import RUN_DIR, LaunchEnd, Launcher, LaunchOrder
from paceline.launch.follow import Follower
from paceline.launch.member import MemberLauncher
from paceline.launch.rendezvous import Rendezvous
from paceline.launch.signals import SignalLog, logged_signals
from paceline.machine.facts import probe
from paceline.machine.topology import Topology
from paceline.plan.planner import make_plan
from paceline.records import Crew, Env, LaunchPlan, Plan, Result
from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.run.conclude import Circumstances, conclude
from paceline.run.resume import Resumption
from paceline.workloads.base import code_fingerprint

REFUSALS: dict[str, type[PacelineError]] = {
    "config": ConfigError,
    "cluster": ClusterError,
    "data": DataError,
}


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Talk(Protocol):
    """What the user sees while a run goes on (cli/talk.py)."""

    def say(self, text: str) -> None: ...

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        """Ranks are starting; returns what to rendezvous with each new row of training.csv."""
        ...

    def trained(self) -> None: ...


def decide(job: Job, topology: Topology | None = None) -> tuple[Env, Plan]:
    """Found and decided: what `paceline plan` shows and `paceline train` begins with."""
    env = probe()
    return env, make_plan(job, env, topology)


def require_feasible(plan: Plan) -> None:
    """Raise all problems of a plan at once, as the kind of refusal the first one is."""
    problems = plan.problems()
    if problems:
        raise REFUSALS[problems[0].cause]([str(problem) for problem in problems])


def order_for(job: Job, env: Env, plan: Plan, run_dir: str = RUN_DIR) -> LaunchOrder:
    """What a launcher is asked to start for a training run."""
    return LaunchOrder(
        settings=job.config.launch,
        crew=plan.crew,
        env=env,
        threads=plan.threads.value,
        task="train",
        workload=job.config.workload,
        run_dir=run_dir,
    )


def choose_launcher(crew: Crew, rendezvous: Rendezvous | None, start_s: float) -> Launcher:
    """Ours to start, or started already: then all members must have come."""
    if rendezvous is None:
        return find_launcher(crew.launcher.value)
    return MemberLauncher(rendezvous, rendezvous.wait_for_all(start_s))


@dataclass(frozen=True)
class Decided:
    """What is known before the run directory is written."""

    job: Job
    env: Env
    plan: Plan
    launcher: Launcher
    prepared: dict[str, Any]
    code: str
    started_at: float


def run_job(job: Job, out: Path | None, talk: Talk, rendezvous: Rendezvous | None = None) -> Result:
    """Train `job` in a new run directory and write its result and report. `rendezvous` is with
    the other ranks, when a launcher has started this process as rank 0 of several."""
    env, plan = decide(job, rendezvous.topology if rendezvous else None)
    return run_decided(prepare(job, env, plan, talk, rendezvous), out, talk)


def run_decided(decided: Decided, out: Path | None, talk: Talk) -> Result:
    """The same for a job whose plan is made and whose data is there."""
    run = RunDir.create(decided.job.config.name, out)
    with run.lock():
        run.require_fresh()
        return _train_in(run, decided, talk)


def resume_job(
    resumption: Resumption, allow_change: bool, talk: Talk, rendezvous: Rendezvous | None = None
) -> Result:
    """Go on in a run's own directory, from its newest checkpoint that can be trusted."""
    run, topology = resumption.run, rendezvous.topology if rendezvous else None
    with run.lock():
        if (result := _finished(resumption)) is not None:
            talk.say(f"all {result.steps} steps are taken already: nothing to do")
            return result
        for change in resumption.changes:
            talk.say(f"changed: {change}")
        folder = CheckpointFolder.of_run(run, resumption.job.config.checkpoint)
        folder.require_writable()
        steps = folder.steps()
        talk.say(f"newest checkpoint: step {steps[0]}" if steps else "no checkpoint yet")
        env, plan = decide(resumption.job, topology)
        if plan.batch.global_size != resumption.global_size:
            resumption = resumption.with_same_batch()
            env, plan = decide(resumption.job, topology)
        decided = prepare(resumption.job, env, plan, talk, rendezvous)
        return _train_in(run, decided, talk, Resuming(allow_change))


@dataclass(frozen=True)
class Resuming:
    allow_change: bool


def _finished(resumption: Resumption) -> Result | None:
    """The result of a run that has taken all its steps."""
    path = resumption.run.result
    if not path.is_file():
        return None
    result = Result.load(path)
    is_over = result.outcome is Outcome.OK and result.steps >= resumption.job.config.train.steps
    return result if is_over else None


def prepare(
    job: Job, env: Env, plan: Plan, talk: Talk, rendezvous: Rendezvous | None = None
) -> Decided:
    """All that can fail before a rank starts, and the data."""
    started_at = time.time()
    require_feasible(plan)
    launcher = choose_launcher(plan.crew, rendezvous, job.config.launch.start_s)
    for finding in plan.findings:
        talk.say(f"{finding.severity}: {finding}")
    prepared = job.workload.prepare(job.config, talk.say)
    # Now, not later: the user may edit the file while the run goes on.
    code = code_fingerprint(job.config.workload)
    return Decided(job, env, plan, launcher, prepared, code, started_at)


def _train_in(
    run: RunDir, decided: Decided, talk: Talk, resuming: Resuming | None = None
) -> Result:
    """Write the decisions, run the ranks, conclude. The run directory is locked."""
    job, env, plan = decided.job, decided.env, decided.plan
    # A signal is noted from here on, and answered when the record is whole.
    with logged_signals() as signals:
        launch = _decide_launch(run, decided, talk, resuming)
        end = _launch(run, decided, launch, talk, signals)
        CheckpointFolder.of_run(run, job.config.checkpoint).sweep()
        known = Circumstances(
            end=end,
            config_fingerprint=job.fingerprint,
            code_fingerprint=decided.code,
            data_facts={k: v for k, v in decided.prepared.items() if isinstance(v, int | float)},
            started_at=decided.started_at,
            ended_at=time.time(),
        )
        result = conclude(run, plan, env, known)
        result.save(run.result)
        write_report(run)
        if resuming is not None:
            put_back_decisions(run)
    return result


def _decide_launch(
    run: RunDir, decided: Decided, talk: Talk, resuming: Resuming | None
) -> LaunchPlan:
    """Everything that ranks will read, on disk."""
    job = decided.job
    launch = decided.launcher.plan(order_for(job, decided.env, decided.plan, str(run.root)))
    for finding in launch.findings:
        talk.say(f"{finding.severity}: {finding}")
    folder = CheckpointFolder.of_run(run, job.config.checkpoint)
    folder.require_writable()
    if resuming is None:
        folder.require_unused()
    folder.sweep()
    archive_left_over(run)
    _save_decisions(run, job, decided.env, decided.plan, launch)
    write_atomic(run.data, json.dumps(decided.prepared, indent=2) + "\n")
    begin_attempt(
        run,
        resume=resuming is not None,
        halt_seen=find_halt(run, talk.say),
        allow_change=resuming is not None and resuming.allow_change,
    )
    return launch


@contextmanager
def in_peace() -> Iterator[None]:
    """While ranks live the launcher has its own handlers; before and after, an impatient signal
    must not cost the record of the run."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread, which is the caller's
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save_decisions(run: RunDir, job: Job, env: Env, plan: Plan, launch: LaunchPlan) -> None:
    asked = " ".join(repr(word) for word in job.asked)
    write_atomic(run.config, f"# asked: {asked}\n{dump_config(job.config)}")
    env.save(run.env)
    plan.save(run.plan)
    launch.save(run.launch)


def _launch(
    run: RunDir, decided: Decided, launch: LaunchPlan, talk: Talk, signals: SignalLog
) -> LaunchEnd:
    plan = decided.plan
    follower = Follower(run, plan.world_size, talk.training(run, plan), talk.say)
    follower.start()
    try:
        if signals.first is not None:  # from here on the launcher takes its own signals
            return LaunchEnd(signal=signals.first)
        return decided.launcher.run(launch, run)
    finally:
        follower.stop()
        talk.trained()
