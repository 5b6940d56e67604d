"""profiles/*.json.gz into profiles/*.facts.json, once for each trace. The report reads those."""

import re

from paceline.errors import DataError
from paceline.records.profiled import ProfileFacts
from paceline.records.rundir import RunDir
from paceline.traces.account import account
from paceline.traces.events import load_trace

TRACE = re.compile(r"rank(\d+)_steps(\d+)-(\d+)\.json\.gz")
MAX_RANKS = 4  # whose traces are read without being asked: one of 64 ranks may take seconds


def trace_name(rank: int, steps: range) -> str:
    return f"rank{rank}_steps{steps[0]}-{steps[-1]}.json.gz"


def write_profile_facts(run: RunDir) -> None:
    """Read the traces that nobody has read yet: of the first ranks, all that there are of them."""
    for path in sorted(run.profiles.glob("rank*_steps*.json.gz")):
        found = TRACE.fullmatch(path.name)
        facts = path.with_name(path.name.removesuffix(".json.gz") + ".facts.json")
        if found is None or int(found[1]) >= MAX_RANKS or facts.is_file():
            continue
        try:
            trace = load_trace(path)
        except DataError:
            continue  # cut off by a kill: a report is made of what is whole
        rank, first, last = (int(number) for number in found.groups())
        name = str(path.relative_to(run.root))
        run.lost.keep(facts, account(trace, rank, first, last, name).to_json())


def read_profile_facts(run: RunDir) -> list[ProfileFacts]:
    """Return what is known of all profiles of a run, by step and rank."""
    found = [ProfileFacts.load(path) for path in run.profiles.glob("*.facts.json")]
    return sorted(found, key=lambda facts: (facts.first_step, facts.rank))
