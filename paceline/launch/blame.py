"""After a missed deadline: which rank holds the others up, and where it stands."""

import re
from pathlib import Path
from typing import NamedTuple

from paceline.launch.deadlines import Beat, last_beat
from paceline.records import LaunchPlan, RankEnd
from paceline.records.rundir import RunDir
from paceline.train.heartbeat import read_action

# The order in which a step goes through them; the rank that is furthest behind is waited for.
PHASES = ("start", "data", "forward", "backward", "comm", "optimizer", "other", "eval")
SILENT_S = 5.0
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
TORCH = "/torch/"
KEYS = {
    "start": "launch.start_s",
    "progress": "launch.progress_s",
    "total": "launch.total_s",
    "collective": "launch.collective_timeout_s",
}


class Frame(NamedTuple):
    file: str
    line: str
    name: str


def missed_deadline(ends: dict[int, RankEnd]) -> str:
    return next((end.stall for end in ends.values() if end.stall), "")


def explain_stall(run: RunDir, ends: dict[int, RankEnd], deadline: str) -> tuple[int, str]:
    """The rank to look at, and a sentence that says why."""
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
    """`inside`: ranks of a pipeline that are at work on a microbatch, as far as they have said."""
    for rank, end in ends.items():
        if end.was_stopped:
            return rank, "its process was stopped by a signal (SIGSTOP)"
    newest = max(beat.time for beat in beats.values())
    silent = [rank for rank, beat in beats.items() if newest - beat.time > SILENT_S]
    if silent:
        return silent[0], "its heartbeat stopped before the others': frozen, or stuck in C code"
    is_waiting_for_data = any(beat.phase in ("start", "data") for beat in beats.values())
    if len(inside) == 1 and len(ends) > 1 and not is_waiting_for_data:
        return inside[0], "it alone is at work on a microbatch, the others wait"
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
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _main_frames(stacks: Path) -> list[Frame]:
    """The main thread in the last dump, innermost first; empty where there is no dump."""
    try:
        text = stacks.read_text(errors="replace")
    except OSError:
        return []
    # The thread that took the signal comes last in a dump and is the main one.
    _, _, current = text.rpartition("Current thread")
    return [Frame(*found) for found in FRAME.findall(current)]


def _own_line(frames: list[Frame]) -> str:
    """`job.py:14 in loss`: the innermost line that is nobody's library."""
    if not frames:
        return ""
    frame = next((f for f in frames if "site-packages" not in f.file), frames[0])
    return f"{Path(frame.file).name}:{frame.line} in {frame.name}"
