"""Launching and checking on one GPU: what it can prove of binding, sharing and rates."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.program import environment, paceline
from tests.jobs import write_line_job
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    needs_gpu,
]
JOB = [
    "lm_tiny", "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=16",
    "model.dim=32", "train.steps=12", "train.eval_every=off", "precision.mode=fp32",
    "train.log_every=1", "optim.name=sgd",
]  # fmt: skip


# A kernel that spins for minutes.
HANG = "if self.calls > 5: torch.cuda._sleep(1 << 40); torch.cuda.synchronize()"


def losses(run: Path) -> list[float]:
    return [float(row.split(",")[1]) for row in (run / "training.csv").read_text().splitlines()[1:]]


@pytest.mark.serial
def test_check_takes_less_than_45_s_and_keeps_the_rates(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    started_at = time.monotonic()
    ran = paceline("check", "launch.nproc=1", "--json", "--out", "check", cwd=tmp_path, **cache)
    assert time.monotonic() - started_at < 45
    report = json.loads(ran.out)
    assert ran.code == 0 and report["fit"], ran.err
    (rank,) = report["ranks"]
    rates = {rate.get("precision", "copy"): rate for rate in rank["rates"]}
    assert set(rates) == {"fp32", "tf32", "bf16", "fp16", "copy"}
    assert rates["bf16"]["tflop_per_s"] > 2 * rates["fp32"]["tflop_per_s"]
    assert any("proves little" in finding["what"] for finding in report["findings"])
    ran = paceline("train", *JOB, "launch.nproc=1", "--json", cwd=tmp_path, **cache)
    assert ran.code == 0, ran.err
    assert 0 < json.loads(ran.out)["matmul_share"] < 1


def test_two_ranks_share_a_gpu_when_asked(tmp_path: Path) -> None:
    """The same global batch on one rank and on two: the same losses."""
    one = ["launch.nproc=1", "train.micro_batch_size=16"]
    two = ["launch.devices=[0,0]", "train.micro_batch_size=8"]
    for name, more in (("one", one), ("two", two)):
        ran = paceline("train", *JOB, *more, "--out", name, cwd=tmp_path)
        assert ran.code == 0, ran.err
    launch = json.loads((tmp_path / "two/launch.json").read_text())
    assert launch["crew"]["backend"]["value"] == "gloo"
    assert [rank["device"] for rank in launch["ranks"]] == ["cuda:0", "cuda:0"]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


@pytest.mark.parametrize("recipe", [["lm_tiny", "data.source=synthetic"], ["mae_tiny"]])
def test_as_a_shell_starts_it_a_rank_takes_its_gpu(recipe: list[str], tmp_path: Path) -> None:
    """Ranks are forked: nothing that the server imports, also of transformers, may ask for GPUs."""
    place = ["train.steps=2", "launch.device=cuda", "launch.nproc=1"]
    ran = paceline("train", *recipe, *place, "--out", "run", cwd=tmp_path, cold=True)
    assert ran.code == 0, ran.err


def test_check_of_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    shared = paceline("check", "launch.devices=[0,0]", "--json", "--out", "s", cwd=tmp_path)
    report = json.loads(shared.out)
    assert shared.code == 0 and report["group"]["correctness"]["wrong"] == [], shared.err
    assert len({rank["device_id"] for rank in report["ranks"]}) == 1


@pytest.mark.parametrize("asked", ["launch.nproc=9", "launch.devices=[9]"])
def test_more_gpus_than_there_are_is_exit_3(asked: str, tmp_path: Path) -> None:
    ran = paceline("train", *JOB, asked, cwd=tmp_path)
    assert ran.code == 3 and "usable here" in ran.err


def test_under_torchrun_a_rank_takes_its_gpu(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m"]
    argv += ["paceline", "train", *JOB, "--out", "run"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 12


@pytest.mark.serial
def test_a_rank_that_hangs_on_the_gpu_is_ended(tmp_path: Path) -> None:
    write_line_job(tmp_path, HANG)
    ran = paceline(
        "train", "job.py:Job", "train.steps=4", "launch.progress_s=5", "launch.grace_s=5",
        "train.micro_batch_size=4", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 6 and "no progress for 5 s" in ran.err
    free, total = torch.cuda.mem_get_info()
    assert free > 0.9 * total, "the rank's memory has been given back"
