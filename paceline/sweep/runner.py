"""Runs the cells of a sweep, interleaved, each as a supervised run with its own directory.

Repeat 1 of every cell, then repeat 2, each round in an order of its own: whatever drifts on
the machine meanwhile affects all cells alike. A run that is in the manifest with equal fingerprints
is not made again.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.config.schema import RunConfig
from paceline.errors import Outcome
from paceline.launch.signals import SignalLog
from paceline.machine.facts import hardware_fingerprint, probe
from paceline.records import Plan, Result
from paceline.records.moments import wall_time
from paceline.records.rundir import RunDir
from paceline.records.swept import SweepRecord, SweptCell, SweptPhase
from paceline.records.tables import read_steps
from paceline.run.flow import Decided, Talk, run_decided
from paceline.stats.figures import is_speed, measure_run
from paceline.stats.timing_points import list_points
from paceline.strategies import find_strategy
from paceline.sweep.board import Board
from paceline.sweep.folder import (
    COLUMNS,
    FAILED,
    FINGERPRINTS,
    NOT_THERE,
    STOPPED,
    SUCCESS,
    Row,
    SweepDir,
    load_manifest,
    save_manifest,
)
from paceline.sweep.matrix import Ground, decide_cell, needs_evaluation
from paceline.train.feed import build_split
from paceline.workloads.job_file import code_fingerprint


class SweepTalk(Talk, Protocol):
    """What a person sees of a sweep (cli/sweep_talk.py)."""

    def board(self, board: Board) -> None:
        """Show the state of the sweep, which has changed."""
        ...

    def failed(self, cell: str, repeat: int, result: Result) -> None:
        """Show a run that has failed."""
        ...


class Once(Talk):
    """Say only once what every run would say again of the machine and the plan."""

    def __init__(self, talk: Talk) -> None:
        self._talk, self._said = talk, set[str]()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._talk.say(text)

    def training(self, run: RunDir, plan: Plan) -> Callable[[dict[str, str]], None]:
        return self._talk.training(run, plan)

    def trained(self) -> None:
        self._talk.trained()


@dataclass(frozen=True)
class Turn:
    """One run that is to be made."""

    phase: str
    cell: SweptCell
    repeat: int


class SweepRunner:
    """Run the cells of `record` in `folder`. `signals` logs the signals since the sweep began."""

    def __init__(
        self, record: SweepRecord, folder: SweepDir, talk: SweepTalk, signals: SignalLog,
        stop_on_error: bool = False,
    ) -> None:  # fmt: skip
        self.record, self.folder, self.talk, self.signals = record, folder, talk, signals
        self.stop_on_error = stop_on_error
        self.quiet = Once(talk)
        evaluates = needs_evaluation(record.metric, record.target)
        self.ground = Ground(record.recipe, tuple(record.overrides), probe(), evaluates)
        self.rows = load_manifest(folder.manifest)
        self.board = Board(metric=record.metric, margin=record.margin)
        self.stopped_by: str = ""  # the outcome that ended the sweep early
        self._decided: dict[tuple[str, int], Decided] = {}
        self._prints: dict[tuple[str, int, int], dict[str, str]] = {}

    def run_phase(self, phase: SweptPhase) -> None:
        """Make every run of `phase` that is not there yet, until one asks to stop."""
        turns = list(turns_of(self.record, phase))
        for turn in turns:  # refuse whatever can be refused before anything runs
            if self.is_stopped():
                return
            self._decide(turn, phase.steps)
        missing = [turn for turn in turns if not self._is_done(turn, phase.steps)]
        if len(missing) < len(turns):
            self.talk.say(f"{len(turns) - len(missing)} of {len(turns)} runs are there already")
        self.board.begin(phase, [turn.cell.name for turn in missing])
        for turn in turns:
            if turn not in missing:
                row = self._row_of(turn)
                assert row is not None, "what is not missing has a row"
                self.board.end(row, self._value(row))
        for turn in missing:
            if self.is_stopped():
                return
            self._take(turn, phase.steps)

    def is_stopped(self) -> bool:
        """Tell whether the sweep ends here: a signal may have come during a run, between two, or
        while a table was written."""
        if self.signals.first is not None and not self.stopped_by:
            self.stopped_by = Outcome.of_signal(self.signals.first)
        return bool(self.stopped_by)

    def _take(self, turn: Turn, steps: int) -> None:
        self.board.start(turn.cell.name, turn.repeat)
        self.talk.board(self.board)
        decided = self._fresh(self._decide(turn, steps))
        place = self.folder.unused_run(turn.cell.name, turn.repeat)
        result = run_decided(decided, place, self.quiet)
        row = self._keep(turn, decided, result)
        self.board.end(row, self._value(row))
        self.talk.board(self.board)
        if row["outcome"] in STOPPED:
            self.stopped_by = row["outcome"]
        elif row["status"] != SUCCESS:
            self.talk.failed(turn.cell.name, turn.repeat, result)
            if self.stop_on_error:
                self.stopped_by = row["outcome"]

    def _fresh(self, decided: Decided) -> Decided:
        """Return `decided` with the code as it is now: the user may have edited it since the
        sweep began."""
        code = code_fingerprint(decided.job.config.workload)
        if code != decided.code:
            self.quiet.say("warning: the code has changed since this sweep began")
        return replace(decided, code=code, started_at=wall_time())

    def _keep(self, turn: Turn, decided: Decided, result: Result) -> Row:
        """Write a run into the manifest. It replaces the row of an earlier try, whose directory
        stays."""
        place = (self.record.mode, turn.phase, turn.repeat)
        row = describe_run(turn.cell, place, decided, result, self.folder.root)
        others = [old for old in self.rows if key_of(old) != key_of(row)]
        self.rows = [*others, row]
        save_manifest(self.folder.manifest, self.rows)
        return row

    def _decide(self, turn: Turn, steps: int) -> Decided:
        """Plan and prepare a cell once: its repeats are the same, but for the seed where cells are
        compared by what they learn. With one seed they would agree to the last digit, and say
        nothing of chance."""
        cell = turn.cell
        if (cell.name, steps) not in self._decided:
            self._decided[cell.name, steps] = decide_cell(self.ground, cell, steps, self.quiet)
        decided = self._decided[cell.name, steps]
        if is_speed(self.record.metric):
            return decided
        config = decided.job.config
        train = config.train.model_copy(update={"seed": config.train.seed + turn.repeat - 1})
        job = replace(decided.job, config=config.model_copy(update={"train": train}))
        return replace(decided, job=job)

    def _is_done(self, turn: Turn, steps: int) -> bool:
        """Tell whether a run is there, successful, and the same thing on the same machine."""
        row = self._row_of(turn)
        if row is None or row["status"] != SUCCESS:
            return False
        if not self.folder.run(row).result.is_file():
            self.talk.say(
                f"{turn.cell.name}, repeat {turn.repeat}: its run directory is gone: it runs again"
            )
            return False
        now = self._fingerprints(turn, steps)
        changed = [name.partition("_")[0] for name in FINGERPRINTS if row[name] != now[name]]
        if changed:
            what = ", ".join(changed)
            self.talk.say(
                f"{turn.cell.name}, repeat {turn.repeat}: it runs again, for its {what} changed"
            )
        return not changed

    def _row_of(self, turn: Turn) -> Row | None:
        key = (turn.cell.name, str(turn.repeat))
        return next((row for row in self.rows if key_of(row) == key), None)

    @property
    def num_failed(self) -> int:
        """Count failed runs of this sweep's cells; a run that somebody stopped has not failed."""
        asked = {name for phase in self.record.phases for name in phase.cells}
        failed = [row for row in self.rows if row["status"] != SUCCESS and row["group"] in asked]
        return sum(row["outcome"] not in STOPPED for row in failed)

    def _value(self, row: Row) -> float | None:
        """Return the metric of one run, for the board."""
        if row["status"] != SUCCESS:
            return None
        figures = measure_run(self.folder.run(row), self.record.tail_points)
        return figures.value(self.record.metric) if figures else None

    def _fingerprints(self, turn: Turn, steps: int) -> dict[str, str]:
        """Return what a run of this cell would have in its row, were it made now."""
        key = (turn.cell.name, steps, 0 if is_speed(self.record.metric) else turn.repeat)
        if key not in self._prints:
            decided = self._decide(turn, steps)
            values = (
                decided.job.fingerprint,
                decided.code,
                self._data_fingerprint(decided),
                hardware_fingerprint(decided.env),
            )
            self._prints[key] = dict(zip(FINGERPRINTS, values, strict=True))
        return self._prints[key]

    def _data_fingerprint(self, decided: Decided) -> str:
        job = decided.job
        job.workload.prepared = decided.prepared
        data = build_split(job, "train")
        if not hasattr(data, "fingerprint"):
            self.quiet.say(
                "warning: the data has no `fingerprint`, so a change of it cannot be seen\n"
                "hint: give the data set an attribute of that name that depends on its content"
            )
        return str(getattr(data, "fingerprint", "n/a"))


