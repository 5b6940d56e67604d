"""`paceline verify` from names to a report: for each strategy plan, launch, judge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config.load import recipe_names
from paceline.config.schema import RunConfig
from paceline.errors import ClusterError, ConfigError, LaunchError, Outcome, PacelineError
from paceline.job import EXPERIMENT
from paceline.machine.facts import probe
from paceline.plan.planner import make_plan
from paceline.records import Env
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.words import did_you_mean
from paceline.strategies import aliases, all_strategies
from paceline.strategies.base import Case
from paceline.verify.judge import depends_on_split, judge, judge_job
from paceline.verify.records import StrategyProof, VerifyReport
from paceline.verify.subject import Batch, MadeModel, OwnJob, Subject, key_of
from paceline.verify.trial import BYTES, EQUAL, RANDOM, WHOLE
from paceline.verify.trials import Trials, expected_bytes
from paceline.workloads.given import is_given

VERIFY_FILE = "verify.json"
APART = "the stages of a pipeline draw their own random numbers: prove it without dropout"
TOO_LARGE = (
    "one process cannot take {} samples at once, so whether the job depends on what else is in a"
    " microbatch is not known: {}"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One row of the table: a case, its overrides, why it cannot be tried here."""

    label: str
    settings: tuple[str, ...]
    skipped: str = ""


def run_verify(
    names: Sequence[str], overrides: Sequence[str], out: Path | None, say: Say
) -> VerifyReport:
    """Prove the named strategies, on our own model or, if a job is among the names, on that."""
    started_at = wall_time()
    RunDir.require_place(out)
    source, names = _find_job(names)
    subject: Subject = OwnJob(source, tuple(overrides)) if source else MadeModel()
    _require_known(subject, names, overrides)
    env = probe()
    overrides, world, device = _choose_ranks(subject, env, overrides)
    names = names or subject.default_names(overrides)
    cases = _choose_cases(names, subject.build(overrides).config, overrides, world)
    num_blocks = max((case.num_blocks for _, case in cases), default=0)
    if num_blocks and not source:  # of all models, as all are held against one reference
        overrides = [*overrides, f"model.num_layers={num_blocks}"]
    candidates = [_candidate(name, case, overrides) for name, case in cases]
    tried = [candidate.label for candidate in candidates if not candidate.skipped]
    subject.prepare(subject.build(overrides), say)
    run = RunDir.create("verify", out, is_run=False)  # last: what is refused leaves none
    say(f"on {world} ranks: {', '.join(tried)}; 10 s or so each, in {run.root}")
    proof = Proof(subject, run, env, world, say)
    try:
        for candidate in candidates:
            proof.prove(candidate)
        proofs = proof.found
        passed = all(one.ok for one in proofs) and any(one.checks for one in proofs)
        outcome = Outcome.OK if passed else Outcome.CHECK_FAILED
    except KeyboardInterrupt:
        outcome = Outcome.INTERRUPTED  # what was proven so far is kept
        proof.leave_out(candidates[len(proof.found) :])
    report = VerifyReport(
        run_dir=str(run.root),
        world_size=world,
        device=device,
        exit_code=outcome.exit_code,
        proofs=proof.found,
        elapsed_s=wall_time() - started_at,
        job=source,
        notes=[*subject.overruled(overrides), *dict.fromkeys(proof.notes)],
    )
    report.save(run.root / VERIFY_FILE)
    return report


