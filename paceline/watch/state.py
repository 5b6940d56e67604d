"""Whether a run is alive: from its result, its heartbeats and its lock, wherever it runs."""

import math
import re
import socket
from pathlib import Path

import psutil

from paceline.errors import DataError, Outcome
from paceline.records.files import read_regular
from paceline.records.rundir import RunDir
from paceline.records.runlock import RunLock
from paceline.records.words import elapsed
from paceline.watch.view import RunView, State

MISSED_S = 3.0  # heartbeats come every second
SILENT_S = 15.0  # a network file system may hold them back this long
DEAD_S = 90.0
STILL_S = 60.0
MAX_LOCK_BYTES = 4096  # a process and the name of its host
PROCESS = re.compile("[0-9]{1,10}")  # and below 2**31: the kernel is asked for no other


def judge_state(run: RunDir, view: RunView, now: float) -> State:
    """Say in one word how a run is doing, with the evidence for it."""
    if view.result is not None:
        outcome = view.result.outcome
        if outcome is Outcome.OK:
            return State("ok", view.result.why_early)
        said = view.result.failure.message.partition("\n")[0] if view.result.failure else ""
        return State("stopped" if outcome.is_stop else "failed", f"{outcome}: {said}".rstrip(": "))
    if run.imported.is_file():
        return State("foreign", "imported: paceline diagnose tells what can be known of it")
    silent = {each.rank: each.silent_s for each in view.ranks if each.silent_s is not None}
    if not silent:
        return _without_beats(run, now)
    least = min(silent.values())
    if least > _sure_after_s(run.root / RunLock.NAME):
        return State("died", f"no rank and no supervisor lives: silent for {elapsed(least)}")
    if least > DEAD_S:
        said = f"no heartbeat for {elapsed(least)}, and no result was written"
        return State("died", said, is_sure=False)
    quiet = {rank: age for rank, age in silent.items() if age > SILENT_S}
    if quiet:
        rank = max(quiet, key=lambda each: quiet[each])
        return State("silent", f"rank {rank} has been silent for {elapsed(quiet[rank])}")
    still = max(view.ranks, key=lambda each: each.still_s)
    if still.still_s > STILL_S:
        where = f"rank {still.rank} has been in {still.phase} of step {still.step}"
        return State("silent", f"{where} for {elapsed(still.still_s)}")
    return State("running", f"attempt {view.attempt}" if view.attempt > 1 else "")


def _without_beats(run: RunDir, now: float) -> State:
    """Judge a run without heartbeats: its ranks are starting, or died before they could write."""
    try:
        age = now - run.config.stat().st_mtime
    except OSError:
        return State("starting")
    if age > _sure_after_s(run.root / RunLock.NAME):
        return State("died", "no rank ever spoke, and no supervisor lives")
    return State("starting", "ranks are starting")


def _sure_after_s(path: Path) -> float:
    """Return after how many silent seconds the process that the lock names has surely ended: few if
    it was on this machine and is gone, but not none, because a container may have the same host
    name and other process ids; more if the lock names nobody, because the process cleared it as it
    left, or its disk is full. The lock itself is not touched, not even for a moment: a run that
    starts just then must get it."""
    try:
        said = read_regular(path, MAX_LOCK_BYTES).decode(errors="replace")
    except (OSError, DataError):
        return math.inf
    process, _, host = said.strip().partition(" ")
    if not process:
        return SILENT_S
    is_known = host == socket.gethostname() and PROCESS.fullmatch(process) is not None
    is_gone = is_known and int(process) < 2**31 and not psutil.pid_exists(int(process))
    return MISSED_S if is_gone else math.inf
