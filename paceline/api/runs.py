"""A run directory for people who compute with it: records, and tables as pandas frames.

run = paceline.load_run("runs/latest")
run.result.final_loss        run.training.plot(x="step", y="loss")        run.load_model()
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.plain import read_plain
from paceline.errors import ConfigError, DataError
from paceline.records import Env, Plan, Result
from paceline.records.columns import Table
from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps, read_telemetry, read_training

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    from paceline.workloads.base import Workload


def load_run(path: str | Path) -> "Run":
    """Open the directory of a run, whether it has ended, has failed or is still going on."""
    return Run(RunDir.open(place_of(path)).root)


def place_of(path: str | Path) -> Path:
    """Return a path that a program names; ~ is the home, as it would be on a command line."""
    return Path(os.path.expanduser(path))


@dataclass(frozen=True)
class Run:
    """A run directory. Records are read once; tables on each access, because those of a live run
    grow."""

    path: Path

    @property
    def is_finished(self) -> bool:
        return self._files.result.is_file()

    @property
    def result(self) -> Result:
        """How it ended and what it measured: result.json."""
        if not self.is_finished:
            raise DataError(
                f"{self.path} has no result yet: it goes on, or its supervisor was killed\n"
                "hint: its tables can be read meanwhile: run.training, run.steps, run.telemetry"
            )
        return Result.load(self._files.result)

    @cached_property
    def plan(self) -> Plan:
        """What was decided, with the reasons: plan.json."""
        return Plan.load(self._files.plan)

    @cached_property
    def env(self) -> Env:
        """The machine as it was found: env.json."""
        return Env.load(self._files.env)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key with the value that was used: run.yaml."""
        return read_plain(self._files.config)

    @property
    def training(self) -> "DataFrame":
        """One row per step: training.csv, with the metrics of the job."""
        return _frame([(None, read_training(self._files.training))])

    @property
    def steps(self) -> "DataFrame":
        """One row per step and rank: where its time went, in seconds."""
        ranks = range(self.plan.world_size)
        return _frame([(rank, read_steps(self._files.steps(rank))) for rank in ranks])

    @property
    def telemetry(self) -> "DataFrame":
        """Samples of the machines, GPUs and ranks while it ran."""
        ranks = range(self.plan.world_size)
        return _frame([(rank, read_telemetry(self._files.telemetry_of(rank))) for rank in ranks])

    def load_model(
        self,
        job: "type[Workload] | None" = None,
        *,
        step: str | int = "auto",
        ema: bool = True,
        device: str = "cpu",
    ) -> "nn.Module":
        """Return the model that the run has trained, in eval mode: of its best checkpoint, else of
        its newest, or of a `step`; the average of the weights where one is kept, unless `ema` says
        no. A run that was started with a class needs it again, as `job`."""
        from paceline.cli.talk import ConsoleTalk
        from paceline.run.trained import Which, choose_device, load_trained, open_job
        from paceline.workloads.given import give

        if job is not None:
            give(job)
        run, which, say = self._files, Which(str(step), ema), ConsoleTalk().say
        return load_trained(run, open_job(run), which, choose_device(device), say).model

    @property
    def _files(self) -> RunDir:
        return RunDir(self.path)


def frame_of_csv(path: Path) -> "DataFrame":
    """Return a table that others may read too, as it is written."""
    frame: DataFrame = _pandas().read_csv(path)
    return frame


def _frame(tables: list[tuple[int | None, Table[Any]]]) -> "DataFrame":
    """Put tables below each other, with the rank that wrote each in front; None: it has none."""
    pandas = _pandas()
    frames = []
    for rank, table in tables:
        columns = dict(table.values)
        for name, is_empty in table.is_empty.items():
            columns[name] = columns[name].astype(float)
            columns[name][is_empty] = float("nan")
        frame = pandas.DataFrame(columns)
        if rank is not None:
            frame.insert(0, "rank", rank)
        frames.append(frame)
    whole: DataFrame = pandas.concat(frames, ignore_index=True)
    return whole


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "tables of a run are pandas frames, and pandas is not installed\n"
            "hint: pip install 'paceline[frames]'; or read training.csv with anything else"
        ) from error
    return pandas
