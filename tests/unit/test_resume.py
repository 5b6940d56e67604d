"""What may be different when a run goes on, and why the rest may not."""

import math
from pathlib import Path

import pytest

from paceline.cli.talk import ConsoleTalk
from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.records.rundir import RunDir
from paceline.run import resume
from paceline.run.flow import resume_job
from paceline.run.resume import Change, Resumption, explain_schedule
from tests.kept import TINY_LM, keep, make_run


def longer(before: int, after: int, *more: str) -> Resumption:
    settings = [f"train.steps={after}", "optim.lr=1.0", "optim.schedule.warmup_steps=0"]
    job = load_job("lm_tiny", [*settings, "optim.schedule.floor=0.1", *more])
    return Resumption(RunDir(Path()), job, [Change("train.steps", before, after)], 8)


@pytest.mark.parametrize(
    "key",
    ["train.steps", "train.epochs", "train.stop_after", "launch.nproc", "strategy.name",
     "data.num_workers", "train.log_every"],
)  # fmt: skip
def test_steps_and_how_it_is_computed_are_free(key: str) -> None:
    resume._require_free([Change(key, 1, 2)])


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("optim.lr", "other updates"),
        ("optim.schedule.name", "the curve"),
        ("train.micro_batch_size", "another number of samples"),
        ("train.seed", "another order"),
        ("data.source", "other samples"),
        ("precision.mode", "rounded differently"),
        ("train.best", "another measure"),
        ("strategy.sync_batchnorm", "gradients"),
        ("model.dropout", "the same weights"),
    ],
)
def test_all_else_says_what_it_would_change(key: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resume._require_free([Change(key, 1, 2)])
    assert f"{key}: 1 -> 2: " in str(refused.value) and why in str(refused.value)
    assert "--allow-change accepts it" in str(refused.value)


def test_more_steps_stretch_the_cosine() -> None:
    told = explain_schedule(longer(60, 70), last_step=60)
    now = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 61 / 70))  # lr 1, floor 0.1
    assert "ends at step 70, not 60" in told
    assert f"step 60 took 0.1, step 61 takes {now:.3g}, and the last one 0.1" in told


def test_the_end_of_a_one_cycle_is_its_own() -> None:
    told = explain_schedule(longer(60, 70, "optim.schedule.name=onecycle"), last_step=60)
    assert "the onecycle of the learning rate now ends at step 70" in told
    assert told.endswith("and the last one 4e-06")  # 1 / 25 / 10,000


def test_a_constant_rate_stays_and_nothing_is_said_without_a_change() -> None:
    assert "constant" in explain_schedule(longer(60, 70, "optim.schedule.name=constant"), 60)
    epochs = [Change("train.steps", 60, "auto"), Change("train.epochs", "off", 2.0)]
    more = Resumption(RunDir(Path()), longer(60, 70).job, epochs, 8)
    assert "ends with the run, whose length has changed" in explain_schedule(more, 60)
    default = Resumption(RunDir(Path()), more.job, [Change("train.steps", "auto", 200)], 8)
    assert "ends at step 200, not 100" in explain_schedule(default, 60)
    unchanged = Resumption(RunDir(Path()), longer(60, 70).job, [], 8)
    assert explain_schedule(unchanged, 60) == ""
    assert "took" not in explain_schedule(longer(60, 70), last_step=0)
    assert "took" not in explain_schedule(longer(60, 50), last_step=55)


def test_fewer_steps_than_were_taken_are_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run, tensors = make_run(tmp_path / "run", "lm_tiny", [*TINY_LM, "launch.device=cpu"])
    keep(run, tensors, 76)
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    job = load_job("lm_tiny", [*TINY_LM, "launch.device=cpu", "train.steps=60"])
    resumption = Resumption(run, job, [Change("train.steps", 1000, 60)], 8)
    with pytest.raises(ConfigError, match="to end after 60 steps, .* is of step 76"):
        resume_job(resumption, ConsoleTalk(quiet=True))
    after = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    assert {path: said for path, said in after.items() if path.name != ".lock"} == before
