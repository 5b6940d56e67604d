"""The external watchdog: regularly reads a run's files, from any machine that shares them, and
asks the run to stop when a rule is broken.

    paceline watch RUN_DIR --halt --interval 30

It may be started before the run is: it waits for the directory. What an earlier attempt left is not
judged. A silent run may be dead or frozen: unless its supervisor is known to have ended, it counts
as stalled once the rule's time is over. An old .HALT is not cleared: a run ignores one that was
there before it. Ranks that hang cannot read .HALT; their supervisor ends them at
launch.progress_s.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.config.health import RulesConfig
from paceline.errors import DataError
from paceline.health import Evidence, judge, read_evidence
from paceline.health.actions import halt
from paceline.records import Attempt
from paceline.records.columns import Row, Table
from paceline.records.events import Event, EventLog
from paceline.records.findings import RunFinding
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.watch.reader import RunReader
from paceline.watch.view import RunView

# Findings that stop a run: it is stuck, or its results are worthless. Others are only reported.
HALTING = frozenset(
    {"heartbeat_stall", "throughput_flatline", "zero_grad", "nan_loss", "gate_collapse", "desync"}
)
NEEDS_STACKS = frozenset({"heartbeat_stall", "throughput_flatline", "desync"})
# Findings about single steps: one more is reported again, as long as it is not an error.
OF_STEPS = frozenset({"nan_loss", "zero_grad", "loss_spike", "gradient_explosion"})
Say = Callable[[str], None]
Seen = tuple[str, int | None, str, str]


class Watchdog:
    """Call `tick` regularly until `is_over`; `anomaly` is the name of the rule that was broken
    first."""

    def __init__(self, run: RunDir, say: Say) -> None:
        self.run, self._say = run, say
        self.anomaly, self.is_over = "", False
        self._reader = RunReader(run)
        self._attempt = 0
        self._told: set[Seen] = set()
        self._moved: tuple[int, float] | None = None  # the furthest step, and since when

    def tick(self) -> RunView:
        """Check once; report what is new, and request a stop if necessary."""
        view = self._reader.read()
        if view.attempt != self._attempt:
            self._attempt, self._moved = view.attempt, None
            self._told.clear()
        self.is_over = view.state.is_over
        if view.state.is_over and view.state.is_sure or not view.ranks:
            return view
        evidence = self._evidence(view)
        self.is_over = view.state.is_over and _has_waited(view, evidence.rules)
        for finding in judge(evidence):
            if (seen := _seen(finding)) not in self._told:
                self._told.add(seen)
                self._note(finding)
        return view

    def _evidence(self, view: RunView) -> Evidence:
        """Return what is known now about the live attempt. Heartbeats are timed by this process's
        own clock. A silent run is judged by its silence: whether its steps still end cannot be
        seen."""
        now, step = wall_time(), min(each.step for each in view.ranks)
        if self._moved is None or step != self._moved[0]:
            self._moved = (step, time.monotonic())
        found = read_evidence(self.run, now)
        attempt = _load_attempt(self.run)
        since = attempt.started_at if attempt is not None else 0.0
        silent = {each.rank: each.silent_s for each in view.ranks if each.silent_s is not None}
        hearts = {
            rank: replace(heart, written_at=now - silent[rank])
            for rank, heart in found.hearts.items()
            if rank in silent and heart.beat.time >= since
        }
        is_unheard = view.state.is_over and found.rules.heartbeat_stall != "off"
        idle_s = None if is_unheard else time.monotonic() - self._moved[1]
        found = replace(found, hearts=hearts, idle_s=idle_s)
        return found if attempt is None else self._since(found, attempt)

    def _since(self, found: Evidence, attempt: Attempt) -> Evidence:
        """Leave out what earlier attempts wrote, so that this one is not halted for an old fault.
        Their rows after the checkpoint are cut off when ranks open their tables, so none counts
        before all ranks have begun a step."""
        since, first = attempt.started_at, max(1, attempt.first_step)
        begun = [heart.beat.step for heart in found.hearts.values()]
        is_waiting = attempt.resume and (len(begun) < found.num_ranks or min(begun) < first)

        def own(table: Table[Row]) -> Table[Row]:
            return table[:0] if is_waiting else table.since(first)

        return replace(
            found,
            training=own(found.training),
            steps={rank: own(table) for rank, table in found.steps.items()},
            telemetry={r: t.pick(t.column("time") >= since) for r, t in found.telemetry.items()},
            collectives={
                rank: body
                for rank, body in found.collectives.items()
                if _written_at(self.run.collectives(rank)) >= since
            },
        )

    def _note(self, finding: RunFinding) -> None:
        self._say(str(finding))
        stops = finding.kind in HALTING and finding.severity == "error"
        if not stops or self.anomaly:
            return
        self.anomaly = finding.kind
        if finding.kind in NEEDS_STACKS:  # before the end is asked for: the stacks say why
            self.run.dump_request.parent.mkdir(exist_ok=True)
            self.run.dump_request.touch()
        halt(self.run, finding.kind)
        done = "wrote .anomaly_type and .HALT"
        self._say(f"{done}: {finding.kind}")
        log = EventLog(self.run.events)
        log.append(
            Event(
                rank=finding.rank,
                step=finding.step,
                kind=finding.kind,
                severity=finding.severity,
                words=f"{finding.words} (watchdog: {done})",
                evidence=finding.evidence,
            )
        )
        log.close()


def _seen(finding: RunFinding) -> Seen:
    """Return the key by which a finding counts as already reported; a graver one is new."""
    is_again = finding.kind in OF_STEPS and finding.severity != "error"
    steps = f"{finding.step} {finding.evidence.get('num_steps')}" if is_again else ""
    return *finding.key, finding.severity, steps


def _has_waited(view: RunView, rules: RulesConfig) -> bool:
    """Say whether a run has been silent for as long as the rule about silence allows."""
    silent = [each.silent_s for each in view.ranks if each.silent_s is not None]
    return rules.heartbeat_stall == "off" or min(silent, default=0.0) > rules.heartbeat_stall_s


def _load_attempt(run: RunDir) -> Attempt | None:
    try:
        return Attempt.load(run.attempt)
    except DataError:
        return None


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def wait_for_run(path: Path, interval_s: float, say: Say) -> RunDir:
    """Return the run once its directory is there: the runbook starts its watchdog first."""
    if not (path / "run.yaml").is_file():
        say(f"waiting for {path} to be a run directory")
    while not (path / "run.yaml").is_file():
        time.sleep(min(interval_s, 1.0))
    return RunDir.open(path)
