"""Judges a run by its records: which rank is slow, why it waits, is it healthy, how it ended.

    read_evidence(run)  -> Evidence      from the files of a run, live or over; importers of other
                                         trainers' logs make one of what those hold
    judge(evidence)     -> [Finding]     pure: the same evidence gives the same findings
    act_on(run, ...)                     the action of a broken rule: stacks, a checkpoint, a halt

The watcher of a live run, `paceline diagnose` and the report call `judge`, so all say the same.
"""

from paceline.health.actions import act_on
from paceline.health.evidence import Evidence, read_evidence
from paceline.health.judge import judge

__all__ = ["Evidence", "act_on", "judge", "read_evidence"]
