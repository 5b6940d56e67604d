"""The launcher seam: a plan that can be printed and tested, and a run of it."""

from dataclasses import dataclass, field
from typing import Protocol

from paceline.job import Job
from paceline.records import Env, LaunchPlan, Plan
from paceline.rundir import RunDir


@dataclass
class LaunchEnd:
    """What the launcher saw. Whether the run went well is for the ranks' verdicts to say."""

    exit_codes: dict[int, int] = field(default_factory=dict)
    signal: int | None = None


class Launcher(Protocol):
    def plan(self, job: Job, plan: Plan, env: Env) -> LaunchPlan:
        """Which process runs where, with which environment. Touches nothing."""
        ...

    def run(self, launch: LaunchPlan, run: RunDir) -> LaunchEnd:
        """Start the ranks, wait for all of them, leave none behind."""
        ...
