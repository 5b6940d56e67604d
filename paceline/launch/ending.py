"""From the files that ranks left to how an attempt ended: one outcome, and the rank to blame."""

import json
import signal
from dataclasses import dataclass

from paceline.errors import Outcome
from paceline.launch.base import LaunchEnd
from paceline.launch.blame import explain_stall, missed_deadline
from paceline.launch.deadlines import last_beat
from paceline.records import Failure, RankEnd, RankVerdict
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
REFUSALS = (Outcome.REFUSED_CONFIG, Outcome.REFUSED_CLUSTER, Outcome.REFUSED_DATA)
STOPS = (Outcome.PREEMPTED, Outcome.INTERRUPTED)

Verdicts = dict[int, RankVerdict]


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `kind` is the class of the error that the rank to blame has told;
    empty where it told none."""

    outcome: Outcome
    failure: Failure | None
    kind: str = ""


def judge_end(run: RunDir, num_ranks: int, end: LaunchEnd) -> Ending:
    verdicts = load_verdicts(run, num_ranks)
    outcome = _outcome(verdicts, num_ranks, end)
    if outcome in (Outcome.OK, *STOPS):
        return Ending(outcome, None)
    failure = _failure(run, verdicts, num_ranks, end)
    verdict = verdicts.get(failure.rank) if failure else None
    return Ending(outcome, failure, verdict.error.kind if verdict and verdict.error else "")


def load_verdicts(run: RunDir, num_ranks: int) -> Verdicts:
    """The verdicts there are; a rank that was killed has none."""
    paths = {rank: run.verdict(rank) for rank in range(num_ranks)}
    return {rank: RankVerdict.load(path) for rank, path in paths.items() if path.is_file()}


def completed_steps(run: RunDir, num_ranks: int, recorded: int) -> int:
    """Optimizer steps that every rank finished: the table, whose last row is `recorded`, may lag
    behind a run that was cut off."""
    verdicts = load_verdicts(run, num_ranks).values()
    if verdicts and all(v.outcome in (Outcome.OK, Outcome.NAN, *STOPS) for v in verdicts):
        return recorded
    begun = [read_mark(run.step_mark(rank)) for rank in range(num_ranks)]
    return max(recorded, min(begun) - 1)


def stop_notes(run: RunDir, num_ranks: int, end: LaunchEnd) -> list[str]:
    """What did not go in order when a signal stopped the run."""
    if end.signal is None or not end.ends:
        return []
    verdicts = load_verdicts(run, num_ranks)
    notes = [
        f"rank {v.rank} failed while the run was stopping: {v.error.message.partition(NEWLINE)[0]}"
        for v in verdicts.values()
        if v.error is not None and not _is_echo(v)
    ]
    killed = [str(rank) for rank in range(num_ranks) if rank not in verdicts]
    if killed:
        who = f"rank {killed[0]} was" if len(killed) == 1 else f"ranks {', '.join(killed)} were"
        notes.append(
            f"{who} killed before a checkpoint was written: what came after the last one is lost"
        )
    return notes


def _outcome(verdicts: Verdicts, num_ranks: int, end: LaunchEnd) -> Outcome:
    agreed = _agreed(verdicts, num_ranks)
    if agreed is not None:
        # A launcher may pass Ctrl-C on as another signal; who was asked first knows better.
        is_interrupt = agreed in STOPS and end.signal == signal.SIGINT
        return Outcome.INTERRUPTED if is_interrupt else agreed
    if any(v.outcome is Outcome.CHECKPOINT_NOT_WRITTEN for v in verdicts.values()):
        return Outcome.CHECKPOINT_NOT_WRITTEN  # a signal's 75 would promise that it can go on
    if end.signal is not None:
        return Outcome.INTERRUPTED if end.signal == signal.SIGINT else Outcome.PREEMPTED
    if end.stall or missed_deadline(end.ends):
        return Outcome.STALL
    if end.refusal:
        return Outcome.REFUSED_CLUSTER
    cause = _root_cause(verdicts, num_ranks, end)
    if cause in verdicts:
        return verdicts[cause].outcome
    is_memory = cause in end.ends and end.ends[cause].ran_out_of_memory
    return Outcome.OUT_OF_RESOURCES if is_memory else Outcome.CRASHED


def _agreed(verdicts: Verdicts, num_ranks: int) -> Outcome | None:
    """What all ranks say together, each without an error."""
    if len(verdicts) < num_ranks or any(v.error is not None for v in verdicts.values()):
        return None
    return verdicts[0].outcome


def _root_cause(verdicts: Verdicts, num_ranks: int, end: LaunchEnd) -> int:
    """The rank that failed first.

    A rank without a verdict was killed and said nothing: the others' errors came after it. Of
    several, it is one that its supervisor had not asked to end.
    """
    unheard = [rank for rank in range(num_ranks) if rank not in verdicts]
    silent = [rank for rank in unheard if not (rank in end.ends and end.ends[rank].asked_to_end)]
    errors = [verdict for verdict in verdicts.values() if verdict.error is not None]
    told = [v for v in errors if not _is_echo(v)]
    if told:
        return min(told, key=lambda verdict: verdict.ended_at).rank
    if silent:
        return silent[0]
    if errors:
        return min(errors, key=lambda verdict: verdict.ended_at).rank
    return unheard[0] if unheard else 0


def _is_echo(verdict: RankVerdict) -> bool:
    """True for an error that only says that another rank went away."""
    assert verdict.error is not None
    if verdict.error.kind in ECHO_KINDS:
        return True
    text = verdict.error.message.lower()
    return verdict.error.kind == "RuntimeError" and any(echo in text for echo in ECHOES)


def _failure(run: RunDir, verdicts: Verdicts, num_ranks: int, end: LaunchEnd) -> Failure | None:
    if _agreed(verdicts, num_ranks) is not None:
        return None  # nan is no rank's failure
    if end.refusal:
        log = run.launcher_log.name
        return Failure(
            rank=0, host=_host(run, 0), step=0, phase="start", message=end.refusal, log=log
        )
    deadline = missed_deadline(end.ends)
    if deadline:
        cause, message = explain_stall(run, end.ends, deadline)
        return _failure_of(run, verdicts, cause, _with_action(run, cause, "stalled", message))
    found = _root_cause(verdicts, num_ranks, end)
    message = _message(verdicts.get(found), end.ends.get(found))
    return _failure_of(run, verdicts, found, _with_action(run, found, "died", message))


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
    """In a pipeline: which stage and microbatch the rank was at."""
    place = read_action(run.action_mark(rank))
    return f"rank {rank} {how} in {place}: {message}" if place else message


def _message(verdict: RankVerdict | None, end: RankEnd | None) -> str:
    if verdict is not None and verdict.error is not None:
        error = verdict.error
        # A refusal of ours is a sentence for people; its class says nothing more.
        said = error.message if verdict.outcome in REFUSALS else f"{error.kind}: {error.message}"
        return f"{said} ({error.place})" if error.place else said
    if end is None:
        return "vanished without a word: its supervisor was killed, or its machine is gone"
    if end.ran_out_of_memory:
        return f"killed by the kernel: the machine ran out of memory{MEMORY_HINT}"
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        return f"killed by {name}{SIGNAL_HINTS.get(name, '')}"
    return f"left early with exit code {end.exit_code}"


def _host(run: RunDir, rank: int) -> str:
    launch = json.loads(run.launch.read_text())
    return str(launch["ranks"][rank]["host"])
