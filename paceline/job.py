"""What the user asked to run: a checked config and the workload it names.

job = load_job("lm_tiny", ["train.steps=50"])
job = load_job("my_job.py:MyWorkload", [])
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from paceline.config.load import Draft, load_config, read_draft, validate
from paceline.config.plain import read_plain
from paceline.config.schema import RunConfig, run_schema
from paceline.errors import ConfigError, PacelineError
from paceline.machine.launchers import launch_section
from paceline.records.base import load_map
from paceline.records.files import fingerprint
from paceline.records.rundir import RunDir
from paceline.strategies import find_strategy, strategy_section
from paceline.workloads.base import REGISTRY, Workload, find_workload, load_trusted, remember_typed
from paceline.workloads.given import is_given, pack, unpack

EXPERIMENT = "+experiment="


@dataclass(frozen=True)
class Job:
    """A job to run. `asked` is the command line in words, for the record. `packed` is the class of
    the workload for ranks, where it is in no file."""

    config: RunConfig
    workload: Workload
    asked: tuple[str, ...] = ()
    packed: bytes = b""

    @property
    def fingerprint(self) -> str:
        """Return a text that is equal for runs that ask for the same thing under another name:
        keys that only other strategies read are not asked."""
        config = self.config.model_copy(update={"name": ""})
        used = find_strategy(config.strategy.name).name
        unread = {key for key, by in type(config.strategy).readers.items() if used not in by}
        return fingerprint(config.model_dump_json(exclude={"strategy": unread}))


def load_job(source: str, overrides: Sequence[str]) -> Job:
    """Read RECIPE, FILE.yaml, FILE.py:Class, the name of a class that was given, or
    +experiment=RECIPE, with overrides on top."""
    name = source.removeprefix(EXPERIMENT)
    if name.endswith(".py"):
        raise ConfigError(f"{name} needs the name of its class\nhint: {name}:MyWorkload")
    if ".py:" in name or is_given(name):
        draft = read_draft(None, [f"workload={name}", *overrides])
        _name_after_class(draft, name)
    else:
        draft = read_draft(name, overrides)
    typed = draft.typed("workload")
    if typed is not None and typed != name and (".py:" in name or is_given(name)):
        raise ConfigError(
            f"{name} is what shall be trained, and so is workload={typed}: a run trains one\n"
            f"hint: leave out workload={typed}, or train a recipe of {typed} (paceline recipes)"
        )
    written: Any = OmegaConf.to_container(draft.tree, resolve=False)
    if "axes" in written:
        raise ConfigError(f"{name} is a sweep, not a run\nhint: paceline sweep {name}")
    chosen = typed if typed is not None else written.get("workload")
    if not isinstance(chosen, str) or "${" in chosen:
        hint = f"hint: workload: {', '.join(REGISTRY)}, or a FILE.py:Class that is typed"
        missing = f"{draft.place} must set workload to a plain name\n{hint}"
        raise ConfigError([*draft.problems, missing])
    workload = find_workload(chosen, typed=typed is not None)
    config = validate(draft, job_schema(workload))
    return Job(config, workload(), (source, *overrides), pack(chosen))


def job_schema(workload: type[Workload]) -> type[RunConfig]:
    """Return every key of a run of `workload`, those of all strategies and launchers included."""
    return run_schema(
        workload.Model, workload.Data, strategy_section(), launch_section(), workload.Loss
    )


def remember_asked(source: str, overrides: Sequence[str]) -> None:
    """Keep that a workload's file was typed, in a process that reads no config: a rank above 0,
    whose machine need not share rank 0's state folder."""
    named = [word.lstrip("+").removeprefix("workload=") for word in overrides]
    for word in (source.removeprefix(EXPERIMENT), *named):
        remember_typed(word)


def preloads_of(root: Path) -> tuple[str, ...]:
    """Return what the fork server shall import for a run that is resumed, by its name for an
    installed workload alone; nothing where that cannot be read, which others will say."""
    with suppress(PacelineError, KeyError, TypeError, ValueError):
        if (name := read_plain(RunDir(root).config)["workload"]) in REGISTRY:
            return find_workload(name, typed=False).preloads
    return ()


def reload_job(run: RunDir, workload: str, packed: bytes = b"") -> Job:
    """Load the job of a run directory. `workload` was typed, or found trusted, by whoever started
    this rank; what the directory's files name now is not asked. `packed` is a class that it was
    given instead."""
    unpack(packed)
    kind = load_trusted(workload)
    job = Job(load_config(run.config, job_schema(kind)), kind())
    job.workload.prepared = load_map(run.data)
    return job


def _name_after_class(draft: Draft, spec: str) -> None:
    """Name the run of `my_job.py:MyWorkload` MyWorkload until the user names it."""
    draft.tree["name"] = spec.rsplit(":", 1)[-1]
