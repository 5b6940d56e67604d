"""What the user asked to run: a checked config and the workload it names.

job = load_job("lm_tiny", ["train.steps=50"])
job = load_job("my_job.py:MyWorkload", [])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import Draft, dump_config, load_config, read_draft, validate
from paceline.config.schema import RunConfig, run_schema
from paceline.errors import ConfigError
from paceline.files import fingerprint
from paceline.workloads.base import Workload, find_workload

EXPERIMENT = "+experiment="


@dataclass(frozen=True)
class Job:
    """`asked` is the command line in words, for the record."""

    config: RunConfig
    workload: Workload
    asked: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Equal for runs that ask for the same thing under another name."""
        return fingerprint(dump_config(self.config.model_copy(update={"name": ""})))


def load_job(source: str, overrides: Sequence[str]) -> Job:
    """Read RECIPE, FILE.yaml, FILE.py:Class or +experiment=RECIPE, with overrides on top."""
    name = source.removeprefix(EXPERIMENT)
    if ".py:" in name:
        draft = read_draft(None, [f"workload={name}", *overrides])
        _name_after_class(draft, name)
    else:
        draft = read_draft(name, overrides)
    typed = draft.typed("workload")
    chosen = typed if typed is not None else draft.tree.get("workload")
    if not isinstance(chosen, str):
        raise ConfigError(
            [*draft.problems, f"workload is required and {draft.place} does not set it"]
        )
    workload = find_workload(chosen, typed=typed is not None)
    config = validate(draft, run_schema(workload.Model, workload.Data))
    return Job(config, workload(), (source, *overrides))


def reload_job(run_yaml: Path, workload: str) -> Job:
    """The job of a run directory; `workload` is what was typed, from launch.json, not the YAML."""
    kind = find_workload(workload, typed=True)
    return Job(load_config(run_yaml, run_schema(kind.Model, kind.Data)), kind())


def _name_after_class(draft: Draft, spec: str) -> None:
    """`my_job.py:MyWorkload` names its run MyWorkload until the user names it."""
    draft.tree["name"] = spec.rsplit(":", 1)[-1]
