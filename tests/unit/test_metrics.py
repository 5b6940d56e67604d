"""Numbers of an evaluation from what ranks found; which one is the best, and when that is over."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.training import TrainConfig
from paceline.errors import ConfigError, DataError, JobError
from paceline.job import load_job
from paceline.metrics import Goal, Items, accuracy, bits_per_byte, perplexity
from paceline.plan.batch import count_steps
from paceline.plan.planner import make_plan
from paceline.records import BestMetric, Kept
from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps, read_training
from paceline.strategies.base import StepInfo, Totals
from paceline.strategies.clock import HostClock
from paceline.train.evaluation import Share, Tally, conclude
from paceline.train.feed import StepBatch
from paceline.train.hooks import Hooks, find_hooks
from paceline.train.keeper import Best
from paceline.train.ledger import Ledger, LedgerFiles
from paceline.train.verdict import explain
from paceline.workloads.base import Workload
from tests.harness import make_kept
from tests.machines import machine

BEST = BestMetric(step=3, value=2.5)


class Job(Workload):
    seen: dict[str, Any]

    def metrics(self, found: Any) -> Any:
        self.seen = dict(found)
        return {"num": len(found["texts"])} if "texts" in found else {}


def tally(*batches: tuple[list[int], dict[str, Any]]) -> Share:
    made = Tally(Job())
    for ids, found in batches:
        made.add(np.array(ids), found)
    return made.close()


def test_ranks_give_sums_and_items_in_the_order_of_samples() -> None:
    """5 samples over 3 ranks in batches of 1: one has run out, and says nothing."""
    job = Job()

    def found(right: Any, text: str, row: float) -> dict[str, Any]:
        return {"right": right, "texts": Items([text]), "rows": Items(torch.full((1, 2), row))}

    on_device = (torch.tensor(1), torch.tensor(1))
    shares = [
        tally(([0], found((1, 1), "a", 1.0)), ([3], found((0, 1), "d", 4.0))),
        tally(([1], found(on_device, "b", 2.0)), ([4], found((1, 1), "e", 5.0))),
        tally(([2], found((0.5, 1), "c", 3.0))),
    ]
    assert conclude(job, shares) == {"val/right": 3.5 / 5, "val/num": 5.0}
    assert job.seen["texts"] == ["a", "b", "c", "d", "e"]
    assert job.seen["rows"].tolist() == [[n, n] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]


def test_rows_of_unequal_shape_are_a_list() -> None:
    job = Job()
    conclude(job, [tally(([1], {"ids": Items(torch.ones(1, 2))}), ([0], {"ids": Items([[7]])}))])
    first, second = job.seen["ids"]
    assert first == [7] and second.tolist() == [1.0, 1.0]


def test_a_sum_that_is_not_finite_is_told_with_rank_and_samples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = tally(([0, 1], {"a": (1, 2)})), tally(([2, 3], {"a": (math.inf, 2)}))
    with caplog.at_level(logging.WARNING):
        assert math.isnan(conclude(Job(), [good, bad, tally()])["val/a"])
        assert math.isnan(conclude(Job(), [tally(([0], {"b": (0, 0)}))])["val/b"])
    assert "val/a is not finite: rank 1, samples 2 to 3" in caplog.text
    assert "val/b is not finite: nothing was counted" in caplog.text


def test_what_metrics_makes_may_be_no_number_and_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1 is 0/0 while nothing is found: no reason to end a run, but never in silence."""
    monkeypatch.setattr(Job, "metrics", lambda self, found: {"f1": math.nan, "n": np.float32(2)})
    found = conclude(Job(), [tally()], deciding="val/f1")
    assert math.isnan(found["val/f1"]) and found["val/n"] == 2.0
    assert "val/f1, which Job.metrics made, is not finite" in caplog.text


def test_items_are_one_per_sample() -> None:
    with pytest.raises(ConfigError, match=r"Job.evaluate: 'texts' has 1 items for a batch of 2"):
        tally(([0, 1], {"texts": Items(["a"])}))
    with pytest.raises(ConfigError, match=r"\['a'\] is \(sum, count\) once and Items once"):
        tally(([0], {"a": (1, 1)}), ([1], {"a": Items([1])}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3.0, "Job.metrics must return a dict of numbers by name; it returned 3.0"),
        ({"wer": "low"}, "Job.metrics: 'wer' is the text 'low', not a number"),
        ({"w er": 1.0}, "'w er' is not a name"),
    ],
)
def test_metrics_are_numbers(given: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "metrics", lambda self, found: given)
    with pytest.raises(ConfigError) as refused:
        conclude(Job(), [tally()])
    assert says in str(refused.value)


