"""An engine's optimizer, built, and the learning rate of each step."""

import inspect
import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.config.schema import RunConfig
from paceline.config.training import OptimConfig, ScheduleConfig
from paceline.errors import ConfigError
from paceline.records.words import few
from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from paceline.strategies.blocks import find_hidden
from paceline.strategies.optimizers import KINDS, builds_own, has_kernel, is_frozen, split_groups
from paceline.workloads.base import Workload

ONE_READ_ADAMW = "paceline.strategies.update_rules:OneReadAdamW"
# OneCycleLR's pct_start, 1 / div_factor, and that over final_div_factor.
ONE_CYCLE_TOP, ONE_CYCLE_START, ONE_CYCLE_END = 0.3, 1 / 25, 1 / 25 / 1e4


@dataclass(frozen=True)
class Named:
    """A parameter of this rank, under the model's own name."""

    name: str
    parameter: nn.Parameter
    is_hidden: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)


def freeze(model: nn.Module, optim: OptimConfig) -> None:
    """Freeze the parameters that `optim.groups` says are. Before anything wraps the model."""
    for name, parameter in model.named_parameters():
        if is_frozen(name, optim):
            parameter.requires_grad_(False)


def build_optimizer(parts: EngineParts, module: nn.Module) -> Optimizer:
    """Build the optimizer for this rank's part of the model: the workload's own, or `optim.name`.
    Each group has `lr_scale`, the multiple of a step's rate that it uses."""
    if builds_own(parts.workload):
        config = counted(parts.config, parts.plan.steps)
        return _build_own(parts.workload, module, config)
    optim = parts.config.optim
    kind, settings = optimizer_kind(
        optim, parts.plan.fused_optimizer.value, by_kernel(parts, module)
    )
    return kind(parameter_groups(module, optim), **settings)


def by_kernel(parts: EngineParts, module: nn.Module) -> bool:
    """Say whether AdamW uses our own kernel: as planned, if the weights are on a GPU and stay
    there: DeepSpeed moves what it updates on the host only after this."""
    strategy = find_strategy(parts.plan.strategy.value)
    is_ours = parts.plan.kernels.value == "triton" and next(module.parameters()).is_cuda
    return is_ours and has_kernel(parts.config, strategy, parts.workload)


def optimizer_kind(
    optim: OptimConfig, fused: bool, by_kernel: bool = False
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the class and the settings it is built with, beside its parameters; `by_kernel`: of a
    fused AdamW the one that reads each gradient once."""
    listed = KINDS[optim.name]
    place = ONE_READ_ADAMW if optim.name == "adamw" and fused and by_kernel else listed.place
    module, _, name = place.partition(":")
    settings = listed.settings(optim) | {"lr": optim.lr}
    return getattr(import_module(module), name), settings | (
        {"fused": fused} if listed.is_fused else {}
    )


def trained_parameters(module: nn.Module) -> list[Named]:
    """Return the parameters that are updated, tied ones once."""
    hidden = find_hidden(module)
    return [
        Named(name, parameter, id(parameter) in hidden)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the groups of `split_groups` as torch takes them."""
    return [
        {
            "params": [named.parameter for named in group.members],
            "weight_decay": group.weight_decay,
            "lr_scale": group.lr_scale,
            **({"is_hidden": group.is_hidden} if optim.name == "muon" else {}),
        }
        for group in split_groups(trained_parameters(module), optim)
    ]


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def _build_own(workload: Workload, module: nn.Module, config: RunConfig) -> Optimizer:
    what = f"{type(workload).__name__}.build_optimizer"
    optimizer = workload.build_optimizer(module, config)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{what} returned a {type(optimizer).__name__}\n"
            "hint: return one torch.optim.Optimizer; the rate of a step is what learning_rate(self,"
            " step, config) returns, and a loop with two optimizers keeps itself: paceline.attach"
        )
    names = {named.parameter: named.name for named in trained_parameters(module)}
    given = {p for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for parameter, name in names.items() if parameter not in given]
    if left_out:
        raise ConfigError(
            f"{what} leaves out {few(left_out)}, which would never be updated\nhint: add them to"
            ' a group, or freeze them: optim.groups=[{match: "...", frozen: true}]'
        )
    if strangers := len(given - names.keys()):
        raise ConfigError(
            f"{what} was given a model, and its optimizer has {strangers} parameters that are not"
            " trained there\nhint: take them from model.named_parameters(), frozen ones left out"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{what} returned a {type(optimizer).__name__}, whose step needs a closure that"
            " computes the loss again\nhint: use an optimizer with one gradient per step"
        )
    for group in optimizer.param_groups:
        # Our schedule says which share of optim.lr a step uses; each group uses that of its own.
        group["lr_scale"] = float(group.get("lr", config.optim.lr)) / config.optim.lr
    return optimizer


