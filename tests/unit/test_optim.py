"""The learning rate of every step, and which parameters decay."""

import pytest
import torch

from paceline.config.schema import OptimConfig, ScheduleConfig
from paceline.strategies.optim import build_optimizer, learning_rate


def optim(**schedule: object) -> OptimConfig:
    return OptimConfig(lr=1.0, schedule=ScheduleConfig.model_validate(schedule))


def test_warm_up_cosine_floor() -> None:
    settings = optim(warmup_steps=4, floor=0.1)
    rates = [learning_rate(step, 104, settings) for step in range(1, 105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]  # step 1 uses the warm-up value, not 0
    assert rates[53] == pytest.approx(0.55)  # half-way: the middle of 1.0 and 0.1
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_without_warm_up_step_one_is_nearly_the_top() -> None:
    assert learning_rate(1, 1000, optim(floor=0.0)) == pytest.approx(1.0, abs=1e-5)


def test_constant_stays() -> None:
    settings = optim(name="constant", warmup_steps=2)
    assert [learning_rate(s, 10, settings) for s in (1, 2, 3, 10)] == [0.5, 1.0, 1.0, 1.0]


def test_only_matrices_decay() -> None:
    layer = torch.nn.Linear(3, 3)
    groups = build_optimizer(layer.parameters(), OptimConfig(), fused=True).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert groups[0]["params"][0] is layer.weight and groups[1]["params"][0] is layer.bias
