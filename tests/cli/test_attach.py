"""`paceline.attach` in ranks that somebody else has started: as torchrun starts them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import load_run
from paceline.errors import Outcome
from tests import warm
from tests.cli.program import environment, free_port, paceline

SCRIPT = """
import os, signal, sys, time, torch, paceline
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, x.sum(1))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.attach(model, optimizer, loader, out="run", epochs=2, log_every=2, progress_s=2,
                      trackers=["tensorboard"])
for epoch in range(2):
    for x, y in run.batches():
        loss = ((model(x).squeeze(1) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.record(loss, len(x))
        if dist.get_rank() == 1 and run.step == 5:
            {trouble}
run.close()
dist.destroy_process_group()
"""


def run_two(folder: Path, trouble: str, script: str = SCRIPT) -> tuple[int, int]:
    (folder / "script.py").write_text(script.replace("{trouble}", trouble))
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": free_port()}  # fmt: skip
    both = [
        warm.start(
            [sys.executable, "-m", "script"], cwd=folder, text=True,
            env=environment(**place, RANK=rank, LOCAL_RANK=rank), stderr=subprocess.STDOUT,
            stdout=(folder / f"{rank}.log").open("w"),
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    first, second = (process.wait(timeout=60) for process in both)
    return first, second


@pytest.mark.slow
def test_two_ranks_leave_one_run(tmp_path: Path) -> None:
    assert run_two(tmp_path, "pass") == (0, 0), (tmp_path / "0.log").read_text()
    run = load_run(tmp_path / "run")
    assert run.result.outcome is Outcome.OK and run.result.world_size == 2
    assert run.result.steps == 8 and run.plan.batch.global_size == 8
    assert run.plan.strategy.value == "ddp"
    # Both ranks' batches of step 1, with the weights of seed 0.
    import torch

    torch.manual_seed(0)
    x = torch.randn(32, 4)
    model = torch.nn.Linear(4, 1)
    expected = ((model(x[:8]).squeeze(1) - x[:8].sum(1)) ** 2).mean().item()
    assert run.training.loss[0] == pytest.approx(expected)
    assert run.steps["rank"].value_counts().to_dict() == {0: 8, 1: 8}
    assert list((tmp_path / "run" / "tensorboard").glob("events*")) and not run.result.notes
    ran = paceline("report", "run", cwd=tmp_path)
    assert ran.code == 0 and ran.out.strip() == "run/report.html"


@pytest.mark.slow
def test_a_rank_that_raises_is_the_cause(tmp_path: Path) -> None:
    assert 0 not in run_two(tmp_path, "raise ValueError('planted')")
    result = load_run(tmp_path / "run").result
    assert result.outcome is Outcome.CRASHED and result.failure is not None
    assert result.failure.rank == 1 and "planted (script.py:" in result.failure.message
    assert "ValueError: planted" in (tmp_path / "1.log").read_text(), "the script's own traceback"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    assert run_two(tmp_path, "time.sleep(60)") == (6, 6)
    result = load_run(tmp_path / "run").result
    assert result.outcome is Outcome.STALL and result.failure is not None
    assert result.failure.rank == 1 and "stands in script.py:" in result.failure.message
    assert (tmp_path / "run" / "report.html").is_file()


SLOW = """
import time, torch, paceline
import torch.distributed as dist
from torch import nn

class Own(nn.Module):
    def forward(self, x):
        late = dist.get_rank() == 1
        x.register_hook(lambda gradient: time.sleep(0.03 if late else 0.01))
        return x

dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(4, 4), Own(), nn.BatchNorm1d(4), nn.Linear(4, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randn(8, 4) for _ in range(48)]
run = paceline.attach(model, optimizer, batches, out="run", batch_size=8, accumulate=2)
for number, x in enumerate(run.batches()):
    model.require_backward_grad_sync = number % 2 == 1  # as no_sync does
    loss = (model(x) ** 2).mean()
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
    run.record(loss, len(x))
run.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_that_is_slow_in_backward_is_named(tmp_path: Path) -> None:
    """Twice 30 ms in a step, against twice 10: the early rank waits as the second pass ends."""
    assert run_two(tmp_path, "", SLOW) == (0, 0), (tmp_path / "0.log").read_text()
    (told,) = [f for f in load_findings(tmp_path / "run") if f["kind"] == "straggler"]
    assert told["rank"] == 1 and told["evidence"]["part"] == "backward", told
    assert 0.03 < told["evidence"]["extra_s"] < 0.06, "2 x 20 ms"


def load_findings(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "findings.json").read_text())["findings"]
    return found


@pytest.mark.nightly
def test_a_signal_is_a_preemption(tmp_path: Path) -> None:
    codes = run_two(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    assert codes[1] == 75
    result = load_run(tmp_path / "run").result
    assert result.outcome is Outcome.PREEMPTED and result.failure is None
