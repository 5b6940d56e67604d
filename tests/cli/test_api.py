"""A program of a user's that calls Paceline: its class is in no file, and nothing guards its main
lines."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.cli.program import environment, paceline

NOTEBOOK = '''
import threading, time, torch, paceline
CELL = """
from torch import nn
from pydantic import Field

class Model(paceline.Section):
    width: int = Field(4, description="inputs")

class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((SIZE,), index / 64)

class Job(paceline.Workload):
    Model = Model
    def build_model(self, config): return nn.Linear(config.model.width, 1)
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch):
        if BAD: raise ValueError("planted")
        return (model(batch) ** 2).sum(), len(batch)
"""
SIZE, BAD = 4, False
exec(CELL, globals())  # as a notebook does: there is no file
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
torch.ones(8, 8) @ torch.ones(8, 8)
print("once")
small = {"train.steps": 4, "launch.nproc": 2, "launch.device": "cpu", "data.num_workers": 1}
result = paceline.train(Job, out="run", quiet=True, **small, **{"checkpoint.every": 2})
print(result.outcome, result.steps, result.world_size)
result = paceline.resume("run", Job, "train.steps=6", quiet=True)
print(result.outcome, result.steps, paceline.load_run("run").training.step.tolist())
two = {"launch.nproc": 2, "launch.device": "cpu"}
proof = paceline.verify(Job, "zero2", out="proof", quiet=True, **two)
print(proof.job, proof.exit_code, proof.proofs[0].ok)
last, before = (paceline.load_run("run").load_model(Job, step=n) for n in ("auto", 4))
print(last.training, last.weight.shape, torch.equal(last.weight, before.weight))
BAD = True
exec(CELL, globals())
try:
    paceline.train(Job, out="bad", quiet=True, **small)
except paceline.RunFailed as error:
    print(error.result.outcome, "planted" in str(error))
'''


@pytest.mark.slow
def test_a_class_of_a_notebook_trains_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    process = warm.start(
        [sys.executable, "-m", "notebook"], cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=100)
    assert out.splitlines() == [
        "once",
        "ok 4 2",
        "ok 6 [1, 2, 3, 4, 5, 6]",
        "python:Job 0 True",
        "False torch.Size([1, 4]) False",
        "crashed True",
    ], err
    assert err == ""
    # Another program cannot: no file of the run brings code.
    ran = paceline("train", "--resume", "run", "train.steps=8", cwd=tmp_path)
    assert ran.code == 2 and "paceline.resume(RUN_DIR, Job)" in ran.err
    assert not [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".pkl", ".py")]