def test_the_usual_ones() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(logits, torch.tensor([1, 1, -100])) == (1, 2)
    assert perplexity(math.log(8)) == pytest.approx(8) and perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert bits_per_byte(math.log(8)) == pytest.approx(3)
    assert bits_per_byte(math.log(8), bytes_per_token=4) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("val/wer", ("val/wer", False)),
        ("val/wer:min", ("val/wer", False)),
        ("val/recall@1:max", ("val/recall@1", True)),
        ("train/part/b", ("train/part/b", False)),
        ("val/map_error", None),  # is it a rate of hits, or of errors? say so
        ("val/accuracy", None),
        ("accuracy:max", None),
        ("val/wer:low", None),
        ("val/w er", None),
        ("val/", None),
    ],
)
def test_a_goal_is_a_metric_and_its_direction(text: str, goal: tuple[str, bool] | None) -> None:
    if goal is not None:
        assert Goal.parse(text) == goal
        return
    with pytest.raises(ValueError, match="hint: "):
        Goal.parse(text)


def best(**settings: Any) -> Best:
    return Best(TrainConfig(**settings))


def test_the_best_is_by_its_direction_and_never_not_a_number() -> None:
    found = best(best="val/accuracy:max")
    for step, value in enumerate([0.5, 0.7, math.nan, math.inf, 0.6, 0.7], 1):
        found.note(step, {"val/accuracy": value, "val/loss": -value})
    assert found.found == BestMetric(step=2, name="val/accuracy", value=0.7)
    assert found.num_worse == 4 and found.why_over == ""


def test_by_default_it_is_the_loss_where_there_is_one() -> None:
    found = best()
    found.note(1, {"val/accuracy": 0.5})
    assert found.found is None
    found.note(2, {"val/loss": 3.0})
    assert found.found is not None and found.found.value == 3.0
    with pytest.raises(ConfigError, match=r"train.stop_after needs .*\n.*one of val/accuracy,"):
        best(stop_after=2).note(1, {"val/accuracy": 0.5})


def test_patience_counts_from_the_best_and_through_a_checkpoint() -> None:
    found = best(stop_after=2)
    for step, value in ((1, 3.0), (2, 3.5), (3, 2.5), (4, 2.5)):
        found.note(step, {"val/loss": value})
        assert found.why_over == ""
    resumed = Best(TrainConfig(stop_after=2), found.found, found.num_worse)
    resumed.note(5, {"val/loss": math.nan})
    assert resumed.why_over == (
        "val/loss has not improved in 2 evaluations: the best is val/loss 2.5 at step 3"
        " (train.stop_after)"
    )
    other = Best(TrainConfig(best="val/wer", stop_after=2), found.found, found.num_worse)
    assert (other.found, other.num_worse) == (None, 0), "another metric starts anew"


def test_a_checkpoint_of_0_6_has_the_best_loss(tmp_path: Path) -> None:
    body = json.loads(make_kept(4, BEST).to_json())
    del body["num_worse"]
    path = tmp_path / "state.json"
    for best, expected in (({"step": 3, "val_loss": 2.5}, BEST), (None, None)):
        path.write_text(json.dumps(body | {"schema": 1, "best": best}))
        assert (Kept.load(path).best, Kept.load(path).num_worse) == (expected, 0)


class Told(Job):
    def on_eval(self, step: int, metrics: Any) -> None:
        raise KeyError(step)


def test_hooks_are_those_that_the_job_has_on_the_ranks_it_names() -> None:
    assert find_hooks(Job(), 0) == Hooks() == find_hooks(Told(), 1)
    hooks = find_hooks(Told(), 0)
    assert (len(hooks.on_step), len(hooks.on_eval), len(hooks.on_checkpoint)) == (0, 1, 0)
    with pytest.raises(JobError, match=r"^Told.on_eval raised KeyError: 7 at step 7$") as raised:
        hooks.on_eval[0](7, {})
    assert explain(raised.value).place.startswith("test_metrics.py:"), "the line in the job's file"
    everywhere = type("Everywhere", (Told,), {"hook_ranks": "all"})
    assert len(find_hooks(everywhere(), 1).on_eval) == 1