def key_of(row: Row) -> tuple[str, str]:
    return row["group"], row["repeat"]


def turns_of(record: SweepRecord, phase: SweptPhase) -> Iterator[Turn]:
    """Yield the runs of a phase round by round; the order of a round depends only on the seed,
    the phase and the number of the round."""
    for repeat in range(1, phase.repeats + 1):
        cells = [record.cell(name) for name in phase.cells]
        random.Random(f"{record.seed}/{phase.name}/{repeat}").shuffle(cells)
        yield from (Turn(phase.name, cell, repeat) for cell in cells)


def describe_run(
    cell: SweptCell, place: tuple[str, str, int], decided: Decided, result: Result, root: Path
) -> Row:
    """Return a run that has ended as a row of the manifest. `place` is mode, phase and repeat;
    paths are relative to `root`, the directory of the sweep."""
    mode, phase, repeat = place
    run = RunDir(Path(result.run_dir))
    inside = run.root.relative_to(root.resolve())
    points = list_points(read_steps(run.steps(0)), decided.job.config.train.log_every)
    known = {
        "mode": mode,
        "group": cell.name,
        "repeat": repeat,
        "status": SUCCESS if result.outcome is Outcome.OK else FAILED,
        "exit_code": result.exit_code,
        "duration_sec": f"{result.elapsed_s:.3f}",
        "last_step": result.steps,
        "last_iter_ms_p50": f"{points[-1].iter_ms_p50:.3f}" if points else NOT_THERE,
        "run_dir": inside,
        "launcher_log": inside / run.launcher_log.name,
        "train_log": inside / run.train_log.name,
        "phase": phase or NOT_THERE,
        "outcome": result.outcome,
        "steps_asked": decided.plan.steps,
        "started_at": f"{result.started_at:.3f}",
        "peak_bytes": result.peak_bytes or NOT_THERE,
        "config_fingerprint": result.fingerprints.config,
        "code_fingerprint": result.fingerprints.code,
        "data_fingerprint": result.fingerprints.data,
        "hardware_fingerprint": result.fingerprints.hardware,
        "overrides": json.dumps(cell.overrides),
        **_settings(decided.job.config, decided),
    }
    return {name: str(known.get(name, NOT_THERE)) for name in COLUMNS}


