"""Placeholder until the pages are merged."""

from paceline.records.swept import SweepRecord
from paceline.sweep.folder import SweepDir
from paceline.sweep.judge import SweepJudgement
from paceline.sweep.manifest import Row


def write_outputs(
    folder: SweepDir, record: SweepRecord, rows: list[Row], judgement: SweepJudgement
) -> None:
    pass
