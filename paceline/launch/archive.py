"""Attempts on disk: attempt.json of the one that lives, attempts/<n>/ of those that have ended.

What the next attempt writes anew is moved there, and decisions are copied, so that the evidence of
every failure stays. Logs and tables are appended to and stay where they are.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.errors import Outcome
from paceline.launch.ending import completed_steps
from paceline.records import Attempt, AttemptSummary, LaunchPlan
from paceline.records.files import write_atomic
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.train.heartbeat import read_mark

CUT_OFF = "cut off: its supervisor was killed, or the machine went down"
HALT_NOTE = (
    "note: .HALT is from before this run and is ignored; remove it, and make a new one to stop"
    " this run"
)


def begin_attempt(
    run: RunDir, resume: bool, halt_seen: int | None = None, allow_change: bool = False
) -> Attempt:
    """attempt.json of the next start of all ranks. What an earlier one left is moved away."""
    archive_left_over(run)
    number = 1 + max(past_numbers(run), default=0)
    attempt = Attempt(
        number=number,
        resume=resume,
        allow_change=allow_change,
        started_at=time.time(),
        halt_seen=halt_seen,
    )
    attempt.save(run.attempt)
    return attempt


def find_halt(run: RunDir, say: Callable[[str], None]) -> int | None:
    """The .HALT of an earlier run, by its time of modification: it is not meant for this one."""
    if not run.halt.exists():
        return None
    say(HALT_NOTE)
    return run.halt.stat().st_mtime_ns


def finish_attempt(
    run: RunDir, num_ranks: int, outcome: Outcome, cause: str = "", stopped: str = ""
) -> Attempt:
    """Complete attempt.json. `cause` is a failure's message, of which the first line is kept."""
    first, last = _span(run, num_ranks)
    ended = Attempt.load(run.attempt).model_copy(
        update={
            "ended_at": time.time(),
            "outcome": outcome,
            "first_step": first,
            "last_step": last,
            "cause": cause.partition("\n")[0],
            "stopped": stopped,
        }
    )
    ended.save(run.attempt)
    return ended


def archive_left_over(run: RunDir) -> None:
    """Before the decisions of a resumed run are written: the last attempt, however it ended."""
    if not run.attempt.is_file():
        return
    attempt = Attempt.load(run.attempt)
    if attempt.ended_at is None:
        num_ranks = LaunchPlan.load(run.launch).crew.world_size if run.launch.is_file() else 0
        first, last = _span(run, num_ranks)
        known = {"ended_at": _last_sign(run), "first_step": first, "last_step": last}
        attempt = attempt.model_copy(update=known | {"cause": CUT_OFF})
    archive_attempt(run, attempt)


def archive_attempt(run: RunDir, ended: Attempt) -> None:
    """Its own record goes last: whoever is killed on the way finds it there and does it again."""
    folder = run.past_attempt(ended.number)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (run.plan, run.launch, run.config, run.env, run.data):
        if path.is_file():
            shutil.copy2(path, folder / path.name)
    ranks = [int(path.name.removeprefix("rank")) for path in run.ranks.glob("rank*")]
    for rank in ranks:
        archive_rank(run, ended.number, rank)
    _move([run.result, run.summary, run.report, run.audit, run.timeline], folder)
    ended.save(folder / run.attempt.name)
    run.attempt.unlink()


def put_back_decisions(run: RunDir) -> None:
    """After a resume that took no step: the run is still what the attempt before it was."""
    attempt = Attempt.load(run.attempt)
    if attempt.number > 1 and read_mark(run.step_mark(0)) == 0:
        for path in (run.plan, run.launch, run.config, run.env, run.data):
            kept = run.past_attempt(attempt.number - 1) / path.name
            if kept.is_file():
                write_atomic(path, kept.read_bytes())


def archive_rank(run: RunDir, number: int, rank: int) -> None:
    """What a rank's next process writes anew. On a file system over a network its own machine does
    so too, though another has done it, and so sees that the files are gone."""
    folder = run.past_attempt(number)
    inside = folder / run.rank(rank).relative_to(run.root)
    inside.mkdir(parents=True, exist_ok=True)
    own = [run.verdict(rank), run.rank_end(rank), run.stacks(rank), run.step_mark(rank)]
    _move([*own, run.action_mark(rank), run.passes(rank)], inside)
    _move([run.heartbeat(rank)], folder)


def past_numbers(run: RunDir) -> list[int]:
    if not run.attempts.is_dir():
        return []
    return sorted(int(path.name) for path in run.attempts.iterdir() if path.name.isdigit())


def list_attempts(run: RunDir) -> list[Attempt]:
    """All that the run directory knows of, the last one included."""
    paths = [run.past_attempt(number) / run.attempt.name for number in past_numbers(run)]
    return [Attempt.load(path) for path in (*paths, run.attempt) if path.is_file()]


def summarise(attempt: Attempt) -> AttemptSummary:
    names = AttemptSummary.model_fields
    return AttemptSummary(**{name: getattr(attempt, name) for name in names})


def measure_ettr(rows: Iterable[TrainingRow], attempts: Iterable[Attempt]) -> float | None:
    """Productive time over wall time: the rows are those of steps that no failure took back."""
    wall_s = sum(a.ended_at - a.started_at for a in attempts if a.ended_at is not None)
    return min(1.0, sum(row.step_s for row in rows) / wall_s) if wall_s > 0 else None


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        try:
            os.replace(path, folder / path.name)
        except FileNotFoundError:
            continue


def _span(run: RunDir, num_ranks: int) -> tuple[int, int]:
    """First and last step that this attempt took, as far as known; 0: none."""
    if read_mark(run.step_mark(0)) == 0 or num_ranks == 0:
        return 0, 0
    first = Attempt.load(run.attempt).first_step or 1  # rank 0 says what it goes on from
    rows = read_training(run.training)
    return first, max(first, completed_steps(run, num_ranks, rows[-1].step if rows else 0))


def _last_sign(run: RunDir) -> float:
    """When somebody last wrote: the heartbeats of an attempt that nobody saw the end of."""
    beats = [path.stat().st_mtime for path in run.root.glob("heartbeat_rank*.jsonl")]
    return max([*beats, run.attempt.stat().st_mtime])
