"""`paceline check` from settings to report: the same stages as a run (run/flow.py), with a task
that measures instead of training."""

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.check.judge import expect, judge
from paceline.check.lint import lint, probe_situation
from paceline.check.rank import CHECK
from paceline.check.records import (
    CheckReport,
    Expected,
    GroupCheckup,
    RankCheckup,
    checkup_path,
    group_path,
)
from paceline.config.load import dump_config, read_draft, validate
from paceline.config.schema import CheckConfig
from paceline.errors import ClusterError, Outcome
from paceline.launch.base import LaunchOrder, with_short_limits
from paceline.launch.ending import Ending, untold_cause
from paceline.launch.rendezvous import Rendezvous
from paceline.machine.facts import probe
from paceline.machine.launchers import check_schema
from paceline.machine.measures import keep_rates
from paceline.machine.topology import Topology
from paceline.plan.crew import check_crew, choose_crew, choose_threads, count_ranks, shares_gpus
from paceline.records import Crew, Env, Finding
from paceline.records.files import write_atomic
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.run.flow import choose_launcher, run_short_task

TOTAL_S = 180.0  # a check that takes longer has hung
COLLECTIVE_S = 30.0  # none that it starts takes a second

Say = Callable[[str], None]


def load_settings(overrides: Sequence[str]) -> CheckConfig:
    return validate(read_draft(None, overrides), check_schema())


def run_check(
    settings: CheckConfig, out: Path | None, say: Say, rendezvous: Rendezvous | None = None
) -> CheckReport:
    """Examine the machines; a finding of severity error means that they are not fit."""
    started_at = wall_time()
    env, topology = probe(), rendezvous.topology if rendezvous else Topology()
    crew = choose_crew(settings.launch, env, topology)
    threads = choose_threads(settings.launch, env, crew, workers=0).value
    findings = list(check_crew(settings.launch, env, crew, topology))
    run = RunDir.create("check", out, is_run=False)
    write_atomic(run.config, dump_config(settings))
    env.save(run.env)
    if any(finding.severity == "error" for finding in findings):
        findings += _lint_here(crew, run)
        ranks, group, expected = list[RankCheckup](), None, Expected()
        if rendezvous is not None:
            rendezvous.publish_exit(Outcome.REFUSED_CLUSTER.exit_code)
    else:
        order = LaunchOrder(settings.launch, crew, env, threads, CHECK, run_dir=str(run.root))
        say(f"starting {count_ranks(crew.world_size)} to measure with, in {run.root}")
        findings += _examine(order, run, rendezvous)
        ranks, group = _load(run, crew.world_size)
        expected = expect(ranks, env)
        findings += judge(ranks, group, expected, shares_gpus(settings.launch))
        findings += _alone(crew) + _keep(env, crew, threads, ranks, group)
    fit = not any(finding.severity == "error" for finding in findings)
    report = CheckReport(
        run_dir=str(run.root),
        fit=fit,
        exit_code=(Outcome.OK if fit else Outcome.REFUSED_CLUSTER).exit_code,
        crew=crew,
        ranks=ranks,
        group=group,
        expected=expected,
        findings=findings,
        elapsed_s=wall_time() - started_at,
    )
    report.save(run.check)
    return report


def _alone(crew: Crew) -> list[Finding]:
    if crew.world_size > 1:
        return []
    what = "a world of one rank proves little: no link and no collective was used"
    return [Finding.note("ranks", what, hint="give launch.nproc=2 or more")]


def _keep(
    env: Env, crew: Crew, threads: int, ranks: list[RankCheckup], group: GroupCheckup | None
) -> list[Finding]:
    """Store the rates of rank 0's device and its slowest link, for later plans and reports."""
    if not ranks or not ranks[0].rates:
        return []
    try:
        found = (group.pairs, group.speeds) if group else ((), ())
        keep_rates(env, crew, threads, ranks[0].rates, *found)
    except OSError as error:
        what = f"the rates cannot be kept for later reports: {error.strerror}"
        return [Finding.note("cache", what, hint="set XDG_CACHE_HOME")]
    return []


def _examine(order: LaunchOrder, run: RunDir, rendezvous: Rendezvous | None) -> list[Finding]:
    """Run the ranks; what stopped them from finishing is a finding too."""
    launcher = choose_launcher(order.crew, rendezvous, order.settings.start_s)
    launcher.require_ready(order)
    launch = launcher.plan(order)
    launch = with_short_limits(launch, launch.limits.total_s or TOTAL_S, COLLECTIVE_S)
    ending = run_short_task(launcher, launch, run, CHECK)
    return [*launch.findings, *_failures(run, ending)]


def _failures(run: RunDir, ending: Ending) -> list[Finding]:
    """Return an error for each rank that did not finish, of which an attempt names only one."""
    seen = ending.seen
    if (untold := untold_cause(run, seen)) is not None:
        rank, why = untold
        if rank is None:
            return [_error("launcher", why, f"see {run.launcher_log}")]
        return [_error(f"rank {rank}", why, f"see {run.stacks(rank)}")]
    failed = []
    for rank in range(ending.num_ranks):
        verdict = ending.verdicts.get(rank)
        if verdict is not None and verdict.error is None:
            continue
        code = seen.exit_codes.get(rank)
        asked = rank in seen.ends and seen.ends[rank].asked_to_end
        said = verdict.error.message if verdict and verdict.error else f"ended with {code}"
        hint = f"the end of its log is in {run.rank_log(rank)}"
        failed.append((asked, _error(f"rank {rank}", said, hint)))
    # A rank that was only asked to end after another's failure has nothing to tell.
    told = [finding for asked, finding in failed if not asked]
    return told or [finding for _, finding in failed]


def _error(where: str, what: str, hint: str) -> Finding:
    return Finding.error(where, what, hint, cause="cluster")


def _load(run: RunDir, num_ranks: int) -> tuple[list[RankCheckup], GroupCheckup | None]:
    paths = [checkup_path(run, rank) for rank in range(num_ranks)]
    ranks = [RankCheckup.load(path) for path in paths if path.is_file()]
    group = GroupCheckup.load(group_path(run)) if group_path(run).is_file() else None
    return ranks, group if len(ranks) == num_ranks else None


def _lint_here(crew: Crew, run: RunDir) -> list[Finding]:
    """Check the environment of this process where no rank has done so."""
    import os

    return lint(os.environ, probe_situation(crew.num_nodes, crew.per_node, run.root))


def save_snapshot(env: Env, folder: Path) -> list[str]:
    """Write git_sha.txt, collect_env.txt and, where there is a GPU, nvidia_smi.xml."""
    import subprocess

    from torch.utils.collect_env import get_pretty_env_info

    try:
        folder.mkdir(parents=True, exist_ok=True)
        commit = env.git.commit if env.git else "not a git checkout"
        dirty = " with uncommitted changes" if env.git and env.git.dirty else ""
        write_atomic(folder / "git_sha.txt", f"{commit}{dirty}\n")
        write_atomic(folder / "collect_env.txt", str(get_pretty_env_info()) + "\n")  # type: ignore[no-untyped-call]
        if env.gpus:
            done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True)
            write_atomic(folder / "nvidia_smi.xml", done.stdout)
    except OSError as error:
        raise ClusterError(f"cannot write a snapshot to {folder}: {error.strerror}") from error
    return sorted(path.name for path in folder.iterdir())
