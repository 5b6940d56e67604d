"""A bench for faults: the real program in a folder of its own, and nothing of it left behind."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import warm
from tests.cli.program import Ran, environment
from tests.jobs import write_line_job

SMALL = ["train.steps=4", "train.micro_batch_size=4", "launch.device=cpu"]
MARK = "PACELINE_TEST_MARK"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


class Bench:
    """One folder, one mark in the environment by which every process of a test is found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.sessions: set[int] = set()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()

    def job(self, trouble: str) -> str:
        return write_line_job(self.folder, trouble)

    def start(self, *arguments: str, before: tuple[str, ...] = (), **env: str) -> Any:
        marked = environment(**env) | {MARK: self.mark, "TMPDIR": str(self.temporary)}
        program = [*before, "-m", "paceline"] if before else [sys.executable, "-m", "paceline"]
        process = warm.start(
            [*program, *arguments], cwd=self.folder, env=marked, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.sessions.add(process.pid)
        return process

    def train(self, trouble: str, *overrides: str, **env: str) -> Ran:
        words = ["train", self.job(trouble), *SMALL, *overrides, "--out", "run"]
        return finish(self.start(*words, **env))

    def processes(self) -> list[psutil.Process]:
        """All that are alive: in the session of a program, or with the mark in what they were
        started with, which forks of a warm server have not."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = os.getsid(process.pid) in self.sessions
                if is_ours or process.environ().get(MARK) == self.mark:
                    found.append(process)
            except ProcessLookupError:
                continue
            except psutil.Error:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def ranks(self) -> list[int]:
        """Processes of the ranks, by rank."""
        text = (self.folder / "run/launcher.log").read_text()
        lines = [line.split() for line in text.splitlines() if " is process " in line]
        return [int(words[-1]) for words in sorted(lines, key=lambda words: words[4])]

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run/result.json").read_text()))


def finish(process: Any, timeout_s: float = 60) -> Ran:
    out, err = process.communicate(timeout=timeout_s)
    return Ran(process.returncode, out, err)


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def ranked(rank: int, world: int, port: str, addr: str = "127.0.0.1") -> dict[str, str]:
    """What a launcher would put into the environment of a rank."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": addr, "MASTER_PORT": port,
    }  # fmt: skip
