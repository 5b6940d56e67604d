"""Turns a target into arms that can run here: planned, proven equal, or skipped with the reason."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.bench.equal import check_equal, facts_of
from paceline.bench.target import RECIPE, Arm, Device, Target, Work
from paceline.config.overrides import parse_override
from paceline.errors import ConfigError
from paceline.job import Job, load_job
from paceline.plan.planner import make_plan
from paceline.records import Env, Plan
from paceline.sweep.matrix import PLAIN

# As for every sweep, and a learning rate that has risen before a short run is over.
COMMON = (*PLAIN, "optim.schedule.warmup_steps=5")
STEPS = 60


@dataclass(frozen=True)
class PlannedArm:
    name: str
    overrides: list[str]
    job: Job
    plan: Plan


@dataclass(frozen=True)
class Pair:
    """A target as it runs here. `skipped`: why nothing of it runs. `left_out`: arms that do not
    run, and why."""

    target: Target
    device: Device
    recipe: str = ""
    common: list[str] = field(default_factory=list)
    arms: list[PlannedArm] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    @property
    def baseline(self) -> PlannedArm:
        return self.arms[0]

    @property
    def facts(self) -> dict[str, str]:
        """Return what is equal on both sides, in words."""
        first = self.baseline
        found = facts_of(first.job.config, first.plan, self.target.per_device)
        return {name: str(value) for name, value in found.items()}


def plan_pair(target: Target, env: Env, overrides: Sequence[str] = (), steps: int = STEPS) -> Pair:
    """Plan both sides. Raise `ConfigError` when the user's overrides make the pair impossible or
    unfair. An override of train.steps replaces `steps`, one of bench.recipe what is trained."""
    own, recipes = _named("train.steps", overrides), _named(RECIPE, overrides)
    overrides = [text for text in overrides if text not in (*own, *recipes)]
    count = own[-1] if own else f"train.steps={steps}"
    device = choose_device(env, overrides)
    lacking = _lacking(target, device)
    if lacking:
        return Pair(target, device, skipped=lacking)
    work = target.work[device]
    if recipes:  # how ranks are started is the target's still
        kept = [text for text in work.overrides if parse_override(text).key.startswith("launch.")]
        work = Work(recipe=parse_override(recipes[-1]).raw, overrides=kept)
    pair = _plan_arms(target, _Ground(device, env, overrides, count, work))
    if pair.skipped:
        return pair
    problems = [
        f"{target.name}, {arm.name}: {problem}"
        for arm in pair.arms[1:]
        for problem in _check(target, pair.baseline, arm)
    ]
    if problems:
        raise ConfigError(problems)
    return pair


def _named(key: str, overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if parse_override(text).key == key]


def choose_device(env: Env, overrides: Sequence[str]) -> Device:
    asked = [text.partition("=")[2] for text in overrides if "launch.device=" in text]
    chosen = asked[-1] if asked else "auto"
    if chosen == "auto":
        return "cuda" if env.gpus else "cpu"
    return "cuda" if chosen == "cuda" else "cpu"


def _lacking(target: Target, device: Device) -> str:
    needs = target.needs
    if needs.device == "cuda" and device != "cuda":
        return f"{needs.because or 'it needs a GPU'}; ranks are on CPU here"
    if device not in target.work:
        return f"it has no work for ranks on {device}"
    if needs.compiler and shutil.which("c++") is None and shutil.which("g++") is None:
        return "torch.compile needs a C++ compiler, and there is no c++ or g++ here"
    return ""


def _too_few(target: Target, device: Device, ranks: int) -> str:
    hint = "; launch.devices=[0,0] lets two share one" if device == "cuda" else ""
    devices = "GPU" if device == "cuda" else "rank"
    return f"it needs {target.needs.ranks} ranks, and here is {ranks} {devices}{hint}"


@dataclass(frozen=True)
class _Ground:
    """Hold what the arms of a pair have in common here."""

    device: Device
    env: Env
    overrides: Sequence[str]
    steps: str
    work: Work

    def plan(self, arm: Arm, overrides: Sequence[str]) -> tuple[Job, Plan]:
        own = arm.overrides_on(self.device)
        words = [*COMMON, *self.work.overrides, *overrides, *own, self.steps]
        job = load_job(self.work.recipe, words)
        return job, make_plan(job, self.env)


def _plan_arms(target: Target, ground: _Ground) -> Pair:
    device, work = ground.device, ground.work
    arms: list[PlannedArm] = []
    left_out: dict[str, str] = {}
    ranks = 0
    for arm in target.arms:
        job, plan = ground.plan(arm, ground.overrides)
        ranks = max(ranks, plan.world_size)
        if problems := plan.problems():
            _require_not_users(target, arm, ground, [str(problem) for problem in problems])
            left_out[arm.name] = problems[0].what
        elif plan.exchange_by.value != plan.exchange_by.requested:
            left_out[arm.name] = plan.exchange_by.because
        else:
            arms.append(PlannedArm(arm.name, arm.overrides_on(device), job, plan))
    # First: on too few ranks a plan may have problems that say less.
    if ranks < target.needs.ranks:
        return Pair(target, device, skipped=_too_few(target, device, ranks))
    if target.baseline in left_out:
        return Pair(target, device, skipped=f"its baseline: {left_out[target.baseline]}")
    if len(arms) < 2:
        return Pair(target, device, skipped="; ".join(left_out.values()))
    common = [*COMMON, *work.overrides, *ground.overrides]
    return Pair(target, device, work.recipe, common, arms, left_out)


def _require_not_users(target: Target, arm: Arm, ground: _Ground, problems: Sequence[str]) -> None:
    """Refuse what the user's own overrides break; what this machine lacks is skipped instead."""
    places = [text for text in ground.overrides if parse_override(text).key.startswith("launch.")]
    if not ground.plan(arm, places)[1].problems():
        raise ConfigError([f"{target.name}, {arm.name}: {problem}" for problem in problems])


def _check(target: Target, baseline: PlannedArm, arm: PlannedArm) -> list[str]:
    return check_equal(target, (baseline.job.config, baseline.plan), (arm.job.config, arm.plan))
