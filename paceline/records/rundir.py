"""The run directory: where each stage finds the files of the stage before it.

`RunDir.create` makes one and locks it; every other stage opens it and reads.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from paceline.errors import DISK_ERRORS, ConfigError, DataError, DiskError, PacelineError
from paceline.records.disk import Losses
from paceline.records.runlock import RunLock

LATEST = "latest"


def slug(name: str) -> str:
    """A name that is safe as one path component: `$(rm) ../x` becomes `rm-x`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "run"


class _File:
    """A path inside the run directory: `RunDir(root).plan` is `root/plan.json`."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, run: "RunDir", kind: type["RunDir"]) -> Path:
        return run.root.joinpath(*self.parts)


class _RankFile:
    """A path inside a rank's folder: `RunDir(root).verdict(3)` is in `root/ranks/rank3/`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", kind: type["RunDir"]) -> Callable[[int], Path]:
        return lambda rank: run.rank(rank) / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's directory, and what this process could not write there."""

    root: Path
    lost: Losses = field(default_factory=Losses, compare=False, repr=False)

    # Decided before a rank starts: run/flow.py has the order.
    config = _File("run.yaml")
    env = _File("env.json")
    plan = _File("plan.json")
    data = _File("data.json")
    launch = _File("launch.json")
    drill = _File("drill.json")  # the fault that ranks plant in themselves, where it is a drill
    secret = _File(".secret")  # by which ranks under a launcher of ours know each other

    # Written while it runs.
    training = _File("training.csv")
    telemetry = _File("telemetry.csv")
    checkpoint_log = _File("checkpoints.csv")
    texts = _File("samples.jsonl")  # what the model wrote at evaluations
    events = _File("events.jsonl")  # what was noticed, a line each
    train_log = _File("train.log")
    launcher_log = _File("launcher.log")
    attempt = _File("attempt.json")
    attempts = _File("attempts")
    profiles = _File("profiles")  # traces of profiled steps, one per rank, and what is in them
    ranks = _File("ranks")

    # Requests to a live run, from any machine that shares the directory.
    halt = _File(".HALT")  # write a checkpoint and stop
    anomaly = _File(".anomaly_type")  # the rule for which the run was halted
    checkpoint_request = _File("control", "checkpoint")
    dump_request = _File("control", "dump")  # the stacks of all ranks
    profile_request = _File("control", "profile")  # empty: the next steps; or steps:20-24
    stop_request = _File("control", "stop")  # signals that the process of a launcher has got

    # What it came to.
    audit = _File("audit.json")
    result = _File("result.json")
    findings = _File("findings.json")
    summary = _File("summary.md")
    report = _File("report.html")
    timeline = _File("timeline.json")  # one pass of a pipeline, for Perfetto
    check = _File("check.json")
    imported = _File("imported.json")  # what `paceline import` has found in another trainer's files

    # Of each rank, in ranks/rank<r>/.
    rank_log = _RankFile("log.txt")
    steps = _RankFile("steps.csv")
    samples = _RankFile("samples.csv")
    verdict = _RankFile("verdict.json")
    rank_end = _RankFile("end.json")
    stacks = _RankFile("stacks.txt")
    collectives = _RankFile("collectives.json")  # the last ones of a rank that failed
    overlap = _RankFile("overlap.json")
    passes = _RankFile("pipeline.jsonl")  # when it ran the actions of its last passes
    step_mark = _RankFile("step")  # the step that it has begun, as eight bytes
    action_mark = _RankFile("action")  # the action of a pipeline that it is in

    @classmethod
    def create(cls, name: str, out: Path | None, is_run: bool = True) -> Self:
        """Make the directory of a new run: `out`, or `runs/NAME-UTC`, and point `latest` to it."""
        try:
            _require_outside_runs(out)
            root = out if out is not None else _unused(Path("runs"), slug(name))
            root.mkdir(parents=True, exist_ok=True)
            if out is None and is_run:
                _point_latest(root)
        except OSError as error:
            raise _no_place(error.errno or 0, error.filename) from error
        run = cls(root.resolve())
        run.require_fresh()
        return run

    @classmethod
    def require_place(cls, out: Path | None) -> None:
        """Refuse a place for a new run that cannot be one, before work is spent on it. Makes
        nothing: `create` still decides."""
        root = (out if out is not None else Path("runs")).absolute()
        existing = next(path for path in (root, *root.parents) if path.exists())
        if not existing.is_dir():
            raise _no_place(errno.ENOTDIR, existing)
        if not os.access(existing, os.W_OK | os.X_OK):
            is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
            raise _no_place(errno.EROFS if is_read_only else errno.EACCES, existing)
        _require_outside_runs(out)
        if out is not None and existing == root:
            cls(root.resolve()).require_fresh()

    @classmethod
    def open(cls, path: Path) -> Self:
        run = cls(path.resolve())
        if (path / "sweep.json").is_file():
            raise DataError(
                f"{path} is a sweep, not a run\nhint: its page is {path / 'report.html'}, its runs"
                f" are in {path / 'runs'}"
            )
        if not run.config.is_file() and run.imported.is_file():
            raise run.refuse_imported(path)
        if not run.config.is_file():
            hint = "runs/latest is the newest run" if Path("runs").is_dir() else "no runs/ here yet"
            raise DataError(f"{path} is not a run directory (no run.yaml in it)\nhint: {hint}")
        return run

    @staticmethod
    def refuse_imported(path: Path) -> DataError:
        """Return why one that was imported is not read as a run of ours: nobody planned it."""
        return DataError(
            f"{path} was imported from another trainer: it has neither a plan nor a config\n"
            f"hint: paceline diagnose {path} judges it, paceline watch {path} shows it"
        )

    def identity(self) -> tuple[int, int] | None:
        """Return what tells this directory from another one of its name; None: it is gone."""
        try:
            found = self.root.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def is_gone(self, home: tuple[int, int] | None) -> bool:
        """Tell whether this is not the directory any more whose identity was `home`. Some network
        file systems give another number at any time: our own file is a surer sign."""
        now = self.identity()
        return now is None or (now != home and not self.launch.is_file())

    @contextmanager
    def needed(self) -> Iterator[None]:
        """While inside, the directory must stay. If it was deleted, renamed or replaced, that is
        the error, whatever else went wrong for it; a full disk is a `DiskError` too."""
        home = self.identity()
        try:
            yield
        except (OSError, PacelineError) as error:
            if self.is_gone(home):
                raise self._explain_gone() from error
            if isinstance(error, OSError) and DiskError.is_meant(error):
                raise DiskError.of(error) from error
            raise
        if self.is_gone(home):
            raise self._explain_gone()

    def _explain_gone(self) -> DiskError:
        return DiskError(
            f"{self.root} was deleted, renamed or replaced while its run went on: the ranks were"
            " ended, and nothing more was written\n"
            "hint: start it again; to stop a run, press Ctrl-C or make a file .HALT in its"
            " directory"
        )

    def make_rank(self, rank: int) -> None:
        """Make a rank's folder, but never the run directory: one that was deleted stays so."""
        self.ranks.mkdir(exist_ok=True)
        self.rank(rank).mkdir(exist_ok=True)

    def lock(self, say: Callable[[str], None] = lambda text: None) -> RunLock:
        return RunLock(self.root, say)

    def require_fresh(self) -> None:
        """Refuse a directory that holds anything but our own lock. The lock held, it stays so."""
        names = {path.name for path in self.root.iterdir()}
        if names - {RunLock.NAME}:
            if RunLock.NAME in names:
                self.lock().require_free()
            raise ConfigError(
                f"{self.root} already holds files; a run never writes over another\n"
                "hint: give --out another directory, or none for runs/NAME-UTC"
            )

    def rank(self, rank: int) -> Path:
        return self.ranks / f"rank{rank}"

    def heartbeat(self, rank: int) -> Path:
        return self.root / f"heartbeat_rank{rank}.jsonl"

    def telemetry_of(self, rank: int) -> Path:
        """Each rank samples its memory, a machine's first rank the machine too. Rank 0's file is
        the one with the plain name."""
        return self.telemetry if rank == 0 else self.root / f"telemetry_rank{rank}.csv"

    def memory_dump(self, rank: int, moment: str) -> Path:
        """What held memory at a moment, as JSON; as text beside it. Rank 0's is in the root."""
        folder = self.root if rank == 0 else self.rank(rank)
        return folder / f"mem_{moment}.json"

    def tracker_log(self, name: str) -> Path:
        """What the process that sends numbers to a tracker prints."""
        return self.root / f"tracker_{name}.log"

    def past_attempt(self, number: int) -> Path:
        """Where the files that the next attempt writes anew are kept."""
        return self.attempts / str(number)

    @property
    def flops(self) -> Path:
        """The FLOPs per sample that rank 0 has counted: known before the first step."""
        return self.rank(0) / "flops"

    def read_flops(self) -> float | None:
        """Return what rank 0 has counted; None while it has not, or could not."""
        try:
            return float(self.flops.read_text())
        except (OSError, ValueError):
            return None


