"""`paceline verify` from names to a report: for each strategy plan, launch, judge."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError, LaunchError, Outcome, PacelineError
from paceline.machine.facts import probe
from paceline.plan.pipelines import ranks_of_pipeline
from paceline.plan.planner import ALIASES, make_plan
from paceline.records import Env
from paceline.records.rundir import RunDir
from paceline.schedules.orders import NAMES as SCHEDULES
from paceline.verify.judge import judge
from paceline.verify.records import StrategyProof, VerifyReport
from paceline.verify.trials import (
    Trials,
    build_job,
    deep_enough,
    expected_bytes,
    pipeline_batch,
)

ALL = ("ddp", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid", "pipeline", "deepspeed")
# What a proof may be asked under. Other keys would change what is proven.
ALLOWED = ("launch.", "strategy.", "attention.", "train.compile", "train.activation_checkpointing")
PIPELINES = tuple(f"pipeline_{schedule}" for schedule in SCHEDULES)
DEEPSPEED = tuple(f"deepspeed_{stage}" for stage in range(4))
VERIFY_FILE = "verify.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One row of the table: a strategy, what it is said with, why it cannot be tried here."""

    label: str
    settings: tuple[str, ...]
    skipped: str = ""


def run_verify(
    names: Sequence[str], overrides: Sequence[str], out: Path | None, say: Say
) -> VerifyReport:
    started_at = time.time()
    _require_known(names, overrides)
    env = probe()
    overrides, world, device = _choose_ranks(env, overrides)
    candidates = list(_candidates(names, overrides, world))
    if any(candidate.label in PIPELINES for candidate in candidates):
        overrides = [*overrides, deep_enough(world)]
        candidates = list(_candidates(names, overrides, world))
    run = RunDir.create("verify", out, is_run=False)
    tried = [candidate.label for candidate in candidates if not candidate.skipped]
    say(f"on {world} ranks: {', '.join(tried)}; 10 s or so each, in {run.root}")
    proofs: list[StrategyProof] = []
    try:
        reference = Trials(run.root / "one_process", env, world)
        _require_reference(reference.run(_reference_settings(overrides), only_equal=True))
        for candidate in candidates:
            proofs.append(_prove(candidate, run, reference))
            say(f"{candidate.label}: {_word(proofs[-1])}")
        passed = all(proof.ok for proof in proofs) and any(proof.checks for proof in proofs)
        outcome = Outcome.OK if passed else Outcome.CHECK_FAILED
    except KeyboardInterrupt:
        outcome = Outcome.INTERRUPTED  # what was proven until now is kept
    report = VerifyReport(
        run_dir=str(run.root),
        world_size=world,
        device=device,
        exit_code=outcome.exit_code,
        proofs=proofs,
        elapsed_s=time.time() - started_at,
    )
    report.save(run.root / VERIFY_FILE)
    return report


def _require_reference(failure: str) -> None:
    """Without one process's numbers there is nothing to hold a strategy against."""
    if failure:
        raise LaunchError(f"the run on one process, the reference, did not finish: {failure}")


def _prove(candidate: Candidate, run: RunDir, reference: Trials) -> StrategyProof:
    if candidate.skipped:
        return StrategyProof(strategy=candidate.label, skipped=candidate.skipped)
    trials = Trials(run.root / candidate.label, reference.env, reference.world)
    try:
        failure = trials.run(candidate.settings)
    except PacelineError as error:  # of the plan: nothing was started
        return StrategyProof(strategy=candidate.label, failure=str(error))
    if failure:
        return StrategyProof(strategy=candidate.label, failure=failure)
    expected = expected_bytes(candidate.settings, reference.env)
    checks = judge(trials.run_dir, reference.run_dir, trials.world, expected)
    return StrategyProof(strategy=candidate.label, checks=checks)


def _word(proof: StrategyProof) -> str:
    if proof.skipped:
        return f"not tried: {proof.skipped}"
    return "proven" if proof.ok else "FAILED"


