"""`paceline verify` from names to a report: for each strategy plan, launch, judge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import RunConfig
from paceline.errors import (
    ClusterError,
    ConfigError,
    LaunchError,
    Outcome,
    PacelineError,
)
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Env
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.strategies import aliases, all_strategies, lossy_keys
from paceline.strategies.base import Case
from paceline.verify.judge import judge
from paceline.verify.records import StrategyProof, VerifyReport
from paceline.verify.trials import MICRO, Trials, build_job, expected_bytes

# What a proof may be asked under. Other keys would change what is proven.
ALLOWED = ("launch.", "strategy.", "attention.", "train.compile", "train.activation_checkpointing")
VERIFY_FILE = "verify.json"
OWN_MODEL = (
    "{}: a proof has a model and data of its own, made to show mistakes of a strategy; it takes no"
    " job\nhint: train the job for some steps with optim.name=sgd on one rank and on several, with"
    " one train.global_batch_size, and hold the losses in training.csv against each other"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One row of the table: a case, what it is said with, why it cannot be tried here."""

    label: str
    settings: tuple[str, ...]
    skipped: str = ""


def run_verify(
    names: Sequence[str], overrides: Sequence[str], out: Path | None, say: Say
) -> VerifyReport:
    started_at = wall_time()
    _require_known(names, overrides)
    env = probe()
    overrides, world, device = _choose_ranks(env, overrides)
    cases = _choose_cases(names, overrides, world)
    num_blocks = max((case.num_blocks for _, case in cases), default=0)
    if num_blocks:  # of all models, as all are held against one reference
        overrides = [*overrides, f"model.num_layers={num_blocks}"]
    candidates = [_candidate(name, case, overrides) for name, case in cases]
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
        elapsed_s=wall_time() - started_at,
    )
    report.save(run.root / VERIFY_FILE)
    return report


def _require_reference(failure: str) -> None:
    """Refuse to judge without one process's numbers: there is nothing to hold a strategy
    against."""
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
    cases = _all_cases(build_job([]).config, world=2)
    known = {name: None for strategy, case in cases for name in (strategy, case.label)}
    known |= {other: None for other, name in aliases().items() if name in known}
    problems = [
        OWN_MODEL.format(name)
        if ":" in name
        else f"there is no strategy '{name}'\nhint: {', '.join(known)}"
        for name in names
        if name not in known
    ]
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if key == "workload":
            problems.append(OWN_MODEL.format(text))
        elif key == "strategy.name":
            problems.append(f"{text}: strategies are named\nhint: paceline verify {value}")
        elif not key.startswith(ALLOWED):
            problems.append(f"{text}: a proof fixes this\nhint: it takes {', '.join(ALLOWED)}")
        elif key in lossy_keys():
            problems.append(f"{text}: this changes the gradients\nhint: prove without it")
        elif (key, value) == ("launch.nproc", "1"):
            problems.append(f"{text}: one rank proves nothing\nhint: launch.nproc=2 or more")
    if problems:
        raise ConfigError(problems)


def _choose_ranks(env: Env, overrides: Sequence[str]) -> tuple[list[str], int, str]:
    """Return the ranks that were asked for; where that is one, two: alone there is nothing to
    prove."""
    chosen = list(overrides)
    plan = make_plan(build_job(chosen), env)
    if plan.world_size == 1:
        shared = ["launch.devices=[0,0]"] if plan.on_gpu else ["launch.nproc=2"]
        chosen = [t for t in chosen if not t.startswith(("launch.nproc", "launch.devices"))]
        chosen += shared
        plan = make_plan(build_job(chosen), env)
    # Whatever the strategy, these ranks cannot start here: one refusal, not a failure for each.
    lacking = [str(problem) for problem in plan.problems() if problem.cause == "cluster"]
    if lacking:
        raise ClusterError(lacking)
    return chosen, plan.world_size, plan.device.value


def _all_cases(config: RunConfig, world: int) -> list[tuple[str, Case]]:
    """Yield every case of every strategy, with the strategy's name."""
    return [
        (name, case)
        for name, strategy in all_strategies().items()
        for case in strategy.cases(config, world, MICRO)
    ]


def _choose_cases(
    names: Sequence[str], overrides: Sequence[str], world: int
) -> list[tuple[str, Case]]:
    """Return the cases that are named, by strategy or one by one, or all. Where a strategy has
    several, an override that chooses among them leaves only those."""
    every = _all_cases(build_job(overrides).config, world)
    said = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    found, problems = [], dict[str, None]()
    for asked in dict.fromkeys(aliases().get(name, name) for name in names or all_strategies()):
        for name, case in every:
            fits = all(said.get(key, value) == value for key, value in case.chosen.items())
            if asked == case.label or (asked == name and fits):
                found.append((name, case))
                if case.skipped and names:
                    problems[f"{asked}: {case.skipped}\nhint: {case.hint}"] = None
    if problems:
        raise ConfigError(list(problems))
    return found


def _candidate(name: str, case: Case, overrides: Sequence[str]) -> Candidate:
    chosen = [f"{key}={value}" for key, value in case.chosen.items()]
    settings = (*case.defaults, *overrides, *chosen, f"strategy.name={name}")
    return Candidate(case.label, settings, case.skipped)


def _reference_settings(overrides: Sequence[str]) -> list[str]:
    """Return what makes the reference: one rank on the same device, and nothing of a strategy."""
    same = ("attention.", "launch.device=", "model.")
    kept = [text for text in overrides if text.startswith(same)]
    devices = build_job(overrides).config.launch.devices
    place = "launch.nproc=1" if devices == "auto" else f"launch.devices=[{devices[0]}]"
    return [*kept, place]
