"""A job whose troubles stand at named steps, and what must be true of a run after them.

Every sample's value tells its index, and so a batch tells its step: troubles are placed, not timed.
"""

import csv
import json
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import CheckpointFolder
from tests.cli.bench import Bench, finish, wait_until
from tests.cli.program import Ran
from tests.saved import require_sound

STEPS, EVERY = 12, 5
JOB = '''
import ctypes, json, os, random, resource, shutil, signal, sys, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
from paceline import Workload
from paceline.data.cursor import Order

HERE, SAMPLES, GLOBAL = Path(__file__).parent, 96, 8
RANK = os.environ.get("RANK")
ids = Order(SAMPLES, 0).at(np.arange(SAMPLES))
STEP_OF = {int(index): position // GLOBAL + 1 for position, index in enumerate(ids)}

def once(name):
    """True for the first who asks, over all ranks and attempts."""
    try:
        os.close(os.open(HERE / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def stand(name, seconds=0.3):
    """Tell the test that this point is reached, and give it time to do its worst."""
    (HERE / name).touch()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)

def die():
    """By SIGKILL, leaving the time of death."""
    (HERE / "killed").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)

def step_again():
    """At the first loss after a death: how long it took."""
    killed = HERE / "killed"
    if RANK == "0" and killed.exists():
        with (HERE / "recoveries").open("a") as file:
            file.write(f"{time.time() - float(killed.read_text())}\\n")
        killed.unlink()

class Data:
    fingerprint = "numbers"
    def __init__(self, split): self.split = split
    def __len__(self): return SAMPLES if self.split == "train" else 16
    def __getitem__(self, index):
        step, is_eval = STEP_OF[int(index)], self.split == "val"
        {item}
        return torch.full((4,), index / SAMPLES + 10 * is_eval)

class Job(Workload):
    def prepare(self, config, say):
        {prepare}
        return {}
    def build_model(self, config):
        {build}
        return nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    def build_data(self, config, split): return Data(split)
    def loss(self, model, batch):
        first = float(batch[0, 0])
        is_eval = first > 5
        step = 0 if is_eval else STEP_OF[round(first * SAMPLES)]
        if model.training or is_eval:
            {loss}
        return model(batch).square().sum(), len(batch)
'''
SETTINGS = [
    f"train.steps={STEPS}", "train.micro_batch_size=4", "launch.device=cpu", "launch.nproc=2",
    f"checkpoint.every={EVERY}", "checkpoint.keep=3", "optim.lr=0.01", "train.log_every=4",
    "observe.sample_ids=true", "checkpoint.mode=sync",
]  # fmt: skip


def write_job(bench: Bench, **troubles: str) -> str:
    text = JOB
    for place in ("item", "prepare", "build", "loss"):
        text = text.replace(f"{{{place}}}", troubles.get(place, "pass"))
    (bench.folder / "job.py").write_text(text)
    return "job.py:Job"


def begin(bench: Bench, *settings: str, **troubles: str) -> Any:
    """The program in the background, with troubles in its job."""
    job = write_job(bench, **troubles)
    return bench.start("train", job, *SETTINGS, *settings, "--out", "run")


def train(bench: Bench, *settings: str, **troubles: str) -> Ran:
    return finish(begin(bench, *settings, **troubles))


def resume(bench: Bench, *settings: str) -> Ran:
    return finish(bench.start("train", "--resume", "run", *settings))


def wait_for(bench: Bench, name: str) -> None:
    wait_until((bench.folder / name).exists, 60, f"the point {name}")


def rows(bench: Bench) -> list[tuple[str, ...]]:
    """Step, loss, gradient norm and validation loss of every step, as written."""
    with (bench.folder / "run/training.csv").open(newline="") as file:
        names = ("step", "loss", "grad_norm", "val_loss")
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def samples(bench: Bench) -> dict[int, list[int]]:
    """The ledger: which samples each step took, over all ranks, in the order of the run."""
    found: dict[int, list[tuple[int, int, list[int]]]] = {}
    for path in (bench.folder / "run/ranks").glob("rank*/samples.csv"):
        rank = int(path.parent.name.removeprefix("rank"))
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                ids = [int(index) for index in row["sample_ids"].split()]
                found.setdefault(int(row["step"]), []).append((int(row["microbatch"]), rank, ids))
    return {
        step: [index for _, _, ids in sorted(parts) for index in ids]
        for step, parts in sorted(found.items())
    }


def folder(bench: Bench) -> CheckpointFolder:
    return CheckpointFolder(bench.folder / "run/checkpoints")


def require_usable(bench: Bench) -> None:
    """Every checkpoint is sound, nothing temporary is left, the record is whole."""
    kept = folder(bench)
    for step in kept.steps():
        require_sound(kept, step)
    left = [path.name for path in kept.root.iterdir() if path.name.startswith(".")]
    assert left == [], "temporary folders are left"
    json.loads((bench.folder / "run/result.json").read_text())


def flip_bit(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)