def _require_known(names: Sequence[str], overrides: Sequence[str]) -> None:
    known = (*ALL, *ALIASES, *PIPELINES, *DEEPSPEED)
    problems = [
        f"there is no strategy '{name}'\nhint: {', '.join(known)}"
        for name in names
        if name not in known
    ]
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if key == "strategy.name":
            problems.append(f"{text}: strategies are named\nhint: paceline verify {value}")
        elif not key.startswith(ALLOWED):
            problems.append(f"{text}: a proof fixes this\nhint: it takes {', '.join(ALLOWED)}")
        elif key == "strategy.comm_hook":
            problems.append(f"{text}: a hook changes the numbers\nhint: see its row in the audit")
        elif (key, value) == ("launch.nproc", "1"):
            problems.append(f"{text}: one rank proves nothing\nhint: launch.nproc=2 or more")
    if problems:
        raise ConfigError(problems)


def _choose_ranks(env: Env, overrides: Sequence[str]) -> tuple[list[str], int, str]:
    """As asked; where that is one rank, two: alone there is nothing to prove."""
    chosen = list(overrides)
    plan = make_plan(build_job([*chosen, "strategy.name=ddp"]), env)
    if plan.world_size == 1:
        shared = ["launch.devices=[0,0]"] if plan.device.value == "cuda" else ["launch.nproc=2"]
        chosen = [t for t in chosen if not t.startswith(("launch.nproc", "launch.devices"))]
        chosen += shared
        plan = make_plan(build_job([*chosen, "strategy.name=ddp"]), env)
    return chosen, plan.world_size, plan.device.value


def _candidates(names: Sequence[str], overrides: Sequence[str], world: int) -> Iterator[Candidate]:
    for asked in dict.fromkeys(ALIASES.get(name, name) for name in names or ALL):
        if asked.startswith("deepspeed"):
            yield from _deepspeed_candidates(asked, overrides, is_asked=bool(names))
        elif asked.startswith("pipeline"):
            yield from _pipeline_candidates(asked, overrides, world)
        elif asked.endswith("_hybrid"):
            few = "" if world >= 4 and world % 2 == 0 else "a hybrid needs 4 ranks or more, even"
            if few and names:
                raise ConfigError(f"{asked}: {few}\nhint: launch.nproc=4")
            size = f"strategy.shard_size={world // 2}"
            yield Candidate(asked, (size, *overrides, f"strategy.name={asked}"), few)
        else:
            yield Candidate(asked, (*overrides, f"strategy.name={asked}"))


def _pipeline_candidates(asked: str, overrides: Sequence[str], world: int) -> Iterator[Candidate]:
    """The schedules that are named, or that strategy.schedule names, or all."""
    named = [t.partition("=")[2] for t in overrides if t.startswith("strategy.schedule=")]
    for label in PIPELINES:
        schedule = label.removeprefix("pipeline_")
        if asked == label or (asked == "pipeline" and schedule in (named or [schedule])):
            told = (*overrides, f"strategy.schedule={schedule}", "strategy.name=pipeline")
            num_ranks = ranks_of_pipeline(build_job(told).config, world)
            yield Candidate(label, (*pipeline_batch(num_ranks), *told))


def _deepspeed_candidates(
    asked: str, overrides: Sequence[str], is_asked: bool
) -> Iterator[Candidate]:
    """The stages that are named, or that strategy.stage names, or all."""
    missing = "" if find_spec("deepspeed") else "deepspeed is not installed"
    if missing and is_asked:
        raise ConfigError(f"{missing}\nhint: pip install 'paceline[deepspeed]'")
    stages = [t.partition("=")[2] for t in overrides if t.startswith("strategy.stage=")]
    for label in DEEPSPEED:
        stage = label.rpartition("_")[2]
        if asked == label or (asked == "deepspeed" and stage in (stages or [stage])):
            name = ("strategy.name=deepspeed", f"strategy.stage={stage}")
            yield Candidate(label, (*overrides, *name), missing)


def _reference_settings(overrides: Sequence[str]) -> list[str]:
    """One rank of ours on the same device, and nothing of a strategy."""
    same = ("attention.", "launch.device=", "model.")
    kept = [text for text in overrides if text.startswith(same)]
    devices = build_job(overrides).config.launch.devices
    place = "launch.nproc=1" if devices == "auto" else f"launch.devices=[{devices[0]}]"
    return [*kept, place, "strategy.name=single"]