def test_epochs_are_whole_steps_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launch.device=cpu", "train.micro_batch_size=8"]
    timed = ["train.steps=auto", "train.epochs=2.5", "data.synthetic_samples=100"]
    job = load_job("mae_tiny", [*words, *timed, "train.grad_accum=1"])
    monkeypatch.delattr(type(job.workload), "prepare")  # as a job has none that is a user's own
    plan = make_plan(job, machine())
    assert (plan.steps, plan.length) == (250 // 8, "2.5 epochs (31 steps)")
    with pytest.raises(DataError, match=r"train.epochs=0.01 of 100 samples is less than one step"):
        make_plan(load_job("mae_tiny", [*words, *timed, "train.epochs=0.01"]), machine())
    # Text has no length before it is prepared.
    text = load_job("lm_tiny", [*words, "train.steps=auto", "train.epochs=2"])
    plan = make_plan(text, machine())
    assert plan.steps == 0 and "follow from the prepared data" in plan.length


def test_epochs_need_data_with_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("mae_tiny", ["train.steps=auto", "train.epochs=1", "launch.device=cpu"])
    plan = make_plan(job, machine())
    monkeypatch.setattr(type(job.workload), "build_data", lambda *_: iter([]))
    with pytest.raises(ConfigError, match=r"train.epochs=1: the training data has no length"):
        count_steps(job, plan)
    monkeypatch.setattr(type(job.workload), "build_data", lambda *_: 1 / 0)
    with pytest.raises(DataError, match=r"failed at .* ZeroDivisionError"):
        count_steps(job, plan)


def test_one_key_says_how_long() -> None:
    with pytest.raises(ConfigError, match=r"steps 5 and epochs 2 both say how long"):
        load_job("mae_tiny", ["train.steps=5", "train.epochs=2"])
    assert load_job("mae_tiny", ["train.steps=auto"]).config.train.num_steps == 100


def fill_ledger(folder: Path, num_steps: int, num_ranks: int = 1, **more: Any) -> Ledger:
    """A ledger in which so many steps have ended and the next has begun; it gathers every 10."""
    job = load_job("lm_tiny", [f"launch.nproc={num_ranks}", "train.log_every=10"])
    plan, clock, run = make_plan(job, machine()), HostClock(), RunDir(folder)
    run.make_rank(0)
    files = LedgerFiles(run.steps(0), run.training)
    made = Ledger(job.config, plan, clock, torch.device("cpu"), files, **more)
    for step in range(1, num_steps + 1):
        clock.begin(step)
        info = StepInfo(torch.tensor(1.0), torch.tensor(0.0))
        batch = StepBatch([], 2, 1.0, [], 2)
        made.record(step, 0.1, Totals(torch.tensor(2.0 * step), 2), info, batch)
        made.vetoes(through=step - 1)
        made.settle(step)
    clock.begin(num_steps + 1)
    return made


@pytest.mark.parametrize("num_steps", [4, 9, 10, 14])
def test_one_rank_that_fails_leaves_a_row_of_every_step(tmp_path: Path, num_steps: int) -> None:
    """Its job died in the next step: no other rank is needed to know the losses."""
    fill_ledger(tmp_path, num_steps).abandon()
    rows = read_training(tmp_path / "training.csv")
    assert [row.step for row in rows] == [*range(1, num_steps + 1)]
    assert rows.column("loss").tolist() == [float(n) for n in range(1, num_steps + 1)]
    assert len(read_steps(RunDir(tmp_path).steps(0))) == num_steps


def test_a_rank_of_several_that_fails_asks_no_other(tmp_path: Path) -> None:
    """There is no process group here: a collective would raise."""
    fill_ledger(tmp_path, 4, num_ranks=2).abandon()
    assert len(read_training(tmp_path / "training.csv")) == 0
    assert len(read_steps(RunDir(tmp_path).steps(0))) == 4


def test_a_hook_that_raised_is_not_called_again_and_no_row_is_written_twice(tmp_path: Path) -> None:
    told: list[int] = []

    def refuse(step: int, row: Any) -> None:
        told.append(step)
        raise KeyError("my own bug")

    ledger = fill_ledger(tmp_path, 10, hooks=[refuse])
    with pytest.raises(KeyError):
        ledger.settle(11)
    ledger.abandon()
    assert told == [1]
    assert [row.step for row in read_training(tmp_path / "training.csv")] == [*range(1, 11)]
