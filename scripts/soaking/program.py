"""One run of the real program as processes that can be found, watched, signalled and resumed.

Every process carries a mark in its environment: nothing without it is ever signalled.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from paceline.checkpoint.folder import CheckpointFolder
from paceline.errors import DataError
from paceline.records import Attempt
from paceline.records.rundir import RunDir
from paceline.train.heartbeat import read_mark

MARK = "PACELINE_SOAK_MARK"
POLL_S = 0.02
START_S, STOP_S, GONE_S = 90.0, 60.0, 5.0
PREEMPTED = 75
LAUNCHERS = ("SLURM", "OMPI_COMM", "PMI", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class SoakError(Exception):
    """A promise that was not kept: what, and what was seen instead."""


class Program:
    """`paceline train` in `folder`/`name`, started once and resumed as often as asked."""

    def __init__(self, folder: Path, name: str, ranks: int, pace_s: float = 0.0) -> None:
        self.folder, self.run, self.ranks = folder, RunDir(folder / name), ranks
        self.checkpoints = CheckpointFolder(self.run.root / "checkpoints")
        self.mark, self.pace_s = uuid.uuid4().hex, pace_s
        self.screen = folder / f"{name}.txt"
        self.wall_s = 0.0  # of all processes that have ended, from start to exit
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def start(self, *arguments: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        env = kept | {MARK: self.mark, "SOAK_PACE_S": str(self.pace_s), "NO_COLOR": "1"}
        if self.pace_s:  # the clean run is left in peace
            env["SOAK_TROUBLE"] = str(self.folder / "trouble")
        self._started_at = time.monotonic()
        with self.screen.open("ab") as screen:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "train", *arguments],
                cwd=self.folder, env=env, stdout=screen, stderr=screen, start_new_session=True,
            )  # fmt: skip

    def resume(self, *changes: str) -> None:
        self.start("--resume", str(self.run.root), *changes)

    def stop(self) -> None:
        """Preempt it: it must write a checkpoint and leave."""
        self.process.send_signal(signal.SIGTERM)
        self.wait_for_exit(PREEMPTED, STOP_S)

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "start comes first"
        return self._process

    def wait_for_exit(self, code: int, timeout_s: float) -> None:
        """The program must end, with this code and with nothing left behind."""
        try:
            found = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise SoakError(f"the program has not ended within {timeout_s:.0f} s") from error
        self.wall_s += time.monotonic() - self._started_at
        if found != code:
            raise SoakError(f"exit code {found}, and {code} was due: {self.last_words()}")
        self.require_gone()

    def require_gone(self) -> None:
        deadline = time.monotonic() + GONE_S
        while left := self.processes():
            if time.monotonic() > deadline:
                raise SoakError(f"processes are left: {', '.join(map(str, left))}")
            time.sleep(POLL_S)

    def last_words(self) -> str:
        return " / ".join(self.screen.read_text(errors="replace").splitlines()[-4:])

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark: the supervisor, the fork server, ranks and loaders."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_marked = process.environ().get(MARK) == self.mark
            return is_marked and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def rank_processes(self) -> list[psutil.Process]:
        """Of the attempt that runs now, by rank."""
        lines = self.run.launcher_log.read_text().splitlines()
        started = [line.split() for line in lines if " is process " in line][-self.ranks :]
        processes = [psutil.Process(int(w[-1])) for w in sorted(started, key=lambda w: int(w[4]))]
        if strangers := [p.pid for p in processes if not self._is_ours(p)]:
            raise SoakError(f"processes {strangers} of launcher.log are not alive, or not ours")
        return processes

    def trouble(self, name: str) -> Path:
        """Return the file by which the job is told to make trouble (job.py), once."""
        folder = self.folder / "trouble"
        folder.mkdir(exist_ok=True)
        return folder / name

    # Where it stands

    @property
    def step(self) -> int:
        """The newest step that any rank has begun; 0: none yet."""
        return max(read_mark(self.run.step_mark(rank)) for rank in range(self.ranks))

    @property
    def is_stepping(self) -> bool:
        return read_mark(self.run.step_mark(0)) > 0

    @property
    def attempt(self) -> int:
        """Its number; the file moves while one attempt follows another."""
        try:
            return Attempt.load(self.run.attempt).number
        except DataError:
            return 0

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                code = self.process.returncode
                raise SoakError(f"exit code {code} before {what}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise SoakError(f"{what}: not within {timeout_s:.0f} s, at step {self.step}")
            time.sleep(POLL_S)

    def wait_for_next(self, attempt: int) -> None:
        """Until an attempt after that one takes steps."""

        def is_there() -> bool:
            return self.attempt > attempt and self.is_stepping

        self.wait_until(is_there, f"the first step after attempt {attempt}", START_S)

    def end(self) -> None:
        """Whatever happened, no process of ours stays."""
        for process in self.processes():
            process.kill()
        if self._process is not None:
            self._process.wait()


def overrides(steps: int, most: int, ranks: int, tokens: Path) -> Sequence[str]:
    """lm_tiny, smaller: fp32 and AdamW on CPU, a checkpoint every 20 steps, restarts without end.
    Learning rates are those of `most` steps, however many are taken. Heartbeats are quick, and
    silence of 3 s, some 50 steps, is a stall: a frozen rank costs seconds."""
    return (
        "name=soak", "model.dim=64", "model.num_layers=2", "data.seq_len=32",
        f"data.cache_dir={tokens}", "data.source=stdlib", "data.max_files=40",
        "data.val_fraction=0.2",
        "data.num_workers=1", f"train.steps={steps}", "train.micro_batch_size=2",
        "train.eval_every=100", "train.eval_samples=32", "precision.mode=fp32",
        "optim.schedule.warmup_steps=20", f"optim.schedule.total_steps={most}",
        f"launch.nproc={ranks}", "launch.device=cpu",
        "launch.max_restarts=1000", "launch.progress_s=3", "observe.heartbeat_s=0.2",
        "observe.sample_ids=true", "checkpoint.every=20",
    )  # fmt: skip
