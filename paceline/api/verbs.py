"""The verbs of the command line as functions: words in, records out, problems as exceptions.

    result = paceline.train("lm_tiny", out="runs/a", **{"train.steps": 6, "launch.nproc": 2})
    result = paceline.train(MyJob, "train.steps=6")

A job is a recipe, a YAML file, FILE.py:Class, or a class itself. Progress goes to stderr, as on the
command line; `quiet=True` says nothing. What is refused raises a `PacelineError`; so does a run
that did not end well, unless `check=False`: then its result says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.runs import Run, frame_of_csv, place_of
from paceline.errors import ConfigError, Outcome, RunFailed
from paceline.records import Plan, Result
from paceline.records.rundir import RunDir
from paceline.workloads.given import give

if TYPE_CHECKING:
    from pandas import DataFrame

    from paceline.cli.talk import ConsoleTalk
    from paceline.compare import Comparison
    from paceline.sweep.flow import SweepEnd
    from paceline.verify.records import VerifyReport
    from paceline.workloads.base import Workload

    Source = str | Path | type[Workload]
else:
    Source = Any
Place = str | Path


def train(
    job: Source,
    /,
    *words: str,
    out: Place | None = None,
    quiet: bool = False,
    check: bool = True,
    **settings: Any,
) -> Result:
    """Train a job in a new run directory, and return its result once the report is written."""
    from paceline.cli.talk import ConsoleTalk
    from paceline.cli.together import require_alone
    from paceline.job import load_job
    from paceline.machine.fork_server import start_early

    require_alone("train")
    loaded = load_job(name_of(job), as_words(words, settings))
    talk = ConsoleTalk(quiet)
    talk.say("checking the machine and planning")
    start_early(loaded.config.launch.launcher, loaded.workload.preloads)
    from paceline.run.flow import run_job

    return _ended(run_job(loaded, _path(out), talk), talk, check)


def resume(
    run_dir: Place,
    job: "type[Workload] | None" = None,
    /,
    *words: str,
    allow_change: bool = False,
    quiet: bool = False,
    check: bool = True,
    **settings: Any,
) -> Result:
    """Resume a run where it stopped. One that was started with a class needs it again, as `job`; a
    file that was never typed here is refused: the command line asks about it."""
    from paceline.cli.talk import ConsoleTalk
    from paceline.cli.together import require_alone
    from paceline.machine.fork_server import start_early

    require_alone("train")
    if job is not None:
        give(job)
    start_early()
    from paceline.run.flow import resume_job
    from paceline.run.resume import load_resumption

    talk = ConsoleTalk(quiet)
    resumption = load_resumption(place_of(run_dir), as_words(words, settings), allow_change)
    return _ended(resume_job(resumption, talk), talk, check)


def plan(job: Source, /, *words: str, **settings: Any) -> Plan:
    """Return the plan; `.problems()` lists what would make `train` refuse it."""
    from paceline.job import load_job
    from paceline.machine import resolve_topology
    from paceline.run.flow import decide

    return decide(load_job(name_of(job), as_words(words, settings)), resolve_topology())[1]


def verify(
    *words: Source, out: Place | None = None, quiet: bool = False, **settings: Any
) -> "VerifyReport":
    """Prove strategies against one process and return the table; a failed proof is part of it, not
    an exception. `words` are strategies, key=value and, to prove a job, that job."""
    from paceline.cli.talk import ConsoleTalk
    from paceline.cli.verify import is_setting
    from paceline.verify.flow import run_verify

    named = [name_of(word) for word in words]
    names = [word for word in named if not is_setting(word)]
    keys = as_words([word for word in named if is_setting(word)], settings)
    return run_verify(names, keys, _path(out), ConsoleTalk(quiet).say)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended: where it lies, and what came of it."""

    path: Path
    end: "SweepEnd"

    @property
    def winner(self) -> str | None:
        """The cell that leads; None where none was measured."""
        return self.end.judgement.winner

    @property
    def best_overrides(self) -> list[str]:
        """The winner's settings, as words for `train`."""
        named = [cell for cell in self.end.record.cells if cell.name == self.winner]
        return [word for cell in named for word in cell.overrides]

    @property
    def groups(self) -> "DataFrame":
        """The cells in their order, with their figures: ranked_groups.csv."""
        from paceline.sweep.folder import SweepDir

        return frame_of_csv(SweepDir(self.path).ranked)


