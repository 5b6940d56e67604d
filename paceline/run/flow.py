"""One run from config to report: read this file first, then one folder per stage, in this order.

asked (run.yaml) -> found (env.json) -> decided (plan.json) -> launched -> recorded -> reported

    run_job       a new run                     resume_job      a run that was stopped
      decide        what is found here, and what is decided from it
      prepare       all that can fail before a rank starts, and the data: a `Decided`
      _train_in     in the run's own, locked directory:
        _write_decisions     everything that ranks will read
        _run_ranks           the launcher starts them, and judges how they ended (launch/)
        conclude             result.json (conclude.py), then the report (report/)

A sweep enters in the middle: it prepares once per cell, then calls `run_decided` for every run.
"""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.folder import CheckpointFolder
from paceline.config.load import dump_config
from paceline.config.typed_only import iter_typed_only
from paceline.errors import ClusterError, ConfigError, DataError, DiskError, Outcome, PacelineError
from paceline.health import judge, read_evidence
from paceline.job import Job
from paceline.launch import find_launcher
from paceline.launch.archive import (
    archive_left_over,
    begin_attempt,
    find_halt,
    put_back_decisions,
)
from paceline.launch.base import RUN_DIR, Launcher, LaunchOrder, Task
from paceline.launch.ending import Ending, LaunchEnd, judge_end
from paceline.launch.follow import Follower
from paceline.launch.member import MemberLauncher
from paceline.launch.rendezvous import Rendezvous
from paceline.launch.signals import SignalLog, logged_signals
from paceline.machine.facts import probe
from paceline.machine.process import STOP_SIGNALS, signal_handlers
from paceline.machine.topology import Topology
from paceline.plan.batch import count_steps
from paceline.plan.planner import make_plan, wanted_workers
from paceline.records import Crew, Env, LaunchPlan, Plan, Result
from paceline.records.disk import release, reserve, save_last
from paceline.records.drills import Drill
from paceline.records.files import sweep_torn, write_atomic
from paceline.records.findings import Findings
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.report import write_report
from paceline.run.conclude import Circumstances, conclude
from paceline.run.fit import fit_batches, is_open
from paceline.run.rank import TRAIN, train_rank
from paceline.run.resume import Resumption, explain_schedule, require_steps_ahead
from paceline.run.watching import Watcher
from paceline.track.flow import Trackers
from paceline.train.feed import prepare_data
from paceline.trust import remember
from paceline.workloads.job_file import code_fingerprint

NEWLINE = "\n"
RESULT_BYTES, RANK_BYTES = 64 << 10, 1 << 10  # of room that is reserved for result.json
REFUSALS: dict[str, type[PacelineError]] = {
    "config": ConfigError,
    "cluster": ClusterError,
    "data": DataError,
}


# With other workspaces cuBLAS may sum in another order from call to call; torch refuses it then.
CUBLAS_REPEATS = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", "train.deterministic")}


class Talk(Protocol):
    """What the user sees while a run goes on (cli/talk.py)."""

    def say(self, text: str) -> None: ...

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        """Say that ranks are starting; return what to call with each new row of training.csv."""
        ...

    def trained(self) -> None: ...


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
    drill: Drill | None = None  # a fault that ranks plant in themselves


def run_job(job: Job, out: Path | None, talk: Talk, rendezvous: Rendezvous | None = None) -> Result:
    """Train `job` in a new run directory and write its result and report. `rendezvous` connects to
    the other ranks if a launcher has started this process as rank 0 of several."""
    RunDir.require_place(out)
    env, plan = decide(job, rendezvous.topology if rendezvous else None)
    return run_decided(prepare(job, env, plan, talk, rendezvous), out, talk)


def run_decided(decided: Decided, out: Path | None, talk: Talk) -> Result:
    """Train a job whose plan is made and whose data is prepared."""
    run = RunDir.create(decided.job.config.name, out)
    with run.lock():
        run.require_fresh()
        return _train_in(run, decided, talk)