def _settings(config: RunConfig, decided: Decided) -> dict[str, object]:
    """Return what was asked and what was used, by column of the manifest."""
    plan, gpus = decided.plan, decided.env.gpus
    on_gpu = plan.on_gpu and bool(gpus)
    stage = find_strategy(plan.strategy.value).zero_stage(config)
    return {
        "zero_stage": NOT_THERE if stage is None else stage,
        "micro_batch": plan.batch.micro,
        "world_size": plan.world_size,
        "global_batch": plan.batch.global_size,
        "deterministic": str(plan.deterministic).lower(),
        "log_every_steps": config.train.log_every,
        "validation_every_steps": config.train.eval_every,
        "checkpoint_every_steps": config.checkpoint.every,
        "num_workers": plan.loader_workers.value,
        "prefetch_factor": config.data.prefetch,
        "dataset_manifest_path": decided.prepared.get("manifest") or _source(config),
        "timing_rank_scope": config.observe.timing_ranks,
        "precision_mode_req": config.precision.mode,
        "precision_mode_effective": plan.precision.value,
        "attn_impl_req": config.attention.impl,
        "attn_impl_effective": plan.attention.value,
        "torch_compile_enabled": str(plan.compile.value != "off").lower(),
        "gpu_name": gpus[0].name if on_gpu else NOT_THERE,
        "gpu_cc": gpus[0].compute_capability if on_gpu else NOT_THERE,
    }


def _source(config: RunConfig) -> object:
    """Return where data without a manifest comes from, by the workload's own key."""
    return getattr(config.data, "source", NOT_THERE)
