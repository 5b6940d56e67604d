"""Faults that are planted in a real run are named: the rank and the part, while it runs and at its
end; a terminal that takes no more of it holds nobody up."""

import csv
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.records.events import Event, iter_events
from tests import warm
from tests.cli.bench import SMALL, Bench, finish, wait_until
from tests.cli.program import Ran, environment, paceline
from tests.jobs import LINE, write_line_job
from tests.skips import needs_deepspeed

pytestmark = pytest.mark.slow

TINY = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=32", "model.dim=64",
    "model.num_layers=4", "train.eval_every=off", "train.eval_samples=all", "launch.device=cpu",
    "launch.nproc=2", "checkpoint.at_end=false",
]  # fmt: skip
SHARE = "0.5"  # of a step; a fifth is for unit tests and for the benchmark, on a quiet machine


def drill(
    folder: Path, fault: str, *words: str, job: Sequence[str] = ("lm_tiny", *TINY)
) -> tuple[Ran, dict[str, Any], list[Event]]:
    """Run a drill; return how it ended, what it found and what was noticed on the way."""
    ran = paceline(
        "drill", *job, *words, "--fault", fault, "--share", SHARE, "--out", "run", "--json",
        cwd=folder,
    )  # fmt: skip
    (told,) = json.loads(ran.out)
    return ran, told, list(iter_events(folder / "run" / "events.jsonl"))


def test_f24_a_slow_rank_is_named_while_it_runs_and_in_the_report(tmp_path: Path) -> None:
    """Steps that sleep take 50 ms and more on any machine, so 15 of them are the 0.75 s
    (`observe.rules.straggler_s`) for which a rank of shorter steps must be slow to be named."""
    slow_steps = [write_line_job(tmp_path, "time.sleep(0.05)"), *SMALL, "launch.nproc=2"]
    ran, told, events = drill(tmp_path, "slow_backward", "train.steps=60", job=slow_steps)
    assert ran.code == 0 and told["named"], ran.err
    (slow,) = [event for event in events if event.kind == "straggler"]
    assert slow.rank == 1 and slow.evidence["part"] == "backward"
    assert slow.step is not None and slow.step - 12 < 20, "within 20 steps of its first"
    summary = (tmp_path / "run/summary.md").read_text()
    assert "What stands out" in summary and "rank 1 is slow: backward" in summary
    assert "rank 1 is slow: backward" in (tmp_path / "run/report.html").read_text()


EXCHANGES = """
import torch, time
import torch.distributed as dist
from torch import nn
from paceline import Workload

class Job(Workload):
    def build_model(self, config):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    def build_data(self, config, split):
        return [torch.full((4,), n / 64) for n in range(64)] if split == "train" else None
    def loss(self, model, batch):
        time.sleep(0.05)
        return model(batch).sum(), len(batch)

class Own(Job):
    def loss(self, model, batch):
        total, size = super().loss(model, batch)
        with self.waiting_for_ranks():
            dist.all_reduce(total.detach().clone())
        return total, size
"""