def _require_outside_runs(out: Path | None) -> None:
    """Refuse a place for a new run inside another one, such as its checkpoints."""
    for other in map(RunDir, (out or Path("runs", "new")).resolve().parents):
        if other.config.is_file() and other.launch.is_file():
            raise ConfigError(
                f"cannot make a run directory inside {other.root}: that is another run's own\n"
                "hint: give --out a directory outside of it"
            )


def _no_place(number: int, where: object) -> PacelineError:
    """Return why no run directory can be made: a disk takes nothing, or the place is wrong."""
    kind = DiskError if number in DISK_ERRORS else ConfigError
    return kind(
        f"cannot make a run directory: {where}: {os.strerror(number)}\n"
        "hint: give --out a directory that can be created and written"
    )


def _unused(parent: Path, name: str) -> Path:
    """`parent/name-UTC`, with a counter when two runs start within a second."""
    stem = f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    candidates = (parent / (stem + (f"-{n}" if n else "")) for n in range(1000))
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            if parent.is_dir():
                continue
            raise
    raise ConfigError(f"1000 runs named {stem} exist\nhint: set name= or --out")


def _point_latest(root: Path) -> None:
    link = root.parent / LATEST
    temporary = root.parent / f".{LATEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(root.name)
    os.replace(temporary, link)
