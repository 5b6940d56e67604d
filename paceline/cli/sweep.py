"""`paceline sweep`: a matrix of runs, compared with honest statistics."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.arguments import FinalistsOption, JsonFlag, Overrides, TailLinesOption
from paceline.errors import ConfigError, Outcome
from paceline.machine.process import ignore_stop_signals

if TYPE_CHECKING:
    from paceline.sweep.flow import SweepEnd
    from paceline.sweep.folder import SweepDir
    from paceline.sweep.spec import SweepSpec

MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="samples_per_s, tokens_per_s (language models' default), tail_mean_iter_p50_ms; or a"
        " metric of the job: val/accuracy:max.",
    ),
]


def sweep(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="As for train; or a YAML file with `axes`."),
    ] = None,
    overrides: Overrides = None,
    axis: list[str] = typer.Option(
        [], "--axis", metavar="KEY=A,B", help="A key and its values; give one for each axis."
    ),
    repeats: int | None = typer.Option(None, "--repeats", help="Runs per cell; default 3."),
    steps: int | None = typer.Option(None, "--steps", help="Steps per run; default 60."),
    out: Path | None = typer.Option(
        None, "--out", help="The sweep's directory; a sweep that it already holds is resumed."
    ),
    baseline: str | None = typer.Option(
        None, "--baseline", metavar="CELL", help="The cell that others are compared with."
    ),
    target: str | None = typer.Option(
        None, "--target", help='"speedup>=1.08" or "tokens_per_s>=39": exit 1 if not met.'
    ),
    metric: MetricOption = None,
    margin: float | None = typer.Option(
        None, "--margin", help="Differences below this share do not matter; default 0.02."
    ),
    phases: bool = typer.Option(
        False, "--phases", help="Pilot over all cells, final of the best, extras on the winner."
    ),
    finalists: FinalistsOption = None,
    tail_lines: TailLinesOption = None,
    stop_on_error: bool = typer.Option(
        False, "--stop-on-error", help="End at the first run that fails."
    ),
    from_env: bool = typer.Option(
        False, "--from-env", help="Read the settings from variables: docs/sweeping.md lists them."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the cells and the cost; stop."),
    as_json: JsonFlag = False,
) -> None:
    """Run every combination of some settings, interleaved and repeated, and say which is fastest.

    Example: paceline sweep lm_tiny --axis train.micro_batch_size=4,8 --axis data.num_workers=0,2

    More settings: sweep.margin=0.05 sweep.seed=1 sweep.loss_tolerance=0.02 (docs/sweeping.md)
    """
    from paceline.cli.talk import refusals_on_stdout
    from paceline.cli.together import require_alone
    from paceline.sweep.from_env import read_env
    from paceline.sweep.spec import read_spec

    given: dict[str, Any] = {
        "repeats": repeats,
        "steps": steps,
        "baseline": baseline,
        "target": target,
        "metric": metric,
        "margin": margin,
        "phases": phases or None,
        "finalists": finalists,
        "tail_lines": tail_lines,
        "stop_on_error": stop_on_error or None,
    }
    with refusals_on_stdout(as_json):
        require_alone("sweep")
        asked = {name: value for name, value in given.items() if value is not None}
        words, notes = overrides or [], list[str]()
        if from_env:
            env = read_env(os.environ)
            words = [*env.words, *([source] if source else []), *words]
            source, axis, out = env.recipe, [*env.axes, *axis], out or env.out
            asked, notes = {**env.given, **asked}, env.notes
        if source is None:
            raise ConfigError("there is no RECIPE\nhint: paceline sweep RECIPE --axis KEY=A,B")
        spec = read_spec(source, words, axis, asked)
    _to_the_end(spec, out, dry_run, as_json, notes)


def _to_the_end(
    spec: SweepSpec, out: Path | None, dry_run: bool, as_json: bool, notes: Sequence[str]
) -> None:
    """Plan, run what is missing, say what came of it, and leave with its exit code."""
    from paceline.cli.talk import print_json, refusals_on_stdout

    with refusals_on_stdout(as_json), redirect_stdout(sys.stderr):  # what the user's job prints
        from paceline.machine.fork_server import start_early
        from paceline.sweep.folder import SweepDir

        if not dry_run:
            SweepDir.require_place(out)
            start_early()
        # These import torch.
        from paceline.cli.sweep_talk import SweepConsole
        from paceline.sweep.flow import open_folder, plan_sweep, run_planned

        talk = SweepConsole()
        for note in notes:
            talk.say(note)
        talk.say("planning every cell")
        record = plan_sweep(spec)
        talk.plan(spec, record)
        if not dry_run:
            folder = open_folder(record, spec.recipe, out)
            talk.keep_log(folder.driver_log)
            with talk.live():
                end = run_planned(spec, record, folder, talk)
    if dry_run:
        if as_json:
            print_json(record.to_json())
        raise typer.Exit
    ignore_stop_signals()
    talk.conclude(end, folder)
    if as_json:
        print_json(json.dumps(_body(end, folder), indent=2))
    raise typer.Exit(exit_code(end))


def exit_code(end: SweepEnd) -> int:
    """Return the exit code: a stop comes first; then 1 where a run failed, nothing was measured,
    or the target is not met."""
    if end.stopped_by:
        return Outcome(end.stopped_by).exit_code
    target = end.judgement.target
    is_short = end.judgement.winner is None or (target is not None and not target.is_met)
    outcome = Outcome.CHECK_FAILED if is_short or end.num_failed else Outcome.OK
    return outcome.exit_code


def _body(end: SweepEnd, folder: SweepDir) -> dict[str, Any]:
    best = json.loads(folder.best.read_text(encoding="utf-8")) if folder.best.is_file() else None
    target = end.judgement.target
    return {
        "sweep_dir": str(folder.root),
        "exit_code": exit_code(end),
        "stopped_by": end.stopped_by or None,
        "num_failed": end.num_failed,
        "winner": end.judgement.winner,
        "flagged": end.judgement.flagged,
        "best": best,
        "target": None if target is None else {"text": target.text, "state": target.state,
                                               "because": target.because},
    }  # fmt: skip
