"""Checkpoints on a CUDA device: a run that was stopped goes on as one that was not."""

import csv
import json
import signal
from pathlib import Path

import pytest

from tests.cli.bench import Bench, finish, wait_until
from tests.cli.program import paceline
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    needs_gpu,
]
TINY = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=128", "model.dim=256",
    "model.num_layers=2", "train.eval_every=off", "train.eval_samples=all", "launch.device=cuda",
    "train.steps=16", "checkpoint.every=8",
]  # fmt: skip


def losses(run: Path) -> list[float]:
    with (run / "training.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


KINDS = {
    "fp32": ["precision.mode=fp32", "precision.matmul=highest"],
    "bf16": ["precision.mode=bf16"],
    "fp16": ["precision.mode=fp16"],
    "zero3": ["launch.devices=[0,0]", "strategy.name=zero3"],
    "ddp": ["launch.devices=[0,0]"],
}
# Each kind in one of the two modes; in the other at night.
MODES = {"fp32": "async", "bf16": "sync", "fp16": "async", "zero3": "async", "ddp": "sync"}
CASES = [
    pytest.param(
        mode, more, id=f"{mode}-{kind}",
        marks=[] if MODES[kind] == mode else [pytest.mark.nightly],
    )
    for kind, more in KINDS.items()
    for mode in ("async", "sync")
]  # fmt: skip


@pytest.mark.parametrize(("mode", "more"), CASES)
def test_a_run_that_was_cut_off_goes_on(mode: str, more: list[str], tmp_path: Path) -> None:
    settings = [*TINY, *more, f"checkpoint.mode={mode}", "checkpoint.keep=3"]
    ran = paceline("train", "lm_tiny", *settings, "--out", "run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    whole = losses(tmp_path / "run")
    for name in ("step_16/manifest.json", "latest"):
        (tmp_path / "run/checkpoints" / name).unlink()
    (tmp_path / "run/result.json").unlink()
    ran = paceline("train", "--resume", "run", cwd=tmp_path)
    assert ran.code == 0 and "step_8 was used instead" in ran.err, ran.err
    again = losses(tmp_path / "run")
    assert again[:8] == whole[:8] and again == pytest.approx(whole, rel=1e-4)


def test_from_zero3_on_two_ranks_to_one_rank(tmp_path: Path) -> None:
    settings = [*TINY, "launch.devices=[0,0]", "strategy.name=zero3", "precision.mode=fp32"]
    assert paceline("train", "lm_tiny", *settings, "--out", "run", cwd=tmp_path).code == 0
    whole = losses(tmp_path / "run")
    (tmp_path / "run/checkpoints/step_16/manifest.json").unlink()
    (tmp_path / "run/result.json").unlink()
    ran = paceline(
        "train", "--resume", "run", "launch.devices=[0]", "strategy.name=ddp", cwd=tmp_path
    )
    assert ran.code == 0, ran.err
    assert losses(tmp_path / "run") == pytest.approx(whole, rel=1e-3)


def test_a_signal_is_answered_with_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    settings = [*TINY, "train.steps=100000", "launch.devices=[0,0]", "train.log_every=1"]
    process = bench.start("train", "lm_tiny", *settings, "--out", "run")
    table = tmp_path / "run/training.csv"
    wait_until(lambda: table.is_file() and len(table.read_text().splitlines()) > 5, 120, "steps")
    process.send_signal(signal.SIGTERM)
    ran = finish(process)
    assert ran.code == 75, ran.err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["checkpoints"]["last_step"] == result["steps"]
