"""One run from config to report: read this file first, then one folder per stage, in this order.

asked (run.yaml) -> found (env.json) -> decided (plan.json) -> launched -> recorded -> reported
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.cluster.facts import probe
from paceline.conclude import Circumstances, conclude
from paceline.config.load import dump_config
from paceline.errors import ClusterError, ConfigError, DataError, PacelineError
from paceline.files import write_atomic
from paceline.job import Job
from paceline.launch import find_launcher
from paceline.launch.base import LaunchEnd
from paceline.launch.follow import Follower
from paceline.plan.planner import make_plan
from paceline.records import Env, LaunchPlan, Plan, Result
from paceline.report import write_report
from paceline.rundir import RunDir
from paceline.workloads.base import code_fingerprint

REFUSALS: dict[str, type[PacelineError]] = {
    "config": ConfigError,
    "cluster": ClusterError,
    "data": DataError,
}


class Talk(Protocol):
    """What the user sees while a run goes on (cli/talk.py)."""

    def say(self, text: str) -> None: ...

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        """Ranks are starting; returns what to call with each new row of training.csv."""
        ...

    def trained(self) -> None: ...


def decide(job: Job) -> tuple[Env, Plan]:
    """Found and decided: what `paceline plan` shows and `paceline train` begins with."""
    env = probe()
    return env, make_plan(job, env)


def require_feasible(plan: Plan) -> None:
    """Raise all problems of a plan at once, as the kind of refusal the first one is."""
    problems = plan.problems()
    if problems:
        raise REFUSALS[problems[0].cause]([str(problem) for problem in problems])


def run_job(job: Job, out: Path | None, talk: Talk) -> Result:
    """Train `job` in a new run directory and write its result and report."""
    started_at = time.time()
    env, plan = decide(job)
    require_feasible(plan)
    for finding in plan.findings:
        talk.say(f"{finding.severity}: {finding}")
    prepared = job.workload.prepare(job.config, talk.say)
    # Now, not later: the user may edit the file while the run goes on.
    code = code_fingerprint(job.config.workload)

    run = RunDir.create(job.config.name, out)
    with run.lock():
        run.require_fresh()
        launcher = find_launcher(job.config.launch.launcher)
        launch = launcher.plan(job, plan, env)
        _save_decisions(run, job, env, plan, launch)
        write_atomic(run.data, json.dumps(prepared, indent=2) + "\n")
        with _in_peace():
            end = _launch(run, plan, launch, launcher.run, talk)
            known = Circumstances(
                end=end,
                config_fingerprint=job.fingerprint,
                code_fingerprint=code,
                data_facts={k: v for k, v in prepared.items() if isinstance(v, int | float)},
                started_at=started_at,
                ended_at=time.time(),
            )
            result = conclude(run, plan, env, known)
            result.save(run.result)
            write_report(run)
    return result


@contextmanager
def _in_peace() -> Iterator[None]:
    """While ranks live the launcher has its own handler for Ctrl-C; once they have ended, an
    impatient second one must not cost the record of the run."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _save_decisions(run: RunDir, job: Job, env: Env, plan: Plan, launch: LaunchPlan) -> None:
    asked = " ".join(repr(word) for word in job.asked)
    write_atomic(run.config, f"# asked: {asked}\n{dump_config(job.config)}")
    env.save(run.env)
    plan.save(run.plan)
    launch.save(run.launch)


def _launch(
    run: RunDir,
    plan: Plan,
    launch: LaunchPlan,
    start: Callable[[LaunchPlan, RunDir], LaunchEnd],
    talk: Talk,
) -> LaunchEnd:
    follower = Follower(run, plan.world_size, talk.training(run, plan))
    follower.start()
    try:
        return start(launch, run)
    finally:
        follower.stop()
        talk.trained()
