"""`paceline bench run --profile minimal|full`: runs each arm once more with the profiler. That
run counts for nothing else, because profiling slows it down."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from paceline.bench.records import ArmProfile
from paceline.errors import PacelineError
from paceline.records.profiled import ProfileFacts
from paceline.records.swept import SweepRecord
from paceline.report.profile import profile_sentences
from paceline.sweep.folder import SUCCESS, Row, SweepDir
from paceline.traces.flow import read_profile_facts, write_profile_facts

ProfileKind = Literal["none", "minimal", "full"]
FOLDER = "profiled"
STEPS, PROFILED = 10, "steps:6-8"
OVERRIDES: dict[ProfileKind, list[str]] = {
    "none": [],
    "minimal": [f"observe.profile={PROFILED}"],
    "full": [
        f"observe.profile={PROFILED}", "observe.profile_detail=full", "observe.memory=snapshot",
    ],
}  # fmt: skip
RunRows = Callable[[SweepRecord, Path], list[Row]]


def profiled_record(record: SweepRecord, kind: ProfileKind) -> SweepRecord:
    """Return a bench's sweep once more, with one short run of each arm that is profiled."""
    more = OVERRIDES[kind]
    cells = [
        cell.model_copy(
            update={
                "overrides": [*cell.overrides, *more],
                "settings": cell.settings | dict(word.split("=", 1) for word in more),
            }
        )
        for cell in record.cells
    ]
    phase = record.phases[0].model_copy(update={"repeats": 1, "steps": STEPS})
    return record.model_copy(update={"cells": cells, "phases": [phase]})


def take_profiles(
    record: SweepRecord, root: Path, kind: ProfileKind, run_rows: RunRows
) -> list[ArmProfile]:
    """Run each arm once more and return what its trace tells; an arm that failed says why."""
    folder = SweepDir(root / FOLDER)
    try:
        rows = run_rows(profiled_record(record, kind), folder.root)
    except PacelineError as error:
        return [ArmProfile(arm=cell.name, because=str(error)) for cell in record.cells]
    return [_profile_of(row, folder, root.parent) for row in rows]


def _profile_of(row: Row, folder: SweepDir, bench: Path) -> ArmProfile:
    run = folder.run(row)
    if row["status"] != SUCCESS:
        return ArmProfile(arm=row["group"], because=f"its run ended as {row['outcome']}")
    write_profile_facts(run)
    facts = read_profile_facts(run)
    if not facts:
        return ArmProfile(arm=row["group"], because="its run left no trace")
    trace = (run.root / facts[0].trace).relative_to(bench)
    return _told(row["group"], facts[0], str(trace))


def _told(arm: str, facts: ProfileFacts, trace: str) -> ArmProfile:
    window = facts.window_s or 1.0
    return ArmProfile(
        arm=arm,
        trace=trace,
        categories=facts.categories,
        top=facts.top[:5],
        exposed_share=facts.exposed_s / window,
        idle_share=facts.idle_s / window if facts.on_device else None,
        launch_gap_share=facts.launch_gaps_s / window if facts.on_device else None,
        sentences=profile_sentences(facts)[:-1],
    )
