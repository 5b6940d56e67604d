"""findings.json: what a run is found to suffer from, now or at its end: slow ranks, what ranks
wait for, broken rules.

`paceline.health.judge` makes findings of what a run has recorded; the watcher, the report and
`paceline diagnose` show the same ones. (`records.Finding` is about a plan, before anything ran.)
"""

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from paceline.records.base import Part, Record
from paceline.records.events import SEVERITIES, Evidence, Severity


class RunFinding(Part):
    """One thing that is wrong with a run, or worth knowing about it."""

    kind: str = Field(description="Its name, which is that of the rule or verdict that found it.")
    rank: int | None = Field(None, description="The rank it is about; None: the whole run.")
    step: int | None = Field(None, description="The step at which it began or was seen.")
    severity: Severity = "warning"
    words: str = Field(description="One sentence with its numbers.")
    evidence: Evidence = Field({}, description="The numbers themselves, by name, with units.")
    to_try: str = Field(
        "", description="What one would change first; a command where there is one."
    )

    @property
    def key(self) -> tuple[str, int | None]:
        """Return what makes two findings the same one, seen twice."""
        return self.kind, self.rank

    def __str__(self) -> str:
        hint = f"\nhint: {self.to_try}" if self.to_try else ""
        return f"{self.severity}: {self.words}{hint}"


class Findings(Record):
    """All current findings, the most serious first."""

    findings: list[RunFinding] = []

    @classmethod
    def of(cls, found: Iterable[RunFinding]) -> "Findings":
        return cls(findings=sort_findings(found))


def sort_findings(found: Iterable[RunFinding]) -> list[RunFinding]:
    """Return findings with the most serious first, and otherwise in the order in which they were
    found."""
    return sorted(found, key=_gravity)


def _gravity(finding: RunFinding) -> int:
    return -SEVERITIES.index(finding.severity)


def finite(evidence: dict[str, Any]) -> Evidence:
    """Return evidence that JSON can hold: floats rounded to six digits, without nan or inf."""
    return {name: _plain(value) for name, value in evidence.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    number = float(value)
    return float(f"{number:.6g}") if abs(number) < float("inf") else str(number)
