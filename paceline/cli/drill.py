"""`paceline drill`: plant faults in a job of yours, and see whether they are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.arguments import SOURCE, JsonFlag, OutOption, Overrides
from paceline.machine.process import ignore_stop_signals

if TYPE_CHECKING:
    from paceline.cli.talk import ConsoleTalk
    from paceline.drill.flow import DrillEnd


def drill(
    source: Annotated[str, SOURCE],
    overrides: Overrides = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Which fault; all of them if not given.")
    ] = None,
    rank: int = typer.Option(1, "--rank", min=0, help="The rank that has it; slow_disk is on all."),
    step: int = typer.Option(12, "--step", min=1, help="The step at which it begins."),
    share: float = typer.Option(
        0.5, "--share", min=0.01, help="How much slower a slow rank becomes."
    ),
    out: OutOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Plant a fault in a job, train it, and show whether the fault is named. Exit 1: it was not.

    Example: paceline drill lm_tiny --fault slow_forward launch.nproc=2

    Faults: kill, hang, slow_data, slow_forward, slow_backward, slow_optimizer, spikes, slow_disk,
    nan, desync, out_of_memory, full_disk. Each is a run of its own.
    """
    from paceline.cli.talk import ConsoleTalk, refusals_on_stdout
    from paceline.cli.together import require_alone
    from paceline.cli.train import stoppable

    require_alone("drill")
    talk = ConsoleTalk()
    ends: list[DrillEnd] = []
    with refusals_on_stdout(as_json), stoppable():
        from paceline.drill.flow import (
            load_drilled,
            place_of,
            require_all,
            run_drill,
            which_faults,
        )
        from paceline.machine.fork_server import start_early
        from paceline.records.drills import Drill

        job = load_drilled(source, overrides or [])
        start_early(job.config.launch.launcher, job.workload.preloads)
        asked = [
            Drill(fault=chosen, rank=rank, step=step, share=share)
            for chosen in which_faults(fault or [])
        ]
        if len(asked) > 1:
            require_all(job, asked)
        for planted in asked:
            ends.append(run_drill(job, planted, place_of(out, planted, len(asked)), talk))
            _say(talk, ends[-1])
    ignore_stop_signals()
    named = sum(end.named is not None for end in ends)
    talk.say(f"{named} of {len(ends)} named")
    if as_json:
        _print(ends)
    raise typer.Exit(max(end.outcome.exit_code for end in ends))


def _say(talk: ConsoleTalk, end: DrillEnd) -> None:
    where = "all ranks" if end.drill.fault.is_everywhere else f"rank {end.drill.rank}"
    talk.say(f"planted {end.drill.fault} ({where}, step {end.drill.step}): {end.drill.fault.words}")
    for finding in end.found:
        talk.say(f"{'named' if finding is end.named else 'found'}: {finding.words}")
    if end.named is None:
        talk.say("it was NOT named")


def _print(ends: list[DrillEnd]) -> None:
    import json

    from paceline.cli.talk import print_json

    print_json(json.dumps([end.to_json() for end in ends], indent=2))
