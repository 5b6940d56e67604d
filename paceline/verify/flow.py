"""`paceline verify` from names to a report: for each strategy plan, launch, judge."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.facts import probe
from paceline.errors import EXIT_CODES, ConfigError, Outcome, PacelineError
from paceline.plan.planner import make_plan
from paceline.records import Env
from paceline.rundir import RunDir
from paceline.verify.judge import judge
from paceline.verify.records import StrategyProof, VerifyReport
from paceline.verify.trials import Trials, build_job, expected_bytes

ALL = ("ddp", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid", "deepspeed")
ALIASES = {"zero0": "ddp", "fsdp": "zero3"}
# What a proof may be asked under. Other keys would change what is proven.
ALLOWED = ("launch.", "strategy.", "attention.", "train.compile", "train.activation_checkpointing")
STAGES = range(4)
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
    candidates = list(_candidates(names, world))
    run = RunDir.create("verify", out, is_run=False)
    say(f"one process first, then {len(candidates)} strategies on {world} ranks, in {run.root}")
    reference = Trials(run.root / "one_process", env, world)
    reference.run(_reference_settings(overrides), only_equal=True)
    proofs = []
    for candidate in candidates:
        proofs.append(_prove(candidate, run, reference, overrides))
        say(f"{candidate.label}: {_word(proofs[-1])}")
    passed = all(proof.ok for proof in proofs) and any(proof.checks for proof in proofs)
    report = VerifyReport(
        run_dir=str(run.root),
        world_size=world,
        device=device,
        exit_code=EXIT_CODES[Outcome.OK if passed else Outcome.CHECK_FAILED],
        proofs=proofs,
        elapsed_s=time.time() - started_at,
    )
    report.save(run.root / VERIFY_FILE)
    return report


def _prove(
    candidate: Candidate, run: RunDir, reference: Trials, overrides: Sequence[str]
) -> StrategyProof:
    if candidate.skipped:
        return StrategyProof(strategy=candidate.label, skipped=candidate.skipped)
    trials = Trials(run.root / candidate.label, reference.env, reference.world)
    settings = [*overrides, *candidate.settings]
    try:
        failure = trials.run(settings)
    except PacelineError as error:  # of the plan: nothing was started
        return StrategyProof(strategy=candidate.label, failure=str(error))
    if failure:
        return StrategyProof(strategy=candidate.label, failure=failure)
    expected = expected_bytes(settings, reference.env)
    checks = judge(trials.run_dir, reference.run_dir, trials.world, expected)
    return StrategyProof(strategy=candidate.label, checks=checks)


def _word(proof: StrategyProof) -> str:
    if proof.skipped:
        return f"not tried: {proof.skipped}"
    return "proven" if proof.ok else "FAILED"


def _require_known(names: Sequence[str], overrides: Sequence[str]) -> None:
    known = (*ALL, *ALIASES)
    problems = [
        f"there is no strategy '{name}'\nhint: {', '.join(known)}"
        for name in names
        if name not in known
    ]
    problems += [
        f"{text}: a proof fixes this setting\nhint: it takes {', '.join(ALLOWED)}"
        for text in overrides
        if not text.lstrip("+~").startswith(ALLOWED) or text.lstrip("+").startswith("strategy.name")
    ]
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


def _candidates(names: Sequence[str], world: int) -> Iterator[Candidate]:
    for asked in dict.fromkeys(ALIASES.get(name, name) for name in names or ALL):
        if asked == "deepspeed":
            yield from _deepspeed_candidates(is_asked=bool(names))
        elif asked.endswith("_hybrid"):
            few = "" if world >= 4 and world % 2 == 0 else "a hybrid needs 4 ranks or more, even"
            if few and names:
                raise ConfigError(f"{asked}: {few}\nhint: launch.nproc=4")
            size = f"strategy.shard_size={world // 2}"
            yield Candidate(asked, (f"strategy.name={asked}", size), few)
        else:
            yield Candidate(asked, (f"strategy.name={asked}",))


def _deepspeed_candidates(is_asked: bool) -> Iterator[Candidate]:
    from importlib.util import find_spec

    missing = "" if find_spec("deepspeed") else "deepspeed is not installed"
    if missing and is_asked:
        raise ConfigError(f"{missing}\nhint: pip install 'paceline[deepspeed]'")
    for stage in STAGES:
        settings = ("strategy.name=deepspeed", f"strategy.stage={stage}")
        yield Candidate(f"deepspeed_{stage}", settings, missing)


def _reference_settings(overrides: Sequence[str]) -> list[str]:
    """One rank of ours on the same device, and nothing of a strategy."""
    kept = [text for text in overrides if text.startswith(("attention.", "launch.device="))]
    devices = [text for text in overrides if text.startswith("launch.devices=")]
    first = [f"launch.devices=[{json.loads(text.partition('=')[2])[0]}]" for text in devices]
    return [*kept, *(first or ["launch.nproc=1"]), "strategy.name=single"]
