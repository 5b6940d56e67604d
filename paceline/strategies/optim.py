"""Optimizers and the learning rate of each step."""

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.config.schema import OptimConfig, ScheduleConfig
from paceline.strategies.shape import decay_groups


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, fused: bool
) -> Optimizer:
    kind, settings = optimizer_kind(optim, fused)
    return kind(parameter_groups(parameters, optim), **settings)


def optimizer_kind(optim: OptimConfig, fused: bool) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the settings it is built with, beside its parameters."""
    if optim.name == "sgd":
        return SGD, {"lr": optim.lr, "momentum": optim.momentum, "fused": fused}
    return AdamW, {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "fused": fused}


def parameter_groups(
    parameters: Iterable[nn.Parameter], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Apply weight decay to matrices only: it shrinks norms and biases for nothing."""
    kept = decay_groups(parameter for parameter in parameters if parameter.requires_grad)
    decays = [optim.weight_decay if group[0].dim() >= 2 else 0.0 for group in kept]
    return [
        {"params": group, "weight_decay": decay} for group, decay in zip(kept, decays, strict=True)
    ]


def learning_rate(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Return the rate of step 1, 2, ..., num_steps: linear warm-up, then cosine down to the floor.

    Step 1 uses lr / warmup_steps, not 0; the last step uses exactly floor x lr.
    """
    schedule = optim.schedule
    if step <= schedule.warmup_steps:
        return optim.lr * step / schedule.warmup_steps
    return optim.lr * _after_warmup(step, num_steps, schedule)


def _after_warmup(step: int, num_steps: int, schedule: ScheduleConfig) -> float:
    if schedule.name == "constant":
        return 1.0
    length = max(1, num_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / length)
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * done))
