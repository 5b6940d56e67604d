"""What a loss may return, and what is said of anything else."""

from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.strategies.base import EngineParts
from paceline.strategies.objective import compute_loss

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
        ((ONE, 8, {"accuracy": 1}), "a tuple of (a tensor of shape [], 8, a dict)"),
        ((torch.ones(8), 8), "a tuple of (a tensor of shape [8], 8)"),
        (({"loss": ONE}, 8), "a tuple of (a dict, 8)"),
        ((1.5, 8), "a tuple of (1.5, 8)"),
        ((ONE, torch.ones(8)), "a tuple of (a tensor of shape [], a tensor of shape [8])"),
        ((ONE, "8"), "a tuple of (a tensor of shape [], a str)"),
    ],
)
def test_what_is_no_sum_and_count_is_refused(parts: EngineParts, returned: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compute_loss(parts, lambda batch: returned, None)
    assert "LanguageModel.loss must return two things" in str(refused.value)
    assert f"it returned {says}\n" in str(refused.value)


@pytest.mark.parametrize("units", [8, 2.5, torch.tensor(8), torch.tensor([8])])
def test_a_count_may_be_a_number_or_a_tensor(parts: EngineParts, units: Any) -> None:
    assert compute_loss(parts, lambda batch: (ONE, units), None) == (ONE, units)
