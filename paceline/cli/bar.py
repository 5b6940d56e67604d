"""The progress bar of a run: steps, and below them loss, metrics, speed, MFU, memory.

It is drawn a few times a second from the last row of training.csv, by a thread of this process:
ranks know nothing of it.
"""

import csv
from collections import deque
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from paceline.metrics import TRAIN, VAL
from paceline.records import Plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_header
from paceline.records.tails import Tail
from paceline.records.words import duration, elapsed, number, size

REFRESHES_PER_S = 4
NUM_RECENT = 50  # steps whose median speed is shown, so that one slow step does not jump
MAX_NAME = 24


class Bar:
    """Call `update` with each row, `stop` at the end; `row` is kept with the last evaluation."""

    def __init__(self, console: Console, run: RunDir, plan: Plan) -> None:
        self._files, self._plan, self._row = run, plan, dict[str, str]()
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._memory = MemoryTail(run)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        name = plan.name if len(plan.name) <= MAX_NAME else f"{plan.name[: MAX_NAME - 1]}…"
        self._task = self._progress.add_task(name, total=plan.steps, left="")
        self._live = Live(
            console=console, refresh_per_second=REFRESHES_PER_S, get_renderable=self.draw
        )

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def update(self, row: dict[str, str]) -> None:
        """Take in a row. An evaluation stays in sight until the next one."""
        kept = {name: text for name, text in self._row.items() if name.startswith("val")}
        self._row = {**row, **{name: row.get(name) or text for name, text in kept.items()}}
        if row["warmup"] == "0":
            self._recent.append(float(row["step_s"]))

    def draw(self) -> Any:
        """Return what the terminal shows now."""
        if self._row:
            left = self._left_s()
            said = f"about {elapsed(left)} left" if left is not None and left >= 1 else ""
            self._progress.update(self._task, completed=int(self._row["step"]), left=said)
        told = [self._numbers(), self._speeds()] if self._row else [["starting ranks"]]
        # A narrow terminal cuts a line off: a bar of changing height could not be redrawn.
        lines = [Text("  ".join(each), no_wrap=True, overflow="ellipsis") for each in told]
        return Group(self._progress, *lines)

    def _left_s(self) -> float | None:
        """Return how long the steps to come take; None while only the slow first ones are known."""
        if not self._recent:
            return None
        return (self._plan.steps - int(self._row["step"])) * median(self._recent)

    def _numbers(self) -> list[str]:
        row, plan = self._row, self._plan
        parts = [f"loss {number(float(row['loss']))}"]
        if plan.epochs is not None:
            epoch = int(row["step"]) / plan.steps * plan.epochs
            parts.insert(0, f"epoch {epoch:.2f}/{plan.epochs:g}")
        if row["val_loss"]:
            parts.append(f"validation {number(float(row['val_loss']))}")
        metrics = {name: text for name, text in row.items() if name.startswith((TRAIN, VAL))}
        return parts + [f"{name} {number(float(text))}" for name, text in metrics.items() if text]

    def _speeds(self) -> list[str]:
        """Return speed, MFU where the peak is known, and memory, over the last steps."""
        row, plan = self._row, self._plan
        step_s = median(self._recent) if self._recent else float(row["step_s"])
        unit = "tokens_per_s" if row["tokens_per_s"] else "samples_per_s"
        rate = float(row[unit]) * float(row["step_s"]) / step_s
        parts = [f"{number(rate)} {unit.replace('_per_', '/')}", f"{duration(step_s)}/step"]
        flops, peak = self._files.read_flops() or plan.flops_per_sample.value, plan.peak_flops.value
        if flops and peak:
            mfu = flops * plan.batch.global_size / step_s / (plan.world_size * peak)
            parts.append(f"MFU {mfu:.1%}")
        memory = self._memory.peak_bytes()
        return [*parts, f"peak {size(memory)}"] if memory else parts


class MemoryTail:
    """The most memory that telemetry.csv has seen: of the fullest GPU; on CPUs of rank 0."""

    def __init__(self, run: RunDir) -> None:
        self._tail, self._columns = Tail(run.telemetry), list[str]()
        self._peak = 0.0

    def peak_bytes(self) -> int:
        if not self._columns:
            self._columns = read_header(self._tail.path)
        for cells in csv.reader(self._tail.lines()):
            row = dict(zip(self._columns, cells, strict=False))
            on_gpu = row.get("source", "").startswith("gpu")
            text = row.get("memory_bytes" if on_gpu else "rss_bytes", "")
            if text.replace(".", "", 1).isdigit():
                self._peak = max(self._peak, float(text))
        return int(self._peak)