@dataclass
class Proof:
    """Proves one candidate after the other. Candidates that cut a step's samples alike share one
    reference."""

    subject: Subject
    run: RunDir
    env: Env
    world: int
    say: Say
    found: list[StrategyProof] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    references: dict[Batch, Trials] = field(default_factory=dict)

    def prove(self, candidate: Candidate) -> None:
        self.found.append(self._prove(candidate))
        self.say(f"{candidate.label}: {_word(self.found[-1])}")

    def leave_out(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            skipped = candidate.skipped or "interrupted"
            self.found.append(StrategyProof(strategy=candidate.label, skipped=skipped))

    def _prove(self, candidate: Candidate) -> StrategyProof:
        label, subject = candidate.label, self.subject
        if candidate.skipped:
            return StrategyProof(strategy=label, skipped=candidate.skipped)
        jobs = subject.trials(candidate.settings, self.world)
        trials = Trials(self.run.root / label, self.env, jobs)
        try:
            trials.plan()
        except PacelineError as error:  # nothing was started
            return StrategyProof(strategy=label, failure=str(error))
        reference = self._reference(candidate, trials)
        if failure := trials.run(subject.prepared, subject.total_s):
            return StrategyProof(strategy=label, failure=failure)
        check = judge_job if isinstance(subject, OwnJob) else judge
        expected = expected_bytes(jobs[BYTES], trials.plans[BYTES])
        self.notes += trials.notes()
        self.notes += [str(found) for found in trials.warnings()]
        if trials.plans[EQUAL].pipeline is not None and RANDOM in reference.notes():
            self.notes.append(APART)
        checks = check(trials.run_dir, reference.run_dir, self.world, expected)
        return StrategyProof(strategy=label, checks=checks)

    def _reference(self, candidate: Candidate, trials: Trials) -> Trials:
        """Return the run of one process on the same samples, the reference for everything."""
        batch = self.subject.alone(trials.jobs[EQUAL], trials.plans[EQUAL])
        if batch in self.references:
            return self.references[batch]
        number = f"_{len(self.references) + 1}" if self.references else ""
        jobs = self.subject.reference(candidate.settings, batch, self.world)
        reference = Trials(self.run.root / f"one_process{number}", self.env, jobs)
        reference.plan()
        if failure := reference.run(self.subject.prepared, self.subject.total_s):
            raise LaunchError(f"the run on one process, the reference, did not finish: {failure}")
        self.references[batch] = reference
        if WHOLE in jobs and (failure := reference.failure_of(WHOLE)):
            self.notes.append(TOO_LARGE.format(batch.micro * batch.accum, failure))
        elif WHOLE in jobs and RANDOM not in reference.notes():
            self.notes += depends_on_split(reference.run_dir, batch)
        return reference


def _word(proof: StrategyProof) -> str:
    if proof.skipped:
        return f"not tried: {proof.skipped}"
    return "proven" if proof.ok else "FAILED"


def _find_job(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the job among these words, or "", and the other words."""
    jobs = [name for name in names if _is_job(name)]
    if len(jobs) > 1:
        raise ConfigError(f"{' and '.join(jobs)}: a proof is of one job\nhint: name one of them")
    return "".join(jobs), [name for name in names if name not in jobs]


def _is_job(name: str) -> bool:
    is_file = ".py" in name or name.endswith((".yaml", ".yml"))
    return is_file or is_given(name) or name.startswith(EXPERIMENT) or name in recipe_names()


def _require_known(subject: Subject, names: Sequence[str], overrides: Sequence[str]) -> None:
    cases = _all_cases(MadeModel().build([]).config, world=2)
    known = {name: None for strategy, case in cases for name in (strategy, case.label)}
    known |= {other: None for other, name in aliases().items() if name in known}
    problems = [
        f"there is no strategy '{name}'\nhint: {did_you_mean(name, [*known, *recipe_names()])}"
        f"strategies are {', '.join(known)}; a job is a recipe, FILE.yaml or FILE.py:Class"
        for name in names
        if name not in known
    ]
    source = subject.source if isinstance(subject, OwnJob) else ""
    for text in overrides:
        key, value = key_of(text), text.partition("=")[2]
        if key == "workload" and not source:  # that of a recipe may be another one
            problems.append(f"{text}: a job is named\nhint: paceline verify {value}")
        elif key == "strategy.name":
            hint = f"paceline verify {source} {value}".replace("  ", " ")
            problems.append(f"{text}: strategies are named\nhint: {hint}")
        elif (key, value) == ("launch.nproc", "1"):
            problems.append(f"{text}: one rank proves nothing\nhint: launch.nproc=2 or more")
    refused = ("strategy.name",) if source else ("workload", "strategy.name")
    named = [text for text in overrides if key_of(text) not in refused]
    problems += subject.refusals(named)
    if problems:
        raise ConfigError(problems)


def _choose_ranks(
    subject: Subject, env: Env, overrides: Sequence[str]
) -> tuple[list[str], int, str]:
    """Return the number of ranks that was asked for, but two instead of one: with one rank there is
    nothing to prove."""
    chosen = list(overrides)
    plan = make_plan(subject.build(chosen), env)
    if plan.world_size == 1:
        shared = ["launch.devices=[0,0]"] if plan.on_gpu else ["launch.nproc=2"]
        chosen = [t for t in chosen if not t.startswith(("launch.nproc", "launch.devices"))]
        chosen += shared
        plan = make_plan(subject.build(chosen), env)
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
        for case in strategy.cases(config, world, config.train.micro_batch_size)
    ]


def _choose_cases(
    names: Sequence[str], config: RunConfig, overrides: Sequence[str], world: int
) -> list[tuple[str, Case]]:
    """Return the cases that are named, by strategy or one by one, or all. If a strategy has
    several, an override that chooses among them leaves only those."""
    every = _all_cases(config, world)
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
    # A case may replace the size of a microbatch, which it has computed its own from.
    sized = {key_of(text) for text in case.defaults} & {"train.micro_batch_size"}
    kept = [text for text in overrides if key_of(text) not in sized]
    settings = (*case.defaults, *kept, *chosen, f"strategy.name={name}")
    return Candidate(case.label, settings, case.skipped)
