"""`paceline drill` from a fault to its answer: train with the fault planted, judge, compare.

    paceline drill lm_tiny --fault slow_forward launch.nproc=2

The run is one like any other; the only thing that knows of the fault is the rank that has it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, Outcome
from paceline.health import judge, read_evidence
from paceline.job import Job, load_job
from paceline.launch.rendezvous import Rendezvous
from paceline.records import Result
from paceline.records.drills import Drill, Fault
from paceline.records.events import iter_events
from paceline.records.findings import RunFinding
from paceline.records.rundir import RunDir
from paceline.records.words import did_you_mean
from paceline.run.flow import Talk, decide, prepare, run_decided

# What a drill needs unless the user says otherwise: enough steps, and an end where it hangs.
DEFAULTS = {"train.steps": "60", "launch.progress_s": "20", "launch.max_restarts": "0"}


class DrillEnd:
    """What came of a drill: the run, all that was found, and the finding that names the fault."""

    def __init__(
        self, drill: Drill, result: Result, found: Sequence[RunFinding], knows_losses: bool = True
    ) -> None:
        self.drill, self.result, self.found = drill, result, list(found)
        named = (f for f in self.found if names_fault(drill, f, knows_losses))
        self.named = next(named, None)

    @property
    def outcome(self) -> Outcome:
        return Outcome.OK if self.named is not None else Outcome.CHECK_FAILED

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints of it."""
        return {
            "drill": self.drill.model_dump(mode="json"),
            "named": self.named is not None,
            "findings": [finding.model_dump(mode="json") for finding in self.found],
            "run_dir": self.result.run_dir,
            "outcome": str(self.result.outcome),
        }


def names_fault(drill: Drill, finding: RunFinding, knows_losses: bool = True) -> bool:
    """Tell whether a finding is the right one: its kind, the rank where one has it, and the part of
    the step where it is about one. `knows_losses`: the run can say whose loss was bad. A pipeline
    cannot, nor one that left the update out and went on (train.max_skips)."""
    fault = drill.fault
    if finding.kind not in fault.found_as:
        return False
    if fault.phase is not None and not fault.is_everywhere:
        return finding.rank == drill.rank and finding.evidence.get("part") == fault.phase
    is_about_all = fault.is_everywhere or fault is Fault.FULL_DISK
    if fault is Fault.NAN and not knows_losses:
        return finding.rank is None
    return is_about_all or finding.rank == drill.rank


def which_faults(names: Sequence[str]) -> list[Fault]:
    """Return the faults that were asked for; all of them where none was."""
    known = [str(fault) for fault in Fault]
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(
            [
                f"there is no fault {name!r}\n"
                f"hint: {did_you_mean(name, known)}one of {', '.join(known)}"
                for name in wrong
            ]
        )
    return [Fault(name) for name in names] or list(Fault)


def load_drilled(source: str, overrides: Sequence[str]) -> Job:
    """Load the job, with what a drill needs where the user has not set it."""
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    more = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    if {"train.epochs"} & given:
        more = [word for word in more if not word.startswith("train.steps")]
    return load_job(source, [*more, *overrides])


def run_drill(
    job: Job, drill: Drill, out: Path | None, talk: Talk, rendezvous: Rendezvous | None = None
) -> DrillEnd:
    """Train a job with a fault planted, and say whether it was named."""
    RunDir.require_place(out)
    env, plan = decide(job, rendezvous.topology if rendezvous else None)
    require_possible(drill, plan.world_size, plan.steps)
    decided = replace(prepare(job, env, plan, talk, rendezvous), drill=drill)
    result = run_decided(decided, out, talk)
    run = RunDir(Path(result.run_dir))
    stands = judge(read_evidence(run))
    found = [*stands, *noticed(run, stands)]
    knows_losses = plan.pipeline is None and result.outcome is Outcome.NAN
    return DrillEnd(drill, result, found, knows_losses)


def noticed(run: RunDir, stands: Sequence[RunFinding]) -> list[RunFinding]:
    """Return what was noticed while it ran and does not stand at its end any more."""
    known = {finding.key: finding for finding in stands}
    for event in iter_events(run.events):
        told = event.model_dump(exclude={"time"})
        known.setdefault((event.kind, event.rank), RunFinding.model_validate(told))
    return [finding for finding in known.values() if finding not in stands]


def place_of(out: Path | None, drill: Drill, num_drills: int) -> Path | None:
    """Return where a drill runs: of several each has a folder of its own."""
    return out / drill.fault if out is not None and num_drills > 1 else out


def require_all(job: Job, drills: Sequence[Drill]) -> None:
    """Refuse a list of drills before the first of them has run."""
    _, plan = decide(job)
    found = [text for drill in drills for text in problems_of(drill, plan.world_size, plan.steps)]
    if found:
        raise ConfigError(list(dict.fromkeys(found)))


def require_possible(drill: Drill, world_size: int, num_steps: int) -> None:
    """Refuse a drill in which nothing would happen."""
    if problems := problems_of(drill, world_size, num_steps):
        raise ConfigError(problems)


def problems_of(drill: Drill, world_size: int, num_steps: int) -> list[str]:
    problems = []
    if drill.rank >= world_size:
        problems.append(
            f"the fault is for rank {drill.rank}, and there are {world_size}\n"
            "hint: launch.nproc=2, or --rank 0"
        )
    if world_size == 1 and (drill.fault.found_as[0] in ("straggler", "desync")):
        problems.append(
            f"{drill.fault} is about ranks that differ, and there is one\nhint: launch.nproc=2"
        )
    if num_steps and num_steps < drill.step + 20:
        problems.append(
            f"the fault begins at step {drill.step} of {num_steps}: too late to be seen\n"
            f"hint: train.steps={drill.step + 30}, or an earlier --step"
        )
    return problems
