"""A rank of speech_clip is killed in the middle: after the restart every step is as if it were not."""

import csv
from pathlib import Path

import pytest

from tests.cli.bench import Bench, finish
from tests.speech_clip import RECIPE, tiny

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
nightly = pytest.mark.nightly
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
    "fp16": ["strategy.name=ddp", "precision.mode=fp16"],
    "by_length": ["strategy.name=ddp", "data.batch_by=length", "data.buckets=3"],
}


def train(folder: Path, name: str, is_killed: bool) -> tuple[Bench, list[list[str]]]:
    """The losses and norms of a run, of which one rank is killed or none."""
    folder.mkdir()
    bench = Bench(folder)
    (folder / "job.py").write_text(JOB)
    if not is_killed:
        (folder / "fired").touch()
    words = ["train", RECIPE, "workload=job.py:Job", *tiny(*SETTINGS), *CASES[name]]
    ran = finish(bench.start(*words, "--out", "run", FIRED=str(folder / "fired")), 200)
    assert ran.code == 0, ran.err
    with (folder / "run/training.csv").open() as file:
        rows = [[row["step"], row["loss"], row["grad_norm"]] for row in csv.DictReader(file)]
    return bench, rows


@pytest.mark.parametrize(
    "name", ["zero1", *(pytest.param(name, marks=nightly) for name in CASES if name != "zero1")]
)
def test_a_killed_rank_costs_no_step(name: str, tmp_path: Path) -> None:
    _, clean = train(tmp_path / "clean", name, is_killed=False)
    bench, rows = train(tmp_path / "killed", name, is_killed=True)
    first, second = bench.result()["attempts"]
    assert "SIGKILL" in first["cause"] and second["outcome"] == "ok"
    assert second["first_step"] > 1, "from a checkpoint"
    assert rows == clean and len({loss for _, loss, _ in rows}) == STEPS
