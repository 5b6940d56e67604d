"""All runs below a folder: single ones, those of sweeps and of benches, searched for repeatedly.

A run that is over is read once, from its result alone; a live one is followed (reader.py). So a
folder of a thousand old runs only costs a check of each name.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import DataError
from paceline.records import Result
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord
from paceline.records.words import count
from paceline.sweep.folder import SUCCESS, SweepDir, load_manifest
from paceline.watch.reader import RunReader
from paceline.watch.state import judge_state
from paceline.watch.view import RunView, State

MAX_DEPTH, MAX_RUNS = 4, 2000
SCAN_S = 5.0  # between two searches for new runs: a shared folder may be slow
CONFIG, SWEEP = "run.yaml", "sweep.json"
Marks = tuple[int | None, ...]


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / "imported.json").is_file()


def iter_runs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the run directories at or below a folder; links, as `latest` is, are not followed."""
    if is_run(root):
        yield root
        return
    if depth == 0:
        return
    try:
        folders = sorted(e.path for e in os.scandir(root) if e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for folder in folders:
        yield from iter_runs(Path(folder), depth - 1)


class Fleet:
    """Many runs in one list, by their path below `root`; the live and the newest come first."""

    def __init__(self, root: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.root, self._now = root, now
        self.readers: dict[str, RunReader] = {}
        # Those that are over, with when the files were written that say so.
        self._over: dict[str, tuple[Marks, RunView]] = {}
        self._scanned_at: float | None = None
        self.is_single = is_run(root)

    def read(self) -> list[RunView]:
        """Return all runs as they are now."""
        self.scan()
        return sorted((self._read_one(*found) for found in self.readers.items()), key=_order)

    def names(self) -> dict[Path, str]:
        return {reader.run.root: name for name, reader in self.readers.items()}

    def sweeps(self) -> list[str]:
        """Say how far each sweep is, and each pair of a bench: those whose runs were found."""
        roots = {reader.run.root.parents[1] for reader in self.readers.values()}
        found = [root for root in sorted(roots) if (root / SWEEP).is_file()]
        return [text for root in found if (text := describe_sweep(SweepDir(root)))]

    def follow(self, name: str) -> RunView | None:
        """Return one complete run, with its series; None if there is no run of that name. Only
        names that were found are looked up: no path comes from outside."""
        reader = self.readers.get(name)
        return reader.read() if reader is not None else None

    def scan(self) -> None:
        """Search for new runs, now and then. The result is a new map, as other threads may be
        iterating over the old one."""
        if self._scanned_at is not None and self._now() - self._scanned_at < SCAN_S:
            return
        self._scanned_at = self._now()
        readers = dict(self.readers)
        for number, path in enumerate(iter_runs(self.root)):
            name = str(path.relative_to(self.root)) if path != self.root else path.name
            if number < MAX_RUNS and name not in readers:
                readers[name] = RunReader(RunDir(path.resolve()), self._now)
        self.readers = {name: each for name, each in readers.items() if each.run.root.is_dir()}

    def _read_one(self, name: str, reader: RunReader) -> RunView:
        run = reader.run
        marks = _mark(run, len(reader.view.ranks))
        seen = self._over.get(name)
        if seen is not None and seen[0] == marks:
            return seen[1]
        view = summarise(run) if marks[0] is not None else reader.read()
        if view.state.is_over:
            self._over[name] = (marks, view)
        else:
            self._over.pop(name, None)
        return view


def describe_sweep(folder: SweepDir) -> str:
    """Say how many runs of a sweep are done; empty if its files do not tell."""
    try:
        record = SweepRecord.load(folder.record)
        rows = load_manifest(folder.manifest)
    except DataError:
        return ""
    asked = sum(len(phase.cells) * phase.repeats for phase in record.phases)
    failed = sum(row["status"] != SUCCESS for row in rows)
    bad = f", {failed} failed" if failed else ""
    return f"{record.mode} {folder.root.name}: {len(rows)} of {asked} runs have ended{bad}"


def summarise(run: RunDir) -> RunView:
    """Return a run that is over from its result alone."""
    view = RunView(run.root, run.root.name)
    try:
        result = view.result = Result.load(run.result)
    except DataError as error:
        view.state = State("failed", str(error).partition("\n")[0])
        return view
    view.name, view.step, view.num_steps = result.name, result.steps, result.steps
    ranks = count(result.world_size, "rank")
    view.title = f"{ranks}, {result.strategy}, {result.precision}"
    view.step_s = result.step_s.p50 if result.step_s else None
    if result.final_loss is not None:
        view.last["loss"] = result.final_loss
    for unit, rate in (("samples/s", result.samples_per_s), ("tokens/s", result.tokens_per_s)):
        if rate is not None:
            view.unit = unit
            view.last[unit.replace("/", "_per_")] = rate
    view.state = judge_state(run, view, wall_time())
    return view


def _order(view: RunView) -> tuple[bool, float]:
    started = _mtime(view.path / CONFIG) or 0
    return view.state.is_over, -started


def _mark(run: RunDir, num_ranks: int) -> Marks:
    """Return the times of the files that show that a run is over: its result or, without one, its
    heartbeats, as it may only have been silent for a while."""
    ended_at = _mtime(run.result)
    beats = [run.heartbeat(rank) for rank in range(num_ranks)] if ended_at is None else []
    return ended_at, *(_mtime(path) for path in (run.attempt, *beats))


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
