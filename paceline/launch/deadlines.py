"""Deadlines: read from heartbeats while ranks run, and explained once one has passed.

Every rank writes a heartbeat now and then (train/heartbeat.py): the step and phase it is in, and
how many phases it has entered. From these files alone, so that a rank which is stuck anywhere can
be judged, the supervisor answers two questions.

    while it runs (`Deadlines`)      has every rank begun step 1, does each still get somewhere?
    afterwards (`explain_missed`)    which rank holds the others up, and in which line of code?
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.records import LaunchPlan, Limits, RankEnd
from paceline.records.heartbeats import Beat, last_beat
from paceline.records.phases import Phase
from paceline.records.rundir import RunDir
from paceline.train.heartbeat import read_action, read_mark

Deadline = Literal["start", "progress", "total", "collective"]
SILENT_S = 5.0
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
TORCH = "/torch/"
KEYS = {
    "start": "launch.start_s",
    "progress": "launch.progress_s",
    "total": "launch.total_s",
    "collective": "launch.collective_timeout_s",
}


class Deadlines:
    """Call `missed` often; it looks at the files only now and then.

    Times are this process's own: a heartbeat's own clock, which may be another machine's, is only
    compared with its last value. For each rank two moments are kept: `_moved_at`, when its step,
    phase or count of phases last changed, and `_beaten_at`, when it last wrote anything. `ranks`
    may say what beat each has told last: on a full disk its file stays as it is.
    """

    def __init__(
        self,
        run: RunDir,
        ranks: Iterable[int] | Mapping[int, Callable[[], Beat]],
        limits: Limits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._limits, self._now = run, limits, now
        self._told = ranks if isinstance(ranks, Mapping) else {}
        self._started_at = self._looked_at = now()
        self._beats = dict.fromkeys(ranks, Beat())
        self._found = dict.fromkeys(ranks, (Beat(), Beat()))  # in its file, told
        self._moved_at = dict.fromkeys(ranks, self._started_at)
        self._beaten_at = dict.fromkeys(ranks, self._started_at)
        known = [s for s in (limits.start_s, limits.progress_s, limits.total_s) if s is not None]
        self._interval_s = min([1.0, *(seconds / 10 for seconds in known)])

    def missed(self) -> Deadline | None:
        """Return the deadline that has passed, if one has. A rank that began step 1 too late, but
        before this looked, is let go on: it is not stuck."""
        now, limits = self._now(), self._limits
        if now - self._looked_at < self._interval_s:
            return None
        self._looked_at = now
        if limits.total_s is not None and now - self._started_at > limits.total_s:
            return "total"
        self._look(now)
        # A rank that has left its verdict is done, however long its process takes to leave.
        waiting = [rank for rank in self._beats if not self._run.verdict(rank).is_file()]
        if limits.progress_s is not None:
            if any(self._idle_s(rank, now) > limits.progress_s for rank in waiting):
                return "progress"
        if limits.start_s is not None and now - self._started_at > limits.start_s:
            if any(self._beats[rank].step == 0 for rank in waiting):
                return "start"
        return None

    def _idle_s(self, rank: int, now: float) -> float:
        """Return for how long a rank has got nowhere. Before step 1 any heartbeat counts: a rank
        that loads for an hour enters no phase, yet it beats, and a frozen one does not. From step 1
        on only a new phase counts: a rank that is stuck in a collective beats for ever."""
        beat = self._beats[rank]
        if beat.time == 0.0:
            return 0.0  # it has not joined yet
        return now - (self._moved_at[rank] if beat.step else self._beaten_at[rank])

    def silent_s(self, rank: int) -> float:
        """Return for how long a rank has written nothing; 0 where it never has."""
        return self._now() - self._beaten_at[rank] if self._beats[rank].time else 0.0

    def _look(self, now: float) -> None:
        for rank, before in self._beats.items():
            beat = self._newest(rank, before)
            if (beat.step, beat.phase, beat.marks) != (before.step, before.phase, before.marks):
                self._moved_at[rank] = now
            if beat.time != before.time:
                self._beaten_at[rank] = now
            self._beats[rank] = beat

    def _newest(self, rank: int, before: Beat) -> Beat:
        """Return the newest sign of a rank: of its file and what it told, the one that is new. The
        mark of its step needs no room on the disk: who is told nothing sees by it that it moves."""
        found = (last_beat(self._run.heartbeat(rank)), self._told.get(rank, Beat)())
        new = [beat for beat, old in zip(found, self._found[rank], strict=True) if beat != old]
        self._found[rank] = found
        beat = new[0] if new else before
        step = read_mark(self._run.step_mark(rank))
        return replace(beat, step=max(step, beat.step))


class Frame(NamedTuple):
    file: str
    line: str
    name: str


def missed_deadline(ends: dict[int, RankEnd]) -> str:
    """Return the deadline by which supervisors have ended their ranks, or ""."""
    return next((end.stall for end in ends.values() if end.stall), "")


def explain_missed(run: RunDir, ends: dict[int, RankEnd], deadline: str) -> tuple[int, str]:
    """Return the rank to look at, and a sentence that says why."""
    limits = LaunchPlan.load(run.launch).limits
    text, seconds = {
        "start": ("step 1 had not begun on every rank after {:g} s", limits.start_s),
        "progress": ("no progress for {:g} s", limits.progress_s),
        "total": ("it took longer than {:g} s", limits.total_s),
        "collective": ("a collective waited longer than {:g} s", limits.collective_s),
    }[deadline]
    waited = text.format(seconds or 0)
    beats = {rank: last_beat(run.heartbeat(rank)) for rank in ends}
    frames = {rank: _main_frames(run.stacks(rank)) for rank in ends}
    inside = [rank for rank in ends if read_action(run.action_mark(rank))]
    rank, why = _furthest_behind(ends, beats, frames, inside)
    place = _own_line(frames[rank])
    at = f"; it stands in {place}" if place else ""
    return rank, (
        f"{waited}: {why}{at}\n"
        f"hint: the stacks of all ranks are in ranks/*/stacks.txt; {KEYS[deadline]} sets the limit"
    )


def _furthest_behind(
    ends: dict[int, RankEnd],
    beats: dict[int, Beat],
    frames: dict[int, list[Frame]],
    inside: list[int],
) -> tuple[int, str]:
    """Return the rank that the others wait for, by the surest sign that there is. `inside` are the
    ranks of a pipeline that are at work on a microbatch, as far as they have said."""
    for rank, end in ends.items():
        if end.was_stopped:
            return rank, "its process was stopped by a signal (SIGSTOP)"
    # A thread writes the heartbeats: only a frozen process, or C code that holds the interpreter,
    # keeps it from doing so. Each supervisor has counted the seconds itself: clocks of machines
    # differ, and jump.
    least_s = min(end.silent_s for end in ends.values())
    silent = [rank for rank, end in ends.items() if end.silent_s - least_s > SILENT_S]
    if silent:
        return silent[0], "its heartbeat stopped before the others': frozen, or stuck in C code"
    is_waiting_for_data = any(beat.phase in (Phase.START, Phase.DATA) for beat in beats.values())
    if len(inside) == 1 and len(ends) > 1 and not is_waiting_for_data:
        return inside[0], "it alone is at work on a microbatch, the others wait"
    # Ranks go through the same steps and phases; who has come least far is waited for.
    position = {rank: (beat.step, _order(beat.phase)) for rank, beat in beats.items()}
    rank = min(position, key=lambda r: (position[r], r))
    beat, others = beats[rank], [r for r in position if position[r] > position[rank]]
    if others:
        return rank, (
            f"at step {beat.step} in {beat.phase} it is behind rank {others[0]}, which waits in"
            f" {beats[others[0]].phase}"
        )
    where = f"at step {beat.step} in {beat.phase}"
    if len(beats) == 1:
        return rank, f"it is {where}"
    # All in one phase: those inside torch wait in a collective for the one that is not.
    outside = [r for r in beats if frames[r] and TORCH not in frames[r][0].file]
    if len(outside) == 1:
        return outside[0], f"all are {where}, and it alone is not inside torch"
    return rank, f"all {len(beats)} ranks are {where}"


def _order(phase: str) -> int:
    """Return how far in a step a rank is: the one that is furthest behind is waited for."""
    return Phase(phase).order if phase in list(Phase) else len(Phase)


def _main_frames(stacks: Path) -> list[Frame]:
    """Return the main thread in the last dump, innermost first; empty where there is no dump."""
    try:
        text = stacks.read_text(errors="replace")
    except OSError:
        return []
    # The thread that took the signal comes last in a dump and is the main one.
    _, _, current = text.rpartition("Current thread")
    return [Frame(*found) for found in FRAME.findall(current)]


def _own_line(frames: list[Frame]) -> str:
    """Return `job.py:14 in loss`: the innermost line that is not in a library."""
    if not frames:
        return ""
    frame = next((f for f in frames if "site-packages" not in f.file), frames[0])
    return f"{Path(frame.file).name}:{frame.line} in {frame.name}"
