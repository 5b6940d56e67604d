"""What a long run costs: its tables of a million rows read, and its memory and files while it runs.

    python benchmarks/long_runs.py tables [--rows 1000000]
    python benchmarks/long_runs.py steps [--steps 200000] [--ranks 1 2]

`tables` trains for a few steps on two ranks, puts tables of a million rows into the run directory
and a copy of it, and runs `paceline report` and `paceline compare` as processes of their own.
Goal: each below 500 MB and 10 s, the start of Python included.

`steps` trains a tiny model for 200,000 steps, with evaluations and checkpoints, and looks at every
process of the run and at every file once a second. The first fifth is warm-up.
Goal: no process grows by more than 5 MB after it, files grow in proportion to steps and stay small,
heartbeat files stop growing.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

MAX_MB, MAX_S, MAX_GROWTH_MB = 500, 10, 5
WARMUP_SHARE = 0.2
JOB = """
import torch
from torch import nn
from paceline import Workload

class Data:
    fingerprint = "line"
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index): return torch.full((4,), index / self.size)

class Job(Workload):
    def build_model(self, config): return nn.Linear(4, 1)
    def build_data(self, config, split): return Data(4096 if split == "train" else 16)
    def loss(self, model, batch): return model(batch).square().sum(), len(batch)
"""
SETTINGS = ["launch.device=cpu", "train.micro_batch_size=4", "data.num_workers=0", "optim.lr=1e-4"]
ENVIRONMENT = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def train_words(*settings: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "train", "job.py:Job", *SETTINGS, *settings]


# tables


def make_long(run: Path, num_rows: int) -> None:
    """Write tables of `num_rows` rows into a finished run's directory, in its own columns."""
    draw = np.random.default_rng(0)
    for path in (run / "training.csv", *run.glob("ranks/rank*/steps.csv")):
        header, *rows = path.read_text().splitlines()
        columns, last = header.split(","), rows[-1].split(",")
        with path.open("w") as file:
            file.write(header + "\n")
            for first in range(1, num_rows + 1, 10_000):
                steps = range(first, min(first + 10_000, num_rows + 1))
                noise = draw.uniform(0.9, 1.1, (len(steps), len(columns)))
                file.writelines(_rows(columns, last, steps, noise))


def _rows(columns: list[str], like: list[str], steps: range, noise: np.ndarray) -> Iterator[str]:
    for step, factors in zip(steps, noise, strict=True):
        cells = [
            f"{float(cell) * factor:.10g}" if cell not in ("", "0", "1") else cell
            for cell, factor in zip(like, factors, strict=True)
        ]
        cells[columns.index("step")] = str(step)
        if "val_loss" in columns:
            cells[columns.index("val_loss")] = "0.5" if step % 1000 == 0 else ""
        yield ",".join(cells) + "\n"