def resume_job(resumption: Resumption, talk: Talk, rendezvous: Rendezvous | None = None) -> Result:
    """Resume a run in its own directory, from its newest checkpoint that can be trusted."""
    run, topology = resumption.run, rendezvous.topology if rendezvous else None
    with run.lock(talk.say):
        if (result := _finished(resumption)) is not None:
            taken = f"all {result.steps} steps are taken already"
            talk.say(f"{result.why_early or taken}: nothing to do")
            return result
        for change in resumption.changes:
            talk.say(f"changed: {change}")
        folder = CheckpointFolder.of_run(run, resumption.job.config.checkpoint)
        folder.require_writable()
        steps = folder.steps()
        talk.say(f"newest checkpoint: step {steps[0]}" if steps else "no checkpoint yet")
        if told := explain_schedule(resumption, steps[0] if steps else 0):
            talk.say(told)
        env, plan = decide(resumption.job, topology)
        if plan.batch.global_size != resumption.global_size:
            resumption = resumption.with_same_batch()
            env, plan = decide(resumption.job, topology)
        decided = prepare(resumption.job, env, plan, talk, rendezvous)
        require_steps_ahead(decided.plan.steps, steps)
        return _train_in(run, decided, talk, resumption)


def decide(job: Job, topology: Topology | None = None) -> tuple[Env, Plan]:
    """Find what is here and decide: what `paceline plan` shows and `paceline train` begins with."""
    env = probe()
    return env, make_plan(job, env, topology)


def prepare(
    job: Job, env: Env, plan: Plan, talk: Talk, rendezvous: Rendezvous | None = None
) -> Decided:
    """Prepare the data, after everything else that can fail before a rank starts."""
    started_at = wall_time()
    require_feasible(plan)
    launcher = choose_launcher(plan.crew, rendezvous, job.config.launch.start_s)
    launcher.require_ready(order_for(job, env, plan))
    for finding in plan.findings:
        talk.say(f"{finding.severity}: {finding}")
    prepared = prepare_data(job, talk.say)
    if is_open(job):
        job = fit_batches(job, env, prepared, talk.say)
        job.workload.prepared = prepared
        plan = make_plan(job, env, rendezvous.topology if rendezvous else None)
        require_feasible(plan)
    if not plan.steps:
        job.workload.prepared = prepared
        plan = count_steps(job, plan)
    # Now, not later: the user may edit the file while the run goes on.
    code = code_fingerprint(job.config.workload)
    return Decided(job, env, plan, launcher, prepared, code, started_at)


def require_feasible(plan: Plan) -> None:
    """Raise all problems of a plan at once, as the kind of refusal the first one is."""
    problems = plan.problems()
    if problems:
        raise REFUSALS[problems[0].cause]([str(problem) for problem in problems])


def choose_launcher(crew: Crew, rendezvous: Rendezvous | None, start_s: float) -> Launcher:
    """Return the launcher that starts the ranks; if one has started them already, wait until all
    are there."""
    if rendezvous is None:
        return find_launcher(crew.launcher.value)
    return MemberLauncher(rendezvous, rendezvous.wait_for_all(start_s))


def _train_in(
    run: RunDir, decided: Decided, talk: Talk, resumption: Resumption | None = None
) -> Result:
    """Write the decisions, run the ranks, conclude, report. The run directory is locked."""
    job, env, plan = decided.job, decided.env, decided.plan
    # A signal is logged from here on, and answered when the record is whole.
    with logged_signals() as signals, run.needed(), reserved(run.result, plan.world_size):
        with run.needed():
            launch = _write_decisions(run, decided, talk, resumption)
            with Trackers(run, job.config.observe.trackers, talk.say) as trackers:
                ending = _run_ranks(run, decided, launch, talk, signals)
                trackers.outcome = ending.outcome
        CheckpointFolder.of_run(run, job.config.checkpoint).sweep()
        known = Circumstances(
            ending=ending,
            config_fingerprint=job.fingerprint,
            code_fingerprint=decided.code,
            data_facts={k: v for k, v in decided.prepared.items() if isinstance(v, int | float)},
            started_at=decided.started_at,
            ended_at=wall_time(),
            notes=trackers.notes,
        )
        result = conclude(run, plan, env, known)
        record(run, result, talk.say)
        if resumption is not None:
            put_back_decisions(run)
    return result


@contextmanager
def reserved(path: Path, num_ranks: int) -> Iterator[None]:
    """Reserve disk space for a run's record, so that it can be written even if the disk fills
    up."""
    reserve(path, RESULT_BYTES + num_ranks * RANK_BYTES)
    try:
        yield
    finally:
        release(path)


def record(run: RunDir, result: Result, say: Callable[[str], None]) -> None:
    """Write result.json, findings.json and the report. If that fails, say so; the outcome
    stands."""
    if not run.lost.keep(run.result, result.to_json(), save_last):
        say(f"warning: {run.result} cannot be written: {run.lost.by_file[run.result].error}")
    found = Findings.of(judge(read_evidence(run)))
    run.lost.keep(run.findings, found.to_json())
    try:
        write_report(run)
    except (OSError, PacelineError) as error:
        what = error if isinstance(error, PacelineError) else DiskError.of(error)
        say(
            f"warning: the report was not written: {what.problems[0].partition(NEWLINE)[0]}\n"
            f"hint: once that is mended: paceline report {run.root}"
        )


