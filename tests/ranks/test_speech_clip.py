"""Contrastive training on several ranks: with negatives of all of them it is one large batch."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.data.collate import collate
from paceline.job import load_job
from paceline.launch.archive import archive_left_over, begin_attempt
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.train.worker import RankRun
from paceline.workloads.speech_clip.negatives import loss_of
from tests.harness import RankEnds, alone, machine, run_each, run_here, run_ranks, start_ranks
from tests.speech_clip import RECIPE, tiny

pytest.importorskip("transformers")
nightly = pytest.mark.nightly
pytestmark = pytest.mark.slow

STEPS = 5
SGD = [
    "optim.name=sgd", "optim.lr=0.05", "optim.weight_decay=0.01", "optim.schedule.warmup_steps=1",
    f"train.steps={STEPS}", "train.global_batch_size=8", "loss.negatives=global",
    "train.log_every=2", f"train.eval_every={STEPS}", "data.cut_min_s=0.5", "data.cut_max_s=1.0",
    "checkpoint.every=off",
]  # fmt: skip
STRATEGIES = {
    "ddp": ["strategy.name=ddp"],
    "zero1": ["strategy.name=zero1", "data.num_workers=1"],  # what is cut is the same there
    "zero2": ["strategy.name=zero2"],
    "zero3": ["strategy.name=zero3"],
    "deepspeed": ["strategy.name=deepspeed", "strategy.stage=1"],
}


def pairs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)


def model_of(negatives: str, capacity: int | None) -> SimpleNamespace:
    scale = torch.tensor([3.0], requires_grad=True)
    return SimpleNamespace(negatives=negatives, capacity=capacity, scale=scale)


def contrast(run: RunDir, place: RankId) -> None:
    """Three pairs on the first rank, two on the second; places for four, or as many as needed."""
    own = slice(0, 3) if place.rank == 0 else slice(3, 5)
    found = []
    for capacity in (None, 4):
        speech, text = pairs()
        model = model_of("global", capacity)
        loss, num_right = loss_of(model, speech[own], text[own])
        loss.backward()
        found.append((loss.detach(), num_right, speech.grad, text.grad, model.scale.grad))
    torch.save(found, run.rank(place.rank) / "found.pt")


def test_gathered_losses_and_gradients_sum_to_those_of_one_batch(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    start_ranks(run, 2, contrast)
    ranks = [torch.load(run.rank(rank) / "found.pt") for rank in range(2)]
    speech, text = pairs()
    model = model_of("local", None)
    loss, num_right = loss_of(model, speech, text)
    loss.backward()
    expected = (loss.detach(), num_right, speech.grad, text.grad, model.scale.grad)
    for first, second in zip(*ranks, strict=True):
        for one, two, both in zip(first, second, expected, strict=True):
            torch.testing.assert_close(one + two, both)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RankEnds:
    one = tiny(*SGD, "train.micro_batch_size=8", "strategy.name=ddp")
    return run_here(tmp_path_factory.mktemp("reference") / "run", RECIPE, one)


@pytest.mark.parametrize(
    "rows", [["ddp"], pytest.param(["zero1", "zero2", "zero3"], marks=nightly)]
)
def test_two_ranks_equal_one(rows: list[str], reference: RankEnds, tmp_path: Path) -> None:
    two = tiny(*SGD, "train.micro_batch_size=4", "launch.nproc=2")
    cases = {row: [*two, *STRATEGIES[row]] for row in rows}
    for row, ends in run_each(tmp_path, RECIPE, cases).items():
        assert_same(reference, ends, row)
        with ends.run.steps(0).open() as file:
            assert all(float(step["forward_blocked_s"]) > 0 for step in csv.DictReader(file)), row


@nightly
def test_deepspeed_equals_one_process(reference: RankEnds, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    two = tiny(*SGD, "train.micro_batch_size=4", "launch.nproc=2", *STRATEGIES["deepspeed"])
    assert_same(reference, run_ranks(tmp_path / "run", RECIPE, two), "deepspeed")


@nightly
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_half_precision_is_near_the_whole(mode: str, reference: RankEnds, tmp_path: Path) -> None:
    two = tiny(*SGD, "train.micro_batch_size=4", "launch.nproc=2", *STRATEGIES["zero1"])
    half = [f"precision.mode={mode}", *(["precision.loss_scale=64"] if mode == "fp16" else [])]
    ends = run_ranks(tmp_path / "run", RECIPE, [*two, *half])
    assert not any(row.skipped for row in ends.rows)
    found, expected = ([row.loss for row in each.rows] for each in (ends, reference))
    assert found == pytest.approx(expected, rel=0.03) and found != expected


@nightly
def test_batches_by_length_compete_with_those_of_other_ranks(tmp_path: Path) -> None:
    """Ranks have unequally many pairs, and the loss is that of all of them in one batch."""
    asked = tiny(
        "optim.name=sgd", "optim.lr=1e-9", "train.steps=1", "train.micro_batch_size=4",
        "loss.negatives=global", "data.batch_by=length", "data.batch_length=12", "data.buckets=3",
        "data.cut_max_s=off", "train.eval_every=off", "checkpoint.every=off", "launch.nproc=2",
        "strategy.name=ddp", "observe.sample_ids=true",
    )  # fmt: skip
    ends = run_ranks(tmp_path / "run", RECIPE, asked)
    ids = [ids for rank in range(2) for ids in sample_ids(ends.run, rank)]
    job = load_job(RECIPE, asked)
    job.workload.prepared = json.loads(ends.run.data.read_text())
    model = job.workload.build_model(job.config)
    model.load_state_dict(ends.states[0].weights, strict=False)
    data = job.workload.build_data(job.config, "train")
    assert data is not None
    loss, size, *_ = job.workload.loss(model, collate(data, np.array(ids)))
    assert size == len(ids) > 4
    assert ends.rows[0].loss == pytest.approx(float(loss.detach()) / size, rel=1e-5)


def sample_ids(run: RunDir, rank: int) -> list[int]:
    with run.samples(rank).open() as file:
        return [int(word) for row in csv.DictReader(file) for word in row["sample_ids"].split()]


@nightly
def test_local_negatives_are_another_objective(reference: RankEnds, tmp_path: Path) -> None:
    halves = tiny(*SGD, "train.micro_batch_size=4", "loss.negatives=local", "train.steps=1")
    first = list(read_training(run_here(tmp_path / "run", RECIPE, halves).run.training))[0]
    assert first.loss < list(reference.rows)[0].loss - 0.3, "four are told apart, not eight"


@nightly
def test_a_run_that_resumes_takes_the_steps_of_one_that_never_stopped(
    reference: RankEnds, tmp_path: Path
) -> None:
    """The same cuts too: they are drawn by their position in the run."""
    settings = tiny(*SGD, "train.micro_batch_size=8", "strategy.name=ddp")
    cut = run_here(tmp_path / "run", RECIPE, [*settings, "train.steps=3", "train.eval_every=off",
        "optim.schedule.total_steps=5"])  # fmt: skip
    archive_left_over(cut.run)
    begin_attempt(cut.run, resume=True)
    job = load_job(RECIPE, settings)
    job.workload.prepared = json.loads(cut.run.data.read_text())
    with alone():
        RankRun(job, make_plan(job, machine()), cut.run, RankId(0, 0, 1)).execute()
    rows = list(read_training(cut.run.training))
    assert [row.loss for row in rows] == [row.loss for row in reference.rows]
    assert validated(cut.run) == validated(reference.run)


def assert_same(reference: RankEnds, ends: RankEnds, name: str) -> None:
    losses = [(a.loss, b.loss) for a, b in zip(reference.rows, ends.rows, strict=True)]
    assert len(losses) == STEPS and len({round(expected, 3) for expected, _ in losses}) == STEPS
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5), name
    assert ends.rows[0].grad_norm == pytest.approx(reference.rows[0].grad_norm, rel=1e-5), name
    first = reference.states[0].weights
    for state in ends.states:
        for key, weight in first.items():
            torch.testing.assert_close(
                state.weights[key], weight, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
            )
    measured, expected_numbers = (validated(each.run) for each in (ends, reference))
    assert "val/speech_to_text/recall@1" in measured
    assert measured == pytest.approx(expected_numbers, rel=1e-4), name


def validated(run: RunDir) -> dict[str, float]:
    with run.training.open() as file:
        *_, last = csv.DictReader(file)
    return {name: float(value) for name, value in last.items() if name.startswith("val")}