def measure(folder: Path, *words: str) -> tuple[float, float, float]:
    """Return the seconds, those of them on a core, and the peak resident set in MB of a command."""
    started_at = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=folder, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"paceline {' '.join(words)} failed"
    seconds = time.monotonic() - started_at
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def tables(num_rows: int) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        words = train_words("train.steps=20", "launch.nproc=2", "--out", "run")
        subprocess.run(words, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
        make_long(folder / "run", num_rows)
        shutil.copytree(folder / "run", folder / "other")
        read = [folder / "run/training.csv", *folder.glob("run/ranks/rank*/steps.csv")]
        size_mb = sum(path.stat().st_size for path in read) / 1e6
        load = f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores beside this one"
        print(f"{num_rows:,} rows of 2 ranks, {size_mb:.0f} MB of tables a run; {load}")
        met = True
        for words in (["report", "run"], ["compare", "run", "other"]):
            seconds, on_core_s, peak_mb = measure(folder, *words)
            is_met = seconds <= MAX_S and peak_mb <= MAX_MB
            met = met and is_met
            goal = f"goal {MAX_S} s and {MAX_MB} MB: {'met' if is_met else 'MISSED'}"
            took = f"{seconds:5.1f} s ({on_core_s:4.1f} s on a core)"
            print(f"paceline {' '.join(words):<18} {took} {peak_mb:5.0f} MB   {goal}")
        print(f"report.html has {(folder / 'run/report.html').stat().st_size / 1e3:.0f} kB")
    return met


# steps


@dataclass
class Watched:
    """What was seen of a run: by process its resident set in MB, by file its bytes; each with the
    step that the run had reached."""

    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def watch(process: subprocess.Popen[bytes], run: Path) -> Watched:
    found = Watched()
    top = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(1)
        step = _last_step(run)
        if not step:
            continue
        try:
            names = _names(run) | {top.pid: "supervisor"}
            for each in [top, *top.children(recursive=True)]:
                seen = found.memory.setdefault(names.get(each.pid, _other(each)), [])
                seen.append((step, each.memory_info().rss / 1e6))
        except psutil.NoSuchProcess:
            continue
        for path in run.rglob("*"):
            if path.is_file() and "checkpoints" not in path.parts:
                seen_bytes = found.files.setdefault(str(path.relative_to(run)), [])
                seen_bytes.append((step, path.stat().st_size))
    return found


def _last_step(run: Path) -> int:
    try:
        return int.from_bytes((run / "ranks/rank0/step").read_bytes(), "little")
    except OSError:
        return 0


def _names(run: Path) -> dict[int, str]:
    lines = [line.split() for line in (run / "launcher.log").read_text().splitlines()]
    return {int(line[-1]): f"rank {line[4]}" for line in lines if "process" in line}


def _other(process: psutil.Process) -> str:
    return "fork server" if "forkserver" in " ".join(process.cmdline()) else "resource tracker"


def growth(seen: list[tuple[int, float]], num_steps: int) -> tuple[float, float, float]:
    """Return the memory at the end of the warm-up and at the end of the run, each the median of a
    twentieth of the steps, and the slope in between per 100,000 steps."""
    # Not the last step: then the supervisor reads all tables for the report.
    late = [(step, mb) for step, mb in seen if WARMUP_SHARE * num_steps <= step < num_steps]
    reach = num_steps / 20
    begin = statistics.median(mb for step, mb in late if step <= late[0][0] + reach)
    end = statistics.median(mb for step, mb in late if step >= late[-1][0] - reach)
    steps, values = np.array(late).T
    slope = float(np.polyfit(steps, values, 1)[0]) * 1e5 if len(late) > 2 else 0.0
    return begin, end, slope


def print_memory(found: Watched, num_steps: int) -> bool:
    met = True
    for name, seen in sorted(found.memory.items()):
        if len(seen) < 10:
            continue
        begin, end, slope = growth(seen, num_steps)
        is_met = end - begin <= MAX_GROWTH_MB
        met = met and is_met
        print(
            f"  {name:<18} {begin:7.1f} MB after warm-up, {end:7.1f} MB at the end,"
            f" slope {slope:+.2f} MB per 100,000 steps: {'flat' if is_met else 'GROWS'}"
        )
    return met


def print_files(found: Watched, num_steps: int) -> None:
    for name, seen in sorted(found.files.items()):
        half = next(
            size for step, size in seen if step >= num_steps / 2 or (step, size) == seen[-1]
        )
        last = seen[-1][1]
        if last > 50_000:
            print(
                f"  {name:<28} {last / 1e6:7.2f} MB, {last / num_steps:6.1f} bytes a step,"
                f" {last / half:.2f} times what it was half way"
            )


def steps(num_steps: int, num_ranks: int) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        words = train_words(
            f"train.steps={num_steps}", f"launch.nproc={num_ranks}", "train.log_every=100",
            f"train.eval_every={num_steps // 100}", f"checkpoint.every={num_steps // 20}",
            "checkpoint.keep=2", "--out", "run",
        )  # fmt: skip
        process = subprocess.Popen(
            words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        found = watch(process, folder / "run")
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.returncode == 0, said
        result = json.loads((folder / "run/result.json").read_text())
        print(
            f"{num_steps:,} steps on {num_ranks} rank{'s' * (num_ranks > 1)}:"
            f" {result['elapsed_s']:.0f} s, step p50 {result['step_s']['p50'] * 1e6:.0f} us"
        )
        met = print_memory(found, num_steps)
        print_files(found, num_steps)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=["tables", "steps"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    if asked.mode == "tables":
        met = tables(asked.rows)
    else:
        met = all([steps(asked.steps, num_ranks) for num_ranks in asked.ranks])
    print("all goals met" if met else "a goal was MISSED")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
