"""A rank of speech_clip is killed: after the restart every step is as if it had not been."""

from pathlib import Path

import pytest

from paceline.records.tables import read_training
from tests.cli.bench import Bench, finish
from tests.harness import run_ranks
from tests.speech_clip import RECIPE, tiny

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 6
JOB = f"""
import os
from pathlib import Path
from paceline.workloads.speech_clip.workload import SpeechText

class Job(SpeechText):
    '''Rank 1 dies once, in its {STEPS - 1}th step, after a checkpoint and some steps.'''
    calls = 0
    def loss(self, model, batch):
        Job.calls += model.training
        mark = Path(os.environ["FIRED"])
        if Job.calls == {STEPS - 1} and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        return super().loss(model, batch)
"""
SETTINGS = [
    f"train.steps={STEPS}", "train.micro_batch_size=4", "launch.nproc=2", "loss.negatives=global",
    "train.log_every=1", "train.eval_every=off", "checkpoint.every=2", "data.cut_min_s=0.5",
    "data.cut_max_s=1.0", "optim.schedule.warmup_steps=1", "launch.max_restarts=1",
]  # fmt: skip
CASES = {
    "ddp": ["strategy.name=ddp"],
    "zero1": ["strategy.name=zero1", "data.num_workers=1"],
    "zero2": ["strategy.name=zero2"],
    "zero3": ["strategy.name=zero3"],
    "bf16": ["strategy.name=zero1", "precision.mode=bf16"],
    "fp16": ["strategy.name=ddp", "precision.mode=fp16", "precision.loss_scale=64"],
    "by_length": ["data.batch_by=length", "data.batch_length=4", "data.buckets=3"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_killed_rank_costs_no_step(name: str, tmp_path: Path) -> None:
    asked = tiny(*SETTINGS, *CASES[name])
    clean = run_ranks(tmp_path / "clean", RECIPE, asked).rows
    bench = Bench(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    words = ["train", RECIPE, "workload=job.py:Job", *asked, "--out", "run"]
    ran = finish(bench.start(*words, FIRED=str(tmp_path / "fired")), 200)
    assert ran.code == 0, ran.err
    first, second = bench.result()["attempts"]
    assert "SIGKILL" in first["cause"] and second["outcome"] == "ok"
    assert second["first_step"] > 1, "from a checkpoint"
    rows = list(read_training(tmp_path / "run/training.csv"))
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    for found, expected in zip(rows, clean, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5, nan_ok=True)
    assert len({row.loss for row in rows}) == STEPS
