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

JOB = """
import ctypes, os, resource, subprocess, sys, time
import torch
from torch import nn
from paceline import Workload

class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), index / 64)

class Job(Workload):
    def build_model(self, config): return nn.Linear(4, 1)
    def build_data(self, config, split): return Data() if split == "train" else None
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        {trouble}
        return model(batch).sum(), len(batch)
"""
SMALL = ["train.steps=4", "train.micro_batch_size=4", "launch.device=cpu"]
MARK = "PACELINE_TEST_MARK"


class Bench:
    """One folder, one mark in the environment by which every process of a test is found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.sessions: set[int] = set()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()

    def job(self, trouble: str) -> str:
        (self.folder / "job.py").write_text(JOB.replace("{trouble}", trouble))
        return "job.py:Job"

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
