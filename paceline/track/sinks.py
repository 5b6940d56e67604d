"""The trackers' own APIs. A new tracker is a class here, a line in `SINKS`, and its name in
`observe.trackers`.

Each is set up by its own variables (WANDB_PROJECT, MLFLOW_TRACKING_URI, ...): secrets stay where
they are. What is sent is the config as run.yaml shows it, without what looks like a secret, and
numbers.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from paceline.config.schema import SECRET_NAME
from paceline.machine.facts import allowed_variables
from paceline.records import Finding

PROJECT = "paceline"  # where the user has not named one
Numbers = Mapping[str, float]
WITH_PASSWORD = re.compile(r"://[^/@\s]+@")  # an address that says who may enter


@dataclass(frozen=True)
class Subject:
    """The run that is tracked."""

    name: str
    id: str  # the same in every attempt
    root: Path
    config: Mapping[str, str | int | float | bool]  # by whole key: train.steps


class Sink(Protocol):
    def __init__(self, subject: Subject) -> None: ...

    def send(self, step: int, numbers: Numbers) -> None: ...

    def finish(self, outcome: str) -> None: ...


class TensorBoard:
    """Event files in the run directory: tensorboard --logdir RUN_DIR, or a folder of runs."""

    def __init__(self, subject: Subject) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(subject.root / "tensorboard"))

    def send(self, step: int, numbers: Numbers) -> None:
        values = [self._summary.Value(tag=tag, simple_value=v) for tag, v in numbers.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, summary=summary, wall_time=time.time()))

    def finish(self, outcome: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of WANDB_PROJECT; WANDB_MODE=offline keeps it in RUN_DIR/wandb. Neither code, git
    state, output nor the machine is uploaded: what of them is known is in the run directory."""

    def __init__(self, subject: Subject) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            silent=True,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=subject.name,
            id=subject.id,
            resume="allow",
            dir=str(subject.root),
            config=dict(subject.config),
            settings=settings,
        )

    def send(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, outcome: str) -> None:
        self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "ok" else 1)


class MLflow:
    """A run of MLFLOW_EXPERIMENT_NAME at MLFLOW_TRACKING_URI; without, in ./mlruns."""

    def __init__(self, subject: Subject) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri or uri.startswith("file:"):
            # Version 3 prefers a data base to files, and wants to be told that files are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(uri or f"file:{Path('mlruns').absolute()}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        known = self._client.search_runs([experiment], f"tags.paceline = '{subject.id}'")
        tags = {"paceline": subject.id}
        run = (known or [self._client.create_run(experiment, tags=tags, run_name=subject.name)])[0]
        self._id: str = run.info.run_id
        if known:  # resumed: its config is there, and a key's value may not be changed
            self._client.update_run(self._id, status="RUNNING")
            return
        params = [Param(key, str(value)[:500]) for key, value in subject.config.items()]
        for first in range(0, len(params), 100):  # what one request may hold
            self._client.log_batch(self._id, params=params[first : first + 100])

    def send(self, step: int, numbers: Numbers) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, outcome: str) -> None:
        self._client.set_tag(self._id, "outcome", outcome)
        self._client.set_terminated(self._id, "FINISHED" if outcome == "ok" else "FAILED")


class Trackio:
    """A run of TRACKIO_PROJECT in Trackio's own folder on this machine (TRACKIO_DIR)."""

    def __init__(self, subject: Subject) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(
            project=project,
            name=f"{subject.name}-{subject.id}",
            config=dict(subject.config),
            embed=False,
            resume="allow",
            auto_log_gpu=False,  # telemetry.csv has it
            auto_log_cpu=False,
        )

    def send(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()  # type: ignore[no-untyped-call, unused-ignore]


class Aim:
    """A run of AIM_EXPERIMENT in the repository AIM_REPO; without, in ./.aim."""

    def __init__(self, subject: Subject) -> None:
        from aim import Run

        self._run = Run(
            repo=os.environ.get("AIM_REPO", "."),
            experiment=os.environ.get("AIM_EXPERIMENT", PROJECT),
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._run.name = subject.name
        self._run["config"] = dict(subject.config)

    def send(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._run.track(value, name=name, step=step)

    def finish(self, outcome: str) -> None:
        self._run["outcome"] = outcome
        self._run.close()


# By the name in observe.trackers: the package that must be installed, and who calls it.
SINKS: dict[str, tuple[str, type[Sink]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
    "trackio": ("trackio", Trackio),
    "aim": ("aim", Aim),
}


def check_installed(names: Sequence[str]) -> Iterator[Finding]:
    """Yield trackers whose package is not here: a setting that cannot take effect."""
    for name in names:
        package = SINKS[name][0]
        if find_spec(package) is None:
            yield Finding.error(
                "observe.trackers",
                f"{name} was asked for, and {package} is not installed",
                hint=f"pip install {package}, or 'paceline[trackers]' for all of them",
                cause="cluster",
            )


def config_to_send(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the keys of run.yaml, flat. Variables for ranks follow the rule of env.json, keys that
    are called like a secret are left out, and so are long texts and options of programs."""
    settings = dict(config)
    launch = dict(settings.get("launch", {}))
    launch["env"] = allowed_variables(launch.get("env") or {})
    settings["launch"] = {k: v for k, v in launch.items() if not k.endswith("_args")}
    return {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in _leaves(settings)
        if isinstance(value, bool | int | float) or not _is_secret(key, str(value))
    }


def _is_secret(key: str, text: str) -> bool:
    return bool(SECRET_NAME.search(key.rpartition(".")[2]) or WITH_PASSWORD.search(text))


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif value is not None and value != []:
            yield f"{above}{name}", value