def describe_own_rates(optimizer: Optimizer, workload: Workload, config: RunConfig) -> list[str]:
    """Return a note if no group of a workload's own optimizer has the rate that training.csv shows:
    that is the step's rate, of which each group uses its own multiple."""
    if not builds_own(workload):
        return []
    scales = sorted({float(group["lr_scale"]) for group in optimizer.param_groups})
    if any(math.isclose(scale, 1.0) for scale in scales):
        return []
    lr = config.optim.lr
    return [
        f"{type(workload).__name__}.build_optimizer built its groups with lr"
        f" {few(f'{scale * lr:.4g}' for scale in scales)}, and optim.lr is {lr:.4g}: weights are"
        f" updated by {few(f'{scale:.4g}' for scale in scales)} times the lr in training.csv; build"
        " them with config.optim.lr"
    ]


def counted(config: RunConfig, num_steps: int) -> RunConfig:
    """Return the config as a job's own optimizer and schedule read it: `train.steps` is the number
    of steps, even if it is auto, or train.epochs decides."""
    train = config.train.model_copy(update={"steps": num_steps})
    return config.model_copy(update={"train": train})


def rate_of(step: int, num_steps: int, config: RunConfig, workload: Workload) -> float:
    """Return the learning rate of a step: the workload's own, or that of `optim.schedule`."""
    own = workload.learning_rate(step, counted(config, num_steps))
    if own is None:
        return learning_rate(step, num_steps, config.optim)
    if not isinstance(own, int | float) or not math.isfinite(own) or own < 0:
        raise ConfigError(
            f"{type(workload).__name__}.learning_rate returned {own!r} for step {step}\n"
            "hint: return a number of at least 0, or None for that of optim.schedule"
        )
    return float(own)


def learning_rate(step: int, num_steps: int, optim: OptimConfig) -> float:
    """Return the rate of step 1, 2, ..., num_steps: linear warm-up, then by the schedule.

    Step 1 uses lr / warmup_steps, not 0; the last step, of the run or of
    `optim.schedule.total_steps`, uses exactly floor x lr, and so do those after it. `onecycle` has
    both ends of its own.
    """
    schedule = optim.schedule
    if schedule.name == "onecycle":
        return optim.lr * _one_cycle(step, last_step(num_steps, schedule), schedule.warmup_steps)
    if step <= schedule.warmup_steps:
        return optim.lr * step / schedule.warmup_steps
    return optim.lr * _after_warmup(step, last_step(num_steps, schedule), schedule)


def last_step(num_steps: int, schedule: ScheduleConfig) -> int:
    """Return the step at which the schedule reaches its floor."""
    return num_steps if schedule.total_steps == "auto" else schedule.total_steps


def _after_warmup(step: int, total: int, schedule: ScheduleConfig) -> float:
    if schedule.name == "constant":
        return 1.0
    start = schedule.warmup_steps
    if schedule.name == "wsd":
        start = max(start, total - max(1, round(schedule.decay * total)))
    done = min(1.0, max(0, step - start) / max(1, total - start))
    left = _cosine(done) if schedule.name == "cosine" else 1 - done
    return schedule.floor + (1 - schedule.floor) * left


def _one_cycle(step: int, total: int, warmup_steps: int) -> float:
    """Return what torch.optim.lr_scheduler.OneCycleLR multiplies max_lr with, by its defaults."""
    top = warmup_steps or ONE_CYCLE_TOP * total  # a step; it may lie between two
    if step <= top:
        up = 1 - _cosine((step - 1) / (top - 1)) if top > 1 else 1.0
        return ONE_CYCLE_START + (1 - ONE_CYCLE_START) * up
    done = min(1.0, (step - top) / (total - top)) if total > top else 1.0
    return ONE_CYCLE_END + (1 - ONE_CYCLE_END) * _cosine(done)


def _cosine(done: float) -> float:
    """Return what is left of 1 on its way to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))
