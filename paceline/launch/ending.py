"""Judges how an attempt ended, in one place, from what the launcher saw and the files that ranks
left. Everything else reads the `Ending`.

    a rank raises       train/verdict.py   error -> outcome and hint, in its verdict.json
    a process ends      supervisor.py      exit code, signal, missed deadline -> end.json
    judge_end           this file          all of them -> one outcome, and the rank to blame
    another attempt?    attempts.py        by the outcome's own facts (errors.py)
    the run's record    run/conclude.py    result.json
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.errors import DataError, Outcome
from paceline.launch.deadlines import explain_missed, missed_deadline
from paceline.records import Failure, LaunchPlan, RankEnd, RankVerdict
from paceline.records.heartbeats import last_beat
from paceline.records.rundir import RunDir
from paceline.train.heartbeat import read_action, read_mark

NEWLINE = "\n"
MEMORY_HINT = (
    "; telemetry.csv shows how it grew\n"
    "hint: set a smaller train.micro_batch_size and a larger train.grad_accum, or fewer"
    " data.num_workers"
)
SIGNAL_HINTS = {
    "SIGKILL": "\nhint: the kernel does that when memory runs out; see telemetry.csv",
    "SIGILL": "\nhint: if this was bf16 on a CPU, its AMX may not be usable: set"
    " ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or precision.mode=fp32",
}
ECHO_KINDS = ("DistNetworkError", "DistBackendError")
ECHOES = ("connection reset", "connection closed", "broken pipe", "remote worker crash")

Verdicts = dict[int, RankVerdict]


@dataclass(frozen=True)
class LaunchEnd:
    """What the launcher saw. Whether the run went well is for the ranks' verdicts to say."""

    ends: dict[int, RankEnd] = field(default_factory=dict)
    signal: int | None = None
    refusal: str = ""  # why a command could not start the ranks
    stall: str = ""  # the deadline by which it should have
    told: Verdicts = field(default_factory=dict)  # by ranks, which may have no file of it

    @property
    def exit_codes(self) -> dict[int, int]:
        return {rank: end.exit_code for rank, end in self.ends.items()}


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `kind` is the class of the error in the verdict of the rank to blame;
    empty where that verdict has none."""

    outcome: Outcome
    failure: Failure | None
    kind: str
    seen: LaunchEnd
    verdicts: Verdicts
    num_ranks: int


def judge_end(run: RunDir, num_ranks: int, seen: LaunchEnd) -> Ending:
    """Decide the outcome of an attempt, and which rank is to blame if it failed."""
    verdicts = seen.told | load_verdicts(run, num_ranks)
    outcome = _outcome(verdicts, num_ranks, seen)
    if outcome is Outcome.OK or outcome.is_stop:
        return Ending(outcome, None, "", seen, verdicts, num_ranks)
    failure = _failure(run, verdicts, num_ranks, seen)
    verdict = verdicts.get(failure.rank) if failure else None
    kind = verdict.error.kind if verdict and verdict.error else ""
    return Ending(outcome, failure, kind, seen, verdicts, num_ranks)


def load_verdicts(run: RunDir, num_ranks: int) -> Verdicts:
    """Return the verdicts that there are; a rank that was killed has left none."""
    paths = {rank: run.verdict(rank) for rank in range(num_ranks)}
    return {rank: RankVerdict.load(path) for rank, path in paths.items() if path.is_file()}


def completed_steps(run: RunDir, num_ranks: int, verdicts: Verdicts, recorded: int) -> int:
    """Return the optimizer steps that every rank finished: the table, whose last row is `recorded`,
    may lag behind a run that was cut off, or one whose disk was full."""
    if verdicts and all(verdict.outcome.is_orderly for verdict in verdicts.values()):
        return max(recorded, min(verdict.step for verdict in verdicts.values()))
    begun = [read_mark(run.step_mark(rank)) for rank in range(num_ranks)]
    return max(recorded, min(begun) - 1)


def stop_notes(ending: Ending) -> list[str]:
    """Return what went wrong while a signal stopped the run."""
    if ending.seen.signal is None or not ending.seen.ends:
        return []
    notes = [
        f"rank {v.rank} failed while the run was stopping: {v.error.message.partition(NEWLINE)[0]}"
        for v in ending.verdicts.values()
        if v.error is not None and not _is_echo(v)
    ]
    killed = [str(rank) for rank in _without_verdict(ending.verdicts, ending.num_ranks)]
    if killed:
        who = f"rank {killed[0]} was" if len(killed) == 1 else f"ranks {', '.join(killed)} were"
        notes.append(
            f"{who} killed before a checkpoint was written: what came after the last one is lost"
        )
    return notes


def untold_cause(run: RunDir, seen: LaunchEnd) -> tuple[int | None, str] | None:
    """Return a cause that no verdict names, with the rank to look at: the launcher refused to start
    (then no rank is), or a deadline passed."""
    if seen.refusal:
        return None, seen.refusal
    if deadline := missed_deadline(seen.ends):
        return explain_missed(run, seen.ends, deadline)
    return None


def _outcome(verdicts: Verdicts, num_ranks: int, seen: LaunchEnd) -> Outcome:
    """Apply the precedence: what all ranks say together; an outcome that a stop does not excuse; a
    stop; what the launcher saw; what the rank that failed first says."""
    agreed = _agreed(verdicts, num_ranks)
    if agreed is not None:
        # A launcher may pass Ctrl-C on as another signal; who was asked first knows better.
        is_interrupt = agreed.is_stop and seen.signal == signal.SIGINT
        return Outcome.INTERRUPTED if is_interrupt else agreed
    if beating := [v.outcome for v in verdicts.values() if v.outcome.beats_stop]:
        return beating[0]
    if seen.signal is not None:
        return Outcome.of_signal(seen.signal)
    if seen.stall or missed_deadline(seen.ends):
        return Outcome.STALL
    if seen.refusal:
        return Outcome.REFUSED_CLUSTER
    cause = _root_cause(verdicts, num_ranks, seen)
    if cause in verdicts:
        return verdicts[cause].outcome
    is_memory = cause in seen.ends and seen.ends[cause].ran_out_of_memory
    return Outcome.OUT_OF_RESOURCES if is_memory else Outcome.CRASHED


def _agreed(verdicts: Verdicts, num_ranks: int) -> Outcome | None:
    """Return the outcome on which all ranks agree without an error; None if they do not."""
    if len(verdicts) < num_ranks or any(v.error is not None for v in verdicts.values()):
        return None
    return verdicts[0].outcome


def _without_verdict(verdicts: Iterable[int], num_ranks: int) -> list[int]:
    return [rank for rank in range(num_ranks) if rank not in set(verdicts)]


def _root_cause(verdicts: Verdicts, num_ranks: int, seen: LaunchEnd) -> int:
    """Return the rank that failed first: of those whose error is their own the earliest; else one
    that was killed and so left no verdict, and that its own supervisor had not asked to end; else
    the earliest of those whose error only says that another rank went away."""
    killed = _without_verdict(verdicts, num_ranks)
    unasked = [rank for rank in killed if not (rank in seen.ends and seen.ends[rank].asked_to_end)]
    errors = [verdict for verdict in verdicts.values() if verdict.error is not None]
    own = [v for v in errors if not _is_echo(v)]
    if own:
        return min(own, key=lambda verdict: verdict.ended_at).rank
    if unasked:
        return unasked[0]
    if errors:
        return min(errors, key=lambda verdict: verdict.ended_at).rank
    return killed[0] if killed else 0


def _is_echo(verdict: RankVerdict) -> bool:
    """True for an error that only says that another rank went away."""
    assert verdict.error is not None
    if verdict.error.kind in ECHO_KINDS:
        return True
    text = verdict.error.message.lower()
    return verdict.error.kind == "RuntimeError" and any(echo in text for echo in ECHOES)


def _failure(run: RunDir, verdicts: Verdicts, num_ranks: int, seen: LaunchEnd) -> Failure | None:
    if _agreed(verdicts, num_ranks) is not None:
        return None  # nan is no rank's failure
    untold = untold_cause(run, seen)
    if untold is None:
        found = _root_cause(verdicts, num_ranks, seen)
        message = _message(verdicts.get(found), seen.ends.get(found))
        return _failure_of(run, verdicts, found, _with_action(run, found, "died", message))
    rank, message = untold
    if rank is not None:
        return _failure_of(run, verdicts, rank, _with_action(run, rank, "stalled", message))
    return Failure(
        rank=0,
        host=_host(run, 0),
        step=0,
        phase="start",
        message=message,
        log=run.launcher_log.name,
    )


def _failure_of(run: RunDir, verdicts: Verdicts, cause: int, message: str) -> Failure:
    verdict, beat = verdicts.get(cause), last_beat(run.heartbeat(cause))
    others = [
        f"rank {v.rank}: {v.error.kind}: {v.error.message.partition(NEWLINE)[0]}"
        for v in verdicts.values()
        if v.error is not None and v.rank != cause
    ]
    return Failure(
        rank=cause,
        host=verdict.host if verdict else _host(run, cause),
        step=verdict.step if verdict else read_mark(run.step_mark(cause)),
        phase=beat.phase,
        message=message,
        log=str(run.rank_log(cause).relative_to(run.root)),
        others=others,
    )


def _with_action(run: RunDir, rank: int, how: str, message: str) -> str:
    """Say first, in a pipeline, at which stage and microbatch the rank was."""
    place = read_action(run.action_mark(rank))
    return f"rank {rank} {how} in {place}: {message}" if place else message


def said_by(verdict: RankVerdict) -> str:
    """Return the error of a rank, with the user's line that led to it; "" where it has none."""
    if (error := verdict.error) is None:
        return ""
    # A refusal of ours is a sentence for people; its class says nothing more.
    said = error.message if verdict.outcome.is_refusal else f"{error.kind}: {error.message}"
    return f"{said} ({error.place})" if error.place else said


def _message(verdict: RankVerdict | None, end: RankEnd | None) -> str:
    if verdict is not None and (said := said_by(verdict)):
        return said
    if end is None:
        return "vanished without a word: its supervisor was killed, or its machine is gone"
    if end.ran_out_of_memory:
        return f"killed by the kernel: the machine ran out of memory{MEMORY_HINT}"
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"killed by {name}{SIGNAL_HINTS.get(name, '')}"
    return f"left early with exit code {end.exit_code}"


def _host(run: RunDir, rank: int) -> str:
    try:
        return LaunchPlan.load(run.launch).ranks[rank].host
    except (DataError, IndexError):  # its directory may be gone, or the file of another run
        return "a host that launch.json would name"
