"""What a loss may return, and what is said of anything else."""

from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.strategies.base import EngineParts
from paceline.strategies.objective import compute_loss, compute_metrics
from paceline.workloads.returns import without_graph

ONE = torch.tensor(1.0)


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    job = load_job("lm_tiny", ["launch.device=cpu"])
    return EngineParts(job.config, make_plan(job, probe()), job.workload, torch.device("cpu"))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (ONE, "a tensor of shape []"),
        ({"loss": ONE}, "a dict"),
        (None, "None"),
        ((ONE, 8, 3), "a tuple of (a tensor of shape [], 8, 3)"),
        ((ONE, 8, {}, {}), "a tuple of (a tensor of shape [], 8, a dict, a dict)"),
        ((torch.ones(8), 8), "a tuple of (a tensor of shape [8], 8)"),
        (({"loss": ONE}, 8), "a tuple of (a dict, 8)"),
        ((1.5, 8), "a tuple of (1.5, 8)"),
        ((ONE, torch.ones(8)), "a tuple of (a tensor of shape [], a tensor of shape [8])"),
        ((ONE, "8"), "a tuple of (a tensor of shape [], the text '8')"),
    ],
)
def test_what_is_no_sum_and_count_is_refused(parts: EngineParts, returned: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compute_loss(parts, lambda batch: returned, None)
    assert "LanguageModel.loss must return two things" in str(refused.value)
    assert f"it returned {says}\n" in str(refused.value)


@pytest.mark.parametrize("units", [8, 2.5, torch.tensor(8), torch.tensor([8])])
def test_a_count_may_be_a_number_or_a_tensor(parts: EngineParts, units: Any) -> None:
    assert compute_loss(parts, lambda batch: (ONE, units), None) == (ONE, units, {})


def test_further_sums_have_the_count_of_the_loss_or_their_own(parts: EngineParts) -> None:
    more = {"z_loss": ONE, "accuracy": (torch.tensor(3), 4), "part/b": 2.5}
    *_, found = compute_loss(parts, lambda batch: (ONE, 8, more), None)
    assert found == {"z_loss": (ONE, 8), "accuracy": (torch.tensor(3), 4), "part/b": (2.5, 8)}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("accuracy", torch.ones(8), "'accuracy' is a tensor of shape [8], not a sum or"),
        ("accuracy", (1, 2, 3), "'accuracy' is a tuple of (1, 2, 3), not a sum or"),
        ("loss", ONE, "'loss' is the loss itself"),
        ("top 1", ONE, "'top 1' is not a name for a column"),
        ("a,b", ONE, "'a,b' is not a name for a column"),
    ],
)
def test_what_cannot_be_reported_is_named(
    parts: EngineParts, name: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        compute_loss(parts, lambda batch: (ONE, 8, {name: value}), None)
    assert f"LanguageModel.loss: {says}" in str(refused.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ((ONE, 8), "LanguageModel.evaluate must return a dict"),
        ({"accuracy": ONE}, "'accuracy' is a tensor of shape [], not (sum, count)"),
        ({"texts": ["a"]}, "'texts' is a list, not (sum, count) or paceline.Items"),
    ],
)
def test_an_evaluation_gives_pairs_or_items(parts: EngineParts, returned: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compute_metrics(parts, lambda batch, evaluates: returned, None)
    assert says in str(refused.value)


def test_what_stands_beside_the_loss_keeps_no_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    loss, _, extras = without_graph((x.sum(), 3, {"a": x.sum(), "b": (x.sum(), 2), "c": 1}))
    assert loss.requires_grad and extras["c"] == 1
    assert not extras["a"].requires_grad and not extras["b"][0].requires_grad
