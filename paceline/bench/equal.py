"""Proves equal work from the configs and plans of both sides, before anything runs: whatever is
not declared as the difference is the same, and whatever is declared takes effect."""

from collections.abc import Iterator
from typing import Any

from paceline.bench.target import Target
from paceline.config.describe import differing
from paceline.config.schema import RunConfig
from paceline.records import Plan

# What a plan decided, and the keys that may make it differ between the sides of a pair.
DECIDED: dict[str, tuple[str, ...]] = {
    "device": (),
    "precision": ("precision.mode",),
    "matmul": ("precision.matmul",),
    "attention": ("attention.impl",),
    "compile": ("train.compile",),
    "recompute": ("train.activation_checkpointing",),
    "fused_optimizer": ("optim.fused",),
    "threads": (),
    "loader_workers": ("data.num_workers",),
    "strategy": ("strategy.name", "launch.nproc"),
    "backend": ("launch.backend",),
}


def work_of(plan: Plan, per_device: bool) -> dict[str, Any]:
    """Return what a step is, in numbers that both sides must have in common."""
    batch = plan.batch
    work: dict[str, Any] = {
        "steps": plan.steps,
        "trainable parameters": plan.model.num_trainable,
        f"{plan.unit} per sample": plan.units_per_sample,
    }
    if per_device:
        return work | {"samples per device and step": batch.micro * batch.grad_accum}
    return work | {"samples per step": batch.global_size, "ranks": plan.world_size}


def facts_of(config: RunConfig, plan: Plan, per_device: bool) -> dict[str, Any]:
    """Return the same for people, with the settings that a comparison depends on."""
    return work_of(plan, per_device) | {
        "seed": config.train.seed,
        "optimizer": config.optim.name,
        "precision": plan.precision.value,
    }


def check_equal(
    target: Target, baseline: tuple[RunConfig, Plan], other: tuple[RunConfig, Plan]
) -> list[str]:
    """Return every reason why the two do not do the same work, or do not differ at all."""
    problems = [*_config_problems(target, baseline[0], other[0])]
    problems += _plan_problems(target, baseline[1], other[1])
    for plan in (baseline[1], other[1]):
        problems += _idle_problems(target, plan)
    return list(dict.fromkeys(problems))


def _config_problems(target: Target, before: RunConfig, after: RunConfig) -> Iterator[str]:
    found = list(differing(before.model_dump(mode="json"), after.model_dump(mode="json")))
    for difference in found:
        if difference.key not in target.differs:
            yield f"{difference}: the sides differ in what {target.name} does not compare"
    if not found:
        yield f"the sides of {target.name} do not differ"


def _plan_problems(target: Target, before: Plan, after: Plan) -> Iterator[str]:
    old, new = (work_of(plan, target.per_device) for plan in (before, after))
    for name in old:
        if old[name] != new[name]:
            yield f"{name}: {old[name]} against {new[name]} is not equal work"
    for name, keys in DECIDED.items():
        was, now = getattr(before, name).value, getattr(after, name).value
        is_meant = target.per_device and name == "backend"  # one rank has nobody to talk to
        if was != now and not is_meant and not set(keys) & target.differs.keys():
            hint = f"\nhint: set {keys[0]} for both sides" if keys else ""
            yield f"{name}: {was} against {now}, which {target.name} does not compare{hint}"


def _idle_problems(target: Target, plan: Plan) -> Iterator[str]:
    """Refuse a difference without an effect: it would be measured as noise."""
    for finding in plan.findings:
        if finding.severity == "warning" and finding.where in target.differs:
            yield f"{finding.where} {finding.what}"
