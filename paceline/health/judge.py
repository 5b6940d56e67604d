"""Judges a run from its records: the single entry for every caller."""

from collections.abc import Iterable, Iterator

from paceline.health.bounds import find_bounds
from paceline.health.desync import find_desync
from paceline.health.endings import find_ending
from paceline.health.evidence import Evidence
from paceline.health.rules import find_unhealthy
from paceline.health.stragglers import find_spikes, find_stragglers
from paceline.health.work import measure_work
from paceline.records.findings import RunFinding, sort_findings


def judge(evidence: Evidence) -> list[RunFinding]:
    """Return all findings about a run, the most serious first. Pure: nothing is read or written."""
    found = {finding.key: finding for finding in _judge(evidence)}
    return sort_findings(_wanted(evidence, found.values()))


def _wanted(evidence: Evidence, found: Iterable[RunFinding]) -> list[RunFinding]:
    """Leave out findings whose rules are off."""
    actions = evidence.rules.actions()
    return [f for f in found if actions.get(f.kind) != "off"]


def judge_ranks(evidence: Evidence) -> list[RunFinding]:
    """Return which ranks are slow and which have skipped a collective: the checks that a live run
    makes often."""
    work = measure_work(evidence)
    slow = find_stragglers(evidence, work) if work is not None else ()
    return _wanted(evidence, [*find_desync(evidence), *slow])


def _judge(evidence: Evidence) -> Iterator[RunFinding]:
    yield from find_ending(evidence)
    yield from find_desync(evidence)
    work = measure_work(evidence)
    unhealthy = list(find_unhealthy(evidence, work))
    yield from unhealthy
    if work is not None:
        slow = list(find_stragglers(evidence, work))
        yield from slow
        yield from find_spikes(evidence, work)
        throttled = [finding for finding in unhealthy if finding.kind == "gpu_throttle"]
        yield from find_bounds(evidence, work, slow, throttled)
