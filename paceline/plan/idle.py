"""Settings that a plan never reads: each that was changed is a warning, never silence."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.schema import RunConfig
from paceline.config.section import Section
from paceline.config.training import OptimConfig
from paceline.machine.launchers import foreign_keys
from paceline.records import Finding, Plan
from paceline.strategies import find_strategy
from paceline.strategies.optimizers import KINDS


@dataclass(frozen=True)
class Idle:
    """A rule: `keys` have no effect while `holds`; reported only when the user changed one of
    them."""

    section: str
    keys: tuple[str, ...]
    holds: bool
    because: str


def check_idle_settings(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield one warning for every changed setting that this plan never reads."""
    said: set[tuple[str, str]] = set()
    for rule in _rules(config, plan):
        if not rule.holds:
            continue
        section = _section(config, rule.section)
        for key in rule.keys:
            is_changed = getattr(section, key) != type(section).model_fields[key].get_default()
            if is_changed and (rule.section, key) not in said:
                said.add((rule.section, key))
                yield Finding.warning(
                    f"{rule.section}.{key}", f"is set but has no effect: {rule.because}"
                )


def _rules(config: RunConfig, plan: Plan) -> tuple[Idle, ...]:
    optim, train = config.optim, config.train
    no_workers = plan.loader_workers.value == 0
    not_fp16, not_fp8 = plan.precision.value != "fp16", plan.precision.value != "fp8"
    return (
        *_strategy_rules(config, plan),
        *_launch_rules(plan),
        Idle("data", ("prefetch",), no_workers, plan.loader_workers.because),
        *_batch_rules(config),
        Idle(
            "attention",
            ("nsa",),
            plan.attention.value != "nsa",
            f"attention.impl is {plan.attention.value}",
        ),
        Idle("precision", ("loss_scale",), not_fp16, f"precision is {plan.precision.value}"),
        Idle(
            "precision",
            ("fp8_recipe", "fp8_layers", "fp8_all_gather"),
            not_fp8,
            f"precision is {plan.precision.value}",
        ),
        Idle(
            "train",
            ("compile_dynamic", "compile_scope"),
            train.compile == "off",
            "train.compile is off",
        ),
        Idle("train", ("activation_offload",), not plan.on_gpu, "the ranks are on CPU already"),
        Idle(
            "train",
            ("eval_samples", "eval_ema", "best", "stop_after"),
            train.eval_every == "off",
            "train.eval_every is off",
        ),
        Idle("train", ("eval_ema",), optim.ema == "off", "optim.ema is off"),
        Idle("observe", ("nvtx",), not plan.on_gpu, "the ranks are on CPU"),
        Idle("observe", ("memory_every",), config.observe.memory == "off", "observe.memory is off"),
        *_optimizer_rules(optim, plan),
        *_curve_rules(optim.schedule.name),
    )


def _curve_rules(name: str) -> tuple[Idle, ...]:
    where, low = "optim.schedule", "optim.schedule.name is onecycle, which ends at lr / 250,000"
    never = "a constant schedule never falls"
    return (
        Idle(where, ("floor", "total_steps"), name == "constant", never),
        Idle(where, ("floor",), name == "onecycle", low),
        Idle(where, ("decay",), name != "wsd", f"optim.schedule.name is {name}"),
    )


def _batch_rules(config: RunConfig) -> tuple[Idle, ...]:
    by_length = config.data.batch_by == "length"
    return (
        Idle("data", ("batch_length",), not by_length, "data.batch_by is samples"),
        Idle("train", ("micro_batch_size",), by_length, "data.batch_length fills a microbatch"),
    )


def _optimizer_rules(optim: OptimConfig, plan: Plan) -> Iterator[Idle]:
    """Yield keys of other optimizers. The workload's own may read any."""
    if plan.optimizer.value in KINDS:
        keys = {key for kind in KINDS.values() for key in kind.reads}
        unread = tuple(sorted(keys - set(KINDS[optim.name].reads)))
        yield Idle("optim", unread, True, f"{optim.name} does not read it")


def _strategy_rules(config: RunConfig, plan: Plan) -> Iterator[Idle]:
    """Yield keys of other strategies, by their sections, and its own keys that it does not read."""
    used, asked = find_strategy(plan.strategy.value), find_strategy(config.strategy.name)
    for key, readers in type(config.strategy).readers.items():
        if key in used.Settings.model_fields:
            continue
        if key in asked.Settings.model_fields:  # one rank: another takes its place
            because = plan.strategy.because
        else:
            verb = "reads" if len(readers) == 1 else "read"
            because = f"{', '.join(readers)} {verb} it, and strategy.name is {asked.name}"
        yield Idle("strategy", (key,), True, because)
    for keys, because in used.unread(config, plan):
        yield Idle("strategy", keys, True, because)


def _launch_rules(plan: Plan) -> tuple[Idle, ...]:
    by = plan.crew.launcher.value
    return (
        Idle("launch", ("devices",), not plan.on_gpu, "the ranks are on CPU"),
        Idle("launch", foreign_keys(by), True, f"{by} starts the ranks"),
    )


def _section(config: RunConfig, path: str) -> Section:
    section: Section = config
    for part in path.split("."):
        section = getattr(section, part)
    return section
