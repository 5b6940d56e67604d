"""Settings that cannot take effect together: each is a finding, never silence."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import RunConfig, Section
from paceline.records import Finding, Plan


@dataclass(frozen=True)
class Idle:
    """`keys` have no effect while `holds`; said only when the user changed one of them."""

    section: str
    keys: tuple[str, ...]
    holds: bool
    because: str


def check_idle_settings(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """One warning for every changed setting that this plan never reads."""
    for rule in _rules(config, plan):
        if not rule.holds:
            continue
        section = _section(config, rule.section)
        for key in rule.keys:
            if getattr(section, key) != type(section).model_fields[key].get_default():
                yield Finding(
                    severity="warning",
                    where=f"{rule.section}.{key}",
                    what=f"is set but has no effect: {rule.because}",
                )


def _rules(config: RunConfig, plan: Plan) -> tuple[Idle, ...]:
    optim, train = config.optim, config.train
    alone = plan.strategy.value == "single"
    no_workers = plan.loader_workers.value == 0
    ddp_keys = ("bucket_mb", "static_graph", "find_unused_parameters")
    return (
        Idle("strategy", ddp_keys, alone, plan.strategy.because),
        Idle("data", ("prefetch", "timeout_s"), no_workers, plan.loader_workers.because),
        Idle("train", ("compile_dynamic",), train.compile == "off", "train.compile is off"),
        Idle("train", ("eval_samples",), train.eval_every == "off", "train.eval_every is off"),
        Idle("optim", ("momentum",), optim.name == "adamw", "adamw has betas instead"),
        Idle("optim", ("beta1", "beta2"), optim.name == "sgd", "sgd has momentum instead"),
        Idle(
            "optim.schedule",
            ("floor",),
            optim.schedule.name == "constant",
            "a constant schedule never falls",
        ),
    )


def _section(config: RunConfig, path: str) -> Section:
    section: Section = config
    for part in path.split("."):
        section = getattr(section, part)
    return section
