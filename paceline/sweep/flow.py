"""One sweep from what was asked to its report: read this file first.

asked (SweepSpec) -> cells, planned -> sweep.json -> runs (run_manifest.tsv) -> judged -> reported
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError
from paceline.launch.signals import logged_signals
from paceline.machine.facts import probe
from paceline.records.rundir import RunDir
from paceline.records.runlock import RunLock
from paceline.records.swept import Metric, SweepRecord, SweptCell, SweptPhase
from paceline.sweep.folder import SweepDir
from paceline.sweep.judge import SweepJudgement, judge_sweep
from paceline.sweep.matrix import Ground, load_cells, needs_evaluation, refuse_impossible
from paceline.sweep.outputs import write_outputs
from paceline.sweep.phases import (
    EXTRAS,
    FINAL,
    PILOT,
    choose_extras,
    choose_finalists,
    first_phase,
    in_phase,
    with_extras,
)
from paceline.sweep.runner import SweepRunner, SweepTalk
from paceline.sweep.spec import SweepSpec, draw_cells, find_cell
from paceline.sweep.target import SPEEDUP, Target

QUESTION = ("mode", "recipe", "overrides", "axes")  # another value of one is another sweep


@dataclass(frozen=True)
class SweepEnd:
    """Hold what came of a sweep. `stopped_by` is the outcome that ended it early, or empty."""

    record: SweepRecord
    judgement: SweepJudgement
    stopped_by: str
    num_failed: int


def plan_sweep(spec: SweepSpec) -> SweepRecord:
    """Return every cell, with the reason where it cannot run. Nothing is written and nothing
    runs."""
    evaluates = needs_evaluation(spec.metric, spec.target)
    ground = Ground(spec.recipe, tuple(spec.overrides), probe(), evaluates)
    cells = draw_cells(spec)
    jobs = load_cells(ground, cells, spec.steps)
    cells = refuse_impossible(cells, jobs, ground.env)
    if all(cell.refusal for cell in cells):
        reasons = dict.fromkeys(f"{cell.name}: {cell.refusal}" for cell in cells)
        raise ConfigError(["none of the cells can run", *reasons])
    baseline = find_cell(cells, spec.baseline).name if spec.baseline else None
    by_tokens = all(job.workload.unit == "tokens" for job in jobs.values())
    metric: Metric = "tokens_per_s" if by_tokens else "samples_per_s"
    _require_countable(spec, by_tokens, cells[0].name)
    if spec.phases:  # a misspelt extra is refused now, not after all other runs
        load_cells(ground, with_extras(spec, cells[0]), spec.steps)
    cells = in_phase(PILOT, cells) if spec.phases else cells
    return SweepRecord(
        mode=_mode(spec),
        recipe=spec.recipe,
        overrides=spec.overrides,
        axes=_axes(spec, cells),
        cells=cells,
        phases=[first_phase(spec, cells)],
        metric=metric if spec.metric == "auto" else spec.metric,
        margin=spec.margin,
        baseline=baseline,
        target=spec.target or None,
        seed=spec.seed,
        loss_tolerance=spec.loss_tolerance,
        tail_points=spec.tail_points,
    )


def _mode(spec: SweepSpec) -> Literal["sweep", "ab", "both"]:
    """Return what manifests call it: a matrix, cells that have names, or both."""
    if not spec.cells:
        return "sweep"
    return "both" if spec.axes else "ab"


def _axes(spec: SweepSpec, cells: list[SweptCell]) -> dict[str, list[str]]:
    """Return the axes with their values as typed; cells that have names are an axis of their own
    where there is no other."""
    named = {} if spec.axes else {"cell": _seen(cells, "cell")}
    return {key: _seen(cells, key) for key in spec.axes} | named


def run_planned(
    spec: SweepSpec, record: SweepRecord, folder: SweepDir, talk: SweepTalk
) -> SweepEnd:
    """Run what is missing in `folder`, and leave its outputs there however it ends."""
    with RunLock(folder.root), logged_signals() as signals:
        record.save(folder.record)
        runner = SweepRunner(record, folder, talk, signals, spec.stop_on_error)
        try:
            for phase in _phases(spec, runner):
                runner.run_phase(phase)
                if runner.is_stopped():
                    break
        finally:
            judgement = report_sweep(runner)
    return SweepEnd(runner.record, judgement, runner.stopped_by, runner.num_failed)


def report_sweep(runner: SweepRunner) -> SweepJudgement:
    """Judge the runs that there are now, and write every table and page of the sweep."""
    judgement = judge_sweep(runner.record, runner.folder, runner.rows)
    try:
        write_outputs(runner.folder, runner.record, runner.rows, judgement)
    except OSError as error:
        raise ConfigError(
            f"cannot write the tables of the sweep: {error.filename}: {error.strerror}\n"
            "hint: free some space; the same command resumes, and no finished run is lost"
        ) from error
    return judgement


def _phases(spec: SweepSpec, runner: SweepRunner) -> Iterator[SweptPhase]:
    """Yield the phases in order; the cells of a later one follow from the runs of the one
    before."""
    yield runner.record.phases[0]
    if not spec.phases:
        return
    pilot = report_sweep(runner)
    if pilot.standings is None:
        return
    yield _next(spec, runner, FINAL, choose_finalists(runner.record, spec, pilot.standings))
    final = report_sweep(runner)
    if final.winner is not None and spec.extras:
        yield _next(spec, runner, EXTRAS, choose_extras(runner.record, spec, final.winner))


def _next(spec: SweepSpec, runner: SweepRunner, name: str, cells: list[SweptCell]) -> SweptPhase:
    """Append the next phase to the record, with its cells planned as those of the first one
    were."""
    named = in_phase(name, cells)
    jobs = load_cells(runner.ground, named, spec.steps)
    planned = refuse_impossible(named, jobs, runner.ground.env)
    for cell in planned:
        if cell.refusal:
            runner.talk.say(f"{cell.name} cannot run: {cell.refusal}")
    runnable = [cell.name for cell in planned if not cell.refusal]
    phase = SweptPhase(name=name, cells=runnable, repeats=spec.repeats, steps=spec.steps)
    runner.talk.say(f"phase {name}: {', '.join(runnable)}")
    runner.record = runner.record.model_copy(
        update={
            "cells": [*runner.record.cells, *planned],
            "phases": [*runner.record.phases, phase],
        }
    )
    runner.record.save(runner.folder.record)
    return phase


def open_folder(record: SweepRecord, name: str, out: Path | None) -> SweepDir:
    """Return a new directory, or that of this very sweep, so that it is resumed. One of which
    nothing has run, because a cell was refused, is as good as new."""
    if out is not None and SweepDir(out).record.is_file():
        begun = SweepRecord.load(SweepDir(out).record)
        if any(SweepDir(out).runs.glob("*")):
            _require_same(begun, record, out)
        return SweepDir(out.resolve())
    root = RunDir.create(f"{record.mode}-{name}", out, is_run=False).root
    folder = SweepDir(root)
    folder.runs.mkdir()
    return folder


def _require_same(old: SweepRecord, new: SweepRecord, out: Path) -> None:
    """Refuse a directory that holds a sweep with another question."""
    differing = [name for name in QUESTION if getattr(old, name) != getattr(new, name)]
    if differing:
        told = [f"{n}: {getattr(old, n)} there, {getattr(new, n)} now" for n in differing]
        lines = "\n".join(f"  {line}" for line in told)
        raise ConfigError(
            f"{out} holds another sweep:\n{lines}\nhint: give --out another directory"
        )


def _require_countable(spec: SweepSpec, by_tokens: bool, first: str) -> None:
    """Refuse a metric or a target that this workload or this sweep cannot have."""
    target = Target.parse(spec.target) if spec.target else None
    problems = []
    if target is not None and target.metric == SPEEDUP and not spec.baseline:
        problems.append(
            f"the target '{spec.target}' needs a baseline to be faster than\n"
            f"hint: --baseline CELL, such as --baseline {first}"
        )
    asked = {"metric": spec.metric, "target": target.metric if target else ""}
    problems += [
        f"this workload counts no tokens, and --{flag} asks for them\nhint: samples_per_s"
        for flag, metric in asked.items()
        if metric == "tokens_per_s" and not by_tokens
    ]
    if problems:
        raise ConfigError(problems)


def _seen(cells: list[SweptCell], key: str) -> list[str]:
    return list(dict.fromkeys(cell.settings[key] for cell in cells if key in cell.settings))