@pytest.mark.parametrize(("job", "more"), [("Job", ["strategy.sync_batchnorm=true"]), ("Own", [])])
def test_f24_a_slow_rank_is_named_where_others_wait_in_their_forward_pass(
    job: str, more: list[str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(EXCHANGES)
    asked = [f"job.py:{job}", *SMALL, "launch.nproc=2", "train.steps=50", *more]
    ran, told, _ = drill(tmp_path, "slow_forward", job=asked)
    assert ran.code == 0 and told["named"], told["findings"]


def test_f21_a_collective_that_is_left_out_is_named_with_rank_and_step(tmp_path: Path) -> None:
    ran, _, events = drill(tmp_path, "desync", "train.steps=40")
    assert ran.code == 0, ran.err
    (seen,) = [event for event in events if event.kind == "desync"]
    assert (seen.rank, seen.step) == (1, 12)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero3", "pipeline", pytest.param("deepspeed", marks=needs_deepspeed)]
)
@pytest.mark.parametrize(
    "fault",
    ["kill", "hang", "slow_data", "slow_forward", "slow_backward", "slow_optimizer", "slow_disk",
     "nan", "out_of_memory", "full_disk"],
)  # fmt: skip
def test_every_fault_is_named_under_every_strategy(
    fault: str, strategy: str, tmp_path: Path
) -> None:
    ran, told, _ = drill(tmp_path, fault, f"strategy.name={strategy}")
    assert told["named"] and ran.code == 0, told["findings"]


@pytest.mark.nightly
def test_f25_a_stall_now_and_then_is_a_spike_and_no_straggler(tmp_path: Path) -> None:
    ran, told, events = drill(tmp_path, "spikes")
    assert ran.code == 0, told["findings"]
    assert "straggler" not in {f["kind"] for f in told["findings"]} | {e.kind for e in events}


def test_f22_shapes_that_differ_are_named_with_the_users_line(bench: Bench) -> None:
    trouble = (
        "import torch.distributed as dist; model.training and self.calls > 9 and"
        " dist.all_reduce(torch.zeros(100 + 50 * dist.get_rank()))"
    )
    ran = bench.train(trouble, "launch.nproc=2", "train.steps=30")
    assert ran.code == 5, ran.err
    found = json.loads((bench.folder / "run/findings.json").read_text())["findings"]
    (told,) = [f for f in found if f["kind"] == "shapes_differ"]
    assert "job.py" in told["words"]


UNEQUAL = """
class Uneven(Job):
    def units_per_sample(self, config): return None
    def units(self, batch): return float((1 + 29 * (batch[:, 0] > 0.75)).sum())
    def loss(self, model, batch): return model(batch).sum(), self.units(batch)
"""


def test_f23_unequal_shares_of_a_step_are_told(bench: Bench) -> None:
    """One sample in four has as much in it as thirty others: some rank holds the other up."""
    (bench.folder / "job.py").write_text(LINE.replace("{trouble}", "pass") + UNEQUAL)
    words = ["launch.nproc=2", "train.steps=40", "--out", "run"]
    ran = finish(bench.start("train", "job.py:Uneven", *SMALL, *words))
    assert ran.code == 0, ran.err
    found = json.loads((bench.folder / "run/findings.json").read_text())["findings"]
    (told,) = [f for f in found if f["kind"] == "unequal_batches"]
    assert told["rank"] is None and told["evidence"]["share"] > 0.2, told
    assert "data.buckets" in told["to_try"]


def test_a_rule_that_halts_leaves_its_name_and_a_checkpoint(bench: Bench) -> None:
    slow = "import os; os.environ['RANK'] == '1' and time.sleep(0.03)"
    words = ["launch.nproc=2", "train.steps=2000", "observe.rules.straggler=halt"]
    process = bench.start("train", bench.job(slow), *SMALL, *words, "--out", "run")
    ran = finish(process)
    assert ran.code == 75, ran.err
    assert (bench.folder / "run/.anomaly_type").read_text() == "straggler\n"
    assert (bench.folder / "run/.HALT").read_text() == "halt: straggler\n"
    assert bench.result()["checkpoints"]["num_written"] >= 1


def test_f26_a_terminal_that_takes_no_more_holds_no_rank_up(bench: Bench) -> None:
    """Its pipe is full after the first words, and nobody reads until the run is over."""
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * (room - 400))
    words = ["train", bench.job(""), *SMALL, "launch.nproc=2", "train.steps=30", "--out", "run"]
    talk = ["train.log_every=1", "observe.timing_ranks=all", f"name={'long' * 40}"]
    process = warm.start(
        [sys.executable, "-m", "paceline", *words, *talk], cwd=bench.folder, env=environment(),
        stdout=subprocess.PIPE, stderr=writer, text=True, start_new_session=True,
    )  # fmt: skip
    bench.sessions.add(process.pid)
    os.close(writer)
    wait_until((bench.folder / "run/report.html").is_file, 100, "the run is over")
    assert bench.result()["outcome"] == "ok" and bench.result()["steps"] == 30
    assert process.poll() is None, "it still has something to say"
    with os.fdopen(reader) as file:
        told = file.read()
    assert process.wait(30) == 0 and "finished 30 steps" in told


SLOW_DISK = """
import os
write = os.write
def slowly(handle, data):
    told = os.readlink(f"/proc/self/fd/{handle}")
    if told.endswith((".csv", "log.txt")) and "RANK" in os.environ: time.sleep(0.3)
    return write(handle, data)
os.write = slowly
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_f26_a_slow_disk_holds_no_step_up(bench: Bench) -> None:
    """Each write of tables and logs takes 0.3 s, and all of it is there at the end."""
    (bench.folder / "job.py").write_text(LINE.replace("{trouble}", "pass") + SLOW_DISK)
    words = ["launch.nproc=2", "train.steps=60", "train.log_every=1", "observe.timing_ranks=all"]
    ran = finish(bench.start("train", "job.py:Job", *SMALL, *words, "--out", "run"))
    assert ran.code == 0, ran.err
    steps = rows_of(bench.folder / "run/ranks/rank0/steps.csv")
    assert [row["step"] for row in steps] == [str(step) for step in range(1, 61)]
    assert sum(float(row["wall_s"]) for row in steps[5:]) < 4, "less than two of 55 writes a step"
    assert len(rows_of(bench.folder / "run/training.csv")) == 60
    assert (bench.folder / "run/ranks/rank1/log.txt").read_text().count("TimingRank") == 60