def sweep(
    job: Source,
    /,
    *words: str,
    axes: Mapping[str, Sequence[Any]] | None = None,
    out: Place | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Sweep:
    """Run every combination of `axes`, interleaved and repeated. What the command line has flags
    for is set by the same word: repeats=3, steps=60, metric="val/accuracy:max", baseline=CELL."""
    from paceline.cli.sweep_talk import SweepConsole
    from paceline.cli.together import require_alone
    from paceline.machine.fork_server import start_early
    from paceline.sweep.flow import open_folder, plan_sweep, run_planned
    from paceline.sweep.folder import SweepDir
    from paceline.sweep.spec import SweepSpec, read_spec, shown_value

    require_alone("sweep")
    own = {key: settings.pop(key) for key in list(settings) if key in SweepSpec.model_fields}
    drawn = [f"{key}={','.join(map(shown_value, values))}" for key, values in (axes or {}).items()]
    spec = read_spec(name_of(job), as_words(words, settings), drawn, own)
    SweepDir.require_place(_path(out))
    start_early()
    talk = SweepConsole(quiet)
    record = plan_sweep(spec)
    talk.plan(spec, record)
    folder = open_folder(record, spec.recipe, _path(out))
    with talk.live():
        end = run_planned(spec, record, folder, talk)
    talk.conclude(end, folder)
    if end.stopped_by == Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return Sweep(folder.root, end)


def compare(*runs: "Place | Run", metric: str | None = None, margin: float = 0.02) -> "Comparison":
    """Compare runs, folders of repeats, or SWEEP_DIR:CELL with the first of them."""
    from paceline.compare import compare_sides, open_side
    from paceline.stats.figures import require_metric

    try:
        chosen = None if metric is None else require_metric(metric)
    except ValueError as error:
        raise ConfigError(f"metric: {error}") from error
    sides = [open_side(str(run.path if isinstance(run, Run) else run)) for run in runs]
    return compare_sides(sides, chosen, margin)


def name_of(job: Source) -> str:
    """Return the word that stands for a job on the command line, or for a class in this process."""
    if isinstance(job, type):
        return give(job)
    if not isinstance(job, str | Path):
        raise ConfigError(
            f"a job is a recipe's name, a YAML file, FILE.py:Class, or a class; not {job!r}\n"
            "hint: hand over the class itself, not an object of it"
        )
    return str(job)


def as_words(words: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """Return key=value words as on the command line. Strings are read as there: "off" is a word and
    "1e-3" a number."""
    odd = [word for word in words if "=" not in word and not word.startswith("~")]
    if odd:
        raise ConfigError(f"{odd[0]!r} is not KEY=VALUE\nhint: such as 'train.steps=6'")
    return [*words, *(f"{key}={_text_of(value)}" for key, value in settings.items())]


def _text_of(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    try:
        return json.dumps(value)  # which YAML reads as it is meant
    except TypeError as error:
        raise ConfigError(f"{value!r} cannot stand in a config: {error}") from error


def _path(out: Place | None) -> Path | None:
    return None if out is None else place_of(out)


def _ended(result: Result, talk: "ConsoleTalk", check: bool) -> Result:
    """Return the result of a run that ended well, or was not to be checked; else raise. Ctrl-C is
    raised again for the program, once the run has stopped in order."""
    from paceline.cli.talk import failure_lines, say_result

    if check and result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if check and result.outcome is not Outcome.OK:
        lines = failure_lines(result)
        raise RunFailed("\n".join([*lines, f"hint: its record is in {result.run_dir}"]), result)
    say_result(talk, result, RunDir(Path(result.run_dir)))
    return result
