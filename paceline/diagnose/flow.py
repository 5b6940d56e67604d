"""Gathers findings from a run directory: its own record, what its ranks left if nothing concluded
it, the faults, flight recorders and profiles of an imported one; then the judgement of a live
run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError, Outcome, PacelineError
from paceline.foreign.flight import find_waiting
from paceline.health import Evidence, judge, read_evidence
from paceline.records import Failure, Result
from paceline.records.events import iter_events
from paceline.records.findings import Findings, RunFinding, finite, sort_findings
from paceline.records.imported import Fault, Imported
from paceline.records.memory import MemoryDump
from paceline.records.moments import wall_time
from paceline.records.profiled import ProfileFacts
from paceline.records.rundir import RunDir
from paceline.records.words import count, duration, plain, visible
from paceline.report.profile import profile_sentences, read_memory
from paceline.traces.flow import read_profile_facts, write_profile_facts
from paceline.watch.fleet import is_run
from paceline.watch.reader import RunReader
from paceline.watch.view import RunView
from paceline.workloads.given import resuming


@dataclass(frozen=True)
class Diagnosis:
    """A run, how it is, and what was found, the gravest first."""

    run: RunDir
    view: RunView
    findings: list[RunFinding]
    notes: list[str]

    @property
    def record(self) -> Findings:
        return Findings(findings=self.findings)


def diagnose(path: Path) -> Diagnosis:
    """Judge a run from its files alone; nothing but profiles/*.facts.json is written."""
    if not is_run(path):
        raise DataError(
            f"{path} is not a run directory\n"
            "hint: paceline import FILES... makes one of the logs of another trainer"
        )
    run = RunDir(path.resolve())
    write_profile_facts(run)
    view = RunReader(run).read()
    evidence = read_evidence(run, None if view.state.is_over else wall_time())
    found = list(judge(evidence))
    profiles = read_profile_facts(run)
    more = [
        *_damaged(evidence),
        *_unconcluded(run, view, evidence),
        *find_waiting(evidence.collectives),
        *_faults(run),
        *_noticed(run),
        *_profiled(profiles, evidence),
        *_memory(read_memory(run, evidence.num_ranks)),
    ]
    known = {finding.key: finding for finding in [*reversed(more), *found]}
    found = list(known.values())
    notes = [sentence for facts in profiles for sentence in profile_sentences(facts)]
    return Diagnosis(run, view, sort_findings(found), [*_imported_notes(run), *notes])


def _damaged(evidence: Evidence) -> Iterator[RunFinding]:
    """Say which files could not be read: what was judged lacks them."""
    if not evidence.damaged:
        return
    first, _, hint = evidence.damaged[0].partition("\n")
    more = len(evidence.damaged) - 1
    yield RunFinding(
        kind="damaged",
        severity="error",
        words=f"{first}; what it says is not judged"
        + (f", nor is that of {count(more, 'more file')}" if more else ""),
        evidence=finite({"files": [each.partition("\n")[0] for each in evidence.damaged[:9]]}),
        to_try=hint.removeprefix("hint: "),
    )


def _unconcluded(run: RunDir, view: RunView, evidence: Evidence) -> Iterator[RunFinding]:
    """Say how a run died that has no result: its supervisor was killed too. Whom to blame is judged
    as a supervisor would have, from what ranks and supervisors have left."""
    if view.state.kind != "died" or evidence.plan is None:
        return
    from paceline.launch.ending import LaunchEnd, judge_end  # torch, which a dead run alone needs
    from paceline.launch.member import load_ends

    failure: Failure | None = None
    try:
        ranks = evidence.plan.world_size
        failure = judge_end(run, ranks, LaunchEnd(load_ends(run, ranks))).failure
    except PacelineError:
        failure = None
    last = max((each.step for each in view.ranks), default=0)
    behind = min(view.ranks, key=lambda each: (each.step, -(each.silent_s or 0.0)), default=None)
    where = f"; rank {behind.rank} was in {behind.phase} of step {behind.step}" if behind else ""
    blamed = ""
    if failure is not None:
        blamed = f"; rank {failure.rank} on {failure.host}: {failure.message.partition(chr(10))[0]}"
    yield RunFinding(
        kind="died",
        rank=failure.rank if failure is not None else None,
        step=last,
        severity="error",
        words=f"the run ended without a result after step {view.step}: its supervisor was killed,"
        f" or its machine went down{blamed or where}",
        evidence=finite({"last_step": last, "silent_s": behind.silent_s if behind else None}),
        to_try=f"{resuming(evidence.path, evidence.plan.workload)} goes on from its last"
        " checkpoint; dmesg and the scheduler know who killed it",
    )


def _faults(run: RunDir) -> Iterator[RunFinding]:
    """Yield what an imported log says went wrong: the root first, echoes only where all are."""
    if not run.imported.is_file():
        return
    faults = Imported.load(run.imported).faults
    real = [fault for fault in faults if not fault.is_echo] or faults
    roots = [fault for fault in real if fault.is_root]
    told: set[tuple[str, int | None]] = set()
    for fault in [*_with_words(roots, real), *(f for f in real if not f.is_root)]:
        key = (fault.kind, fault.rank)
        if key not in told:
            told.add(key)
            yield _fault_finding(fault)


def _with_words(roots: list[Fault], real: list[Fault]) -> Iterator[Fault]:
    """Give a root, of which a launcher knows only the exit code, the words of the same rank's own
    error."""
    for root in roots:
        own = [f for f in real if not f.is_root and f.rank == root.rank]
        update = {"kind": own[0].kind, "words": own[0].words, "step": own[0].step} if own else {}
        yield root.model_copy(update=update)


def _noticed(run: RunDir) -> Iterator[RunFinding]:
    """Yield the errors that were noticed while it ran, the first of each kind and rank: a rank that
    stood still for a while leaves no other trace."""
    for event in iter_events(run.events):
        if event.severity == "error":
            at = {"time": event.time}
            yield RunFinding(
                kind=event.kind,
                rank=event.rank,
                step=event.step,
                severity="warning" if _ended_well(run) else "error",
                words=f"while it ran: {event.words}",
                evidence=finite({**event.evidence, **at}),
            )


def _ended_well(run: RunDir) -> bool:
    try:
        return Result.load(run.result).outcome is Outcome.OK
    except DataError:
        return False


def _fault_finding(fault: Fault) -> RunFinding:
    who = f"rank {fault.rank}" if fault.rank is not None else "a rank"
    where = f" on {fault.host}" if fault.host else ""
    at = f" about step {fault.step}" if fault.step else ""
    hints = {
        "out_of_memory": "a smaller batch on each rank, activation checkpointing, or sharding",
        "hang": "the ranks that are not named here did not come: look at theirs, or import the"
        " flight recorder's dumps",
        "killed": "the kernel does that when memory runs out (dmesg), a scheduler when time is up",
    }
    return RunFinding(
        kind=fault.kind,
        rank=fault.rank,
        step=fault.step,
        severity="error",
        words=visible(f"{who}{where}{at}: {fault.words}"),
        evidence=finite({"file": fault.file, "root": fault.is_root}),
        to_try=hints.get(fault.kind, f"read {fault.file}" if fault.file else ""),
    )


def _profiled(profiles: list[ProfileFacts], evidence: Evidence) -> Iterator[RunFinding]:
    """Judge profiles by the limits for steps: communication that nothing hides, late launches."""
    for facts in profiles:
        window = facts.window_s or 1.0
        exposed, late = facts.exposed_s / window, facts.launch_gaps_s / window
        if exposed > evidence.rules.exchange_share:
            yield RunFinding(
                kind="exchange_bound",
                rank=facts.rank,
                step=facts.first_step,
                words=f"{exposed:.0%} of the profiled time of rank {facts.rank} is communication"
                f" that nothing hides ({duration(facts.exposed_s / facts.num_steps)} a step)",
                evidence=finite({"exposed": exposed, "trace": facts.trace}),
                to_try="larger batches on each rank, strategy.comm_hook=bf16, or more overlap",
            )
        if late > evidence.rules.host_share:
            yield RunFinding(
                kind="host_bound",
                rank=facts.rank,
                step=facts.first_step,
                words=f"the GPU of rank {facts.rank} waited for its host for {late:.0%} of the"
                f" profiled time, in {facts.num_launch_gaps} launch gaps",
                evidence=finite({"late": late, "trace": facts.trace}),
                to_try="train.compile=default, or larger batches on each rank",
            )


def _memory(dumps: list[MemoryDump]) -> Iterator[RunFinding]:
    for dump in dumps:
        if dump.moment == "oom":
            yield RunFinding(
                kind="memory_owners",
                rank=dump.rank,
                step=dump.step,
                severity="note",
                words=f"when memory ran out, rank {dump.rank} had {dump.sentence()}",
                evidence=finite({"by_kind": dump.by_kind, "inside": dump.inside}),
                to_try=f"mem_oom.txt of rank {dump.rank} has the ten largest owners",
            )


def _imported_notes(run: RunDir) -> list[str]:
    if not run.imported.is_file():
        return []
    imported = Imported.load(run.imported)
    read = [f"{plain(file.path)}: {file.kind}, {file.said}" for file in imported.files]
    return [f"imported from {imported.trainer}", *imported.notes, *read[:8]]