def _write_decisions(
    run: RunDir, decided: Decided, talk: Talk, resumption: Resumption | None
) -> LaunchPlan:
    """Put everything on disk that ranks will read; attempt.json comes last."""
    job, env, plan = decided.job, decided.env, decided.plan
    launch = decided.launcher.plan(order_for(job, env, plan, str(run.root)))
    for finding in launch.findings:
        talk.say(f"{finding.severity}: {finding}")
    folder = CheckpointFolder.of_run(run, job.config.checkpoint)
    folder.require_writable()
    if resumption is None:
        folder.require_unused()
    folder.sweep()
    for place in (run.root, *run.ranks.glob("rank*")):
        sweep_torn(place)
    archive_left_over(run)
    asked = " ".join(repr(word) for word in job.asked)
    write_atomic(run.config, f"# asked: {asked}\n{dump_config(job.config)}")
    if any(iter_typed_only(job.config.model_dump(mode="json"))):
        remember([run.config])  # typed once, and not refused when this file is read back
    env.save(run.env)
    plan.save(run.plan)
    launch.save(run.launch)
    write_atomic(run.data, json.dumps(decided.prepared, indent=2) + "\n")
    if decided.drill is not None:
        decided.drill.save(run.drill)
    begin_attempt(
        run,
        resume=resumption is not None,
        halt_seen=find_halt(run, talk.say),
        allow_change=resumption is not None and resumption.allow_change,
    )
    return launch


def _run_ranks(
    run: RunDir, decided: Decided, launch: LaunchPlan, talk: Talk, signals: SignalLog
) -> Ending:
    """Run all attempts, while a thread follows their files for the user."""
    plan = decided.plan
    follower = Follower(run, plan.world_size, talk.training(run, plan), talk.say)
    watcher = Watcher(run, plan, decided.job.config.observe.rules, talk.say)
    follower.start()
    watcher.start()
    try:
        if signals.first is not None:  # from here on the launcher has a log of its own
            return judge_end(run, plan.world_size, LaunchEnd(signal=signals.first))
        return decided.launcher.run(launch, run, _task(decided.job))
    finally:
        watcher.stop()
        follower.stop()
        talk.trained()


def _task(job: Job) -> Task:
    """Return what ranks do; a class that is in no file is sent along."""
    return replace(TRAIN, work=partial(train_rank, packed=job.packed)) if job.packed else TRAIN


def order_for(job: Job, env: Env, plan: Plan, run_dir: str = RUN_DIR) -> LaunchOrder:
    """Return what a launcher is asked to start for a training run."""
    return LaunchOrder(
        settings=job.config.launch,
        crew=plan.crew,
        env=env,
        threads=plan.threads.value,
        task=TRAIN,
        workload=job.config.workload,
        run_dir=run_dir,
        workers=wanted_workers(plan),
        variables=CUBLAS_REPEATS if plan.deterministic and plan.on_gpu else {},
    )


def run_short_task(launcher: Launcher, launch: LaunchPlan, run: RunDir, task: Task) -> Ending:
    """Run a task that trains nothing, and so has no attempts, checkpoints or result. While ranks
    live the launcher has its own handlers; before and after, an impatient signal must not cost the
    record. A signal to the launcher is raised as KeyboardInterrupt."""
    launch.save(run.launch)
    with run.lock(), run.needed(), signal_handlers(signal.SIG_IGN, STOP_SIGNALS):
        ending = launcher.run(launch, run, task)
    if ending.seen.signal is not None:
        raise KeyboardInterrupt
    return ending


def _finished(resumption: Resumption) -> Result | None:
    """Return the result of a run that has taken all its steps, or has ended early and would do so
    again."""
    run, changed = resumption.run, {change.key for change in resumption.changes}
    if not run.result.is_file():
        return None
    result, wanted = Result.load(run.result), resumption.job.config.train.num_steps
    if wanted is None and "train.epochs" not in changed:
        wanted = Plan.load(run.plan).steps
    has_all = wanted is not None and result.steps >= wanted
    is_early = bool(result.why_early) and not changed & {"train.stop_after", "train.best"}
    return result if result.outcome is Outcome.OK and (has_all or is_early) else None
