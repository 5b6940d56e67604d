"""Attempts on disk: attempt.json is the current one, attempts/<n>/ keeps the files of earlier ones.

What the next attempt writes anew is moved there, and decisions are copied, so that the evidence of
every failure is kept. Logs and tables are appended to and stay where they are.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.launch.ending import Ending, Verdicts, completed_steps, load_verdicts
from paceline.records import Attempt, AttemptSummary, LaunchPlan
from paceline.records.columns import Table
from paceline.records.disk import release, reserve, save_last
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.train.heartbeat import read_mark

ATTEMPT_BYTES = 16 << 10  # of room that is reserved for how it ended
CUT_OFF = "cut off: its supervisor was killed, or the machine went down"
HALT_NOTE = (
    "note: .HALT is from before this run and is ignored; remove it, and make a new one to stop"
    " this run"
)


def begin_attempt(
    run: RunDir, resume: bool, halt_seen: int | None = None, allow_change: bool = False
) -> Attempt:
    """Write attempt.json of the next start of all ranks; move away what an earlier one left."""
    archive_left_over(run)
    number = 1 + max(past_numbers(run), default=0)
    attempt = Attempt(
        number=number,
        resume=resume,
        allow_change=allow_change,
        started_at=wall_time(),
        halt_seen=halt_seen,
    )
    reserve(run.attempt, ATTEMPT_BYTES)
    attempt.save(run.attempt)
    return attempt


def find_halt(run: RunDir, say: Callable[[str], None]) -> int | None:
    """Return when an old .HALT was modified, in nanoseconds, so that it is not taken for a request
    to this run."""
    if not run.halt.exists():
        return None
    say(HALT_NOTE)
    return run.halt.stat().st_mtime_ns


def finish_attempt(run: RunDir, ending: Ending, cause: str = "", stopped: str = "") -> Attempt:
    """Complete attempt.json, in space that was reserved for it. `cause` is the failure's message,
    of which the first line is kept; `stopped` says why no other attempt followed."""
    first, last = _span(run, ending.num_ranks, ending.verdicts)
    ended = Attempt.load(run.attempt).model_copy(
        update={
            "ended_at": wall_time(),
            "outcome": ending.outcome,
            "first_step": first,
            "last_step": last,
            "cause": cause.partition("\n")[0],
            "stopped": stopped,
        }
    )
    run.lost.keep(run.attempt, ended.to_json(), save_last)
    return ended


def archive_left_over(run: RunDir) -> None:
    """Archive the last attempt, however it ended, before a resumed run writes its decisions."""
    if not run.attempt.is_file():
        return
    attempt = Attempt.load(run.attempt)
    if attempt.ended_at is None:
        num_ranks = LaunchPlan.load(run.launch).crew.world_size if run.launch.is_file() else 0
        first, last = _span(run, num_ranks, load_verdicts(run, num_ranks))
        known = {"ended_at": _last_sign(run), "first_step": first, "last_step": last}
        attempt = attempt.model_copy(update=known | {"cause": CUT_OFF})
    archive_attempt(run, attempt)


def archive_attempt(run: RunDir, ended: Attempt) -> None:
    """Move an ended attempt to its folder. Its own record goes last: if this process is killed on
    the way, the next one finds attempt.json still there and does it again."""
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
    release(run.attempt)


def put_back_decisions(run: RunDir) -> None:
    """After a resume that took no step, restore the decisions of the attempt before it."""
    attempt = Attempt.load(run.attempt)
    if attempt.number > 1 and read_mark(run.step_mark(0)) == 0:
        for path in (run.plan, run.launch, run.config, run.env, run.data):
            kept = run.past_attempt(attempt.number - 1) / path.name
            if kept.is_file():
                run.lost.keep(path, kept.read_text())


def archive_rank(run: RunDir, number: int, rank: int) -> None:
    """Move what a rank's next process writes anew. On a network file system the rank's own machine
    does so too, though another has done it: only then does it see that the files are gone."""
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
    """Return all attempts that the run directory knows of, the last one included."""
    paths = [run.past_attempt(number) / run.attempt.name for number in past_numbers(run)]
    return [Attempt.load(path) for path in (*paths, run.attempt) if path.is_file()]


def summarise(attempt: Attempt) -> AttemptSummary:
    names = AttemptSummary.model_fields
    return AttemptSummary(**{name: getattr(attempt, name) for name in names})


def measure_ettr(rows: Table[TrainingRow], attempts: Iterable[Attempt]) -> float | None:
    """Productive time over wall time: the rows are those of steps that no failure took back."""
    ended = [(a.started_at, a.ended_at) for a in attempts if a.ended_at is not None]
    # One that was cut off ended by the clock of the file system, which may have been set since.
    wall_s = sum(max(0.0, ended_at - started_at) for started_at, ended_at in ended)
    return min(1.0, float(rows.column("step_s").sum()) / wall_s) if wall_s > 0 else None


def _move(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        try:
            os.replace(path, folder / path.name)
        except FileNotFoundError:
            continue


def _span(run: RunDir, num_ranks: int, verdicts: Verdicts) -> tuple[int, int]:
    """Return the first and last step that this attempt took, as far as known; 0: none."""
    if read_mark(run.step_mark(0)) == 0 or num_ranks == 0:
        return 0, 0
    first = Attempt.load(run.attempt).first_step or 1  # rank 0 says where it resumed
    rows = read_training(run.training)
    recorded = rows[-1].step if rows else 0
    return first, max(first, completed_steps(run, num_ranks, verdicts, recorded))


def _last_sign(run: RunDir) -> float:
    """Return the time of the last heartbeat of an attempt whose end was not recorded."""
    beats = [path.stat().st_mtime for path in run.root.glob("heartbeat_rank*.jsonl")]
    return max([*beats, run.attempt.stat().st_mtime])
