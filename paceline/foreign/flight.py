"""Reads dumps of NCCL's flight recorder, one per rank: which rank never came to the collective
that the others wait in. (`health/desync.py` finds mismatched collectives in the same dumps.)"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.foreign.failures import known_rank
from paceline.health.desync import key_of
from paceline.records.base import Body
from paceline.records.findings import RunFinding, finite
from paceline.records.words import count, few

RANK = re.compile(r"(?:rank[_-]?|trace[_-]?)(\d+)(?:\.json|\.pkl|\.pickle)?$")
DONE = "completed"


def read_dump(path: Path, body: Any) -> tuple[int | None, Body]:
    """Return a dump and the rank that its name, or itself, says it is of."""
    if not isinstance(body, dict) or not isinstance(body.get("entries"), list | tuple):
        raise DataError(f"{path.name} holds no entries of a flight recorder")
    named, own = RANK.search(path.name), body.get("rank")
    return known_rank(named[1] if named else own), body


def find_waiting(dumps: Mapping[int, Body]) -> Iterator[RunFinding]:
    """Yield, for each group, the ranks that never called the collective in which others wait."""
    groups: dict[str, dict[int, dict[int, Body]]] = {}
    for rank, body in dumps.items():
        for entry in _entries(body):
            group, number = key_of(entry)
            groups.setdefault(group, {}).setdefault(rank, {})[number] = entry
    for group, ranks in groups.items():
        yield from _behind(group, ranks)


def _behind(group: str, ranks: Mapping[int, Mapping[int, Body]]) -> Iterator[RunFinding]:
    last = {rank: max(calls) for rank, calls in ranks.items()}
    furthest = max(last.values())
    behind = sorted(rank for rank, number in last.items() if number < furthest)
    open_at = {
        rank: min(n for n, entry in calls.items() if entry.get("state") != DONE)
        for rank, calls in ranks.items()
        if any(entry.get("state") != DONE for entry in calls.values())
    }
    if not behind:
        # gloo's recorder never hears of an end: where nothing has ended, nothing is known of it.
        has_ended = any(e.get("state") == DONE for calls in ranks.values() for e in calls.values())
        if open_at and has_ended:
            yield _all_inside(group, ranks, open_at)
        return
    reached = min(last[rank] for rank in behind)
    number = min(n for calls in ranks.values() for n in calls if n > reached)
    waiting = sorted(rank for rank, at in open_at.items() if at >= number - 1)
    entry = next(calls[number] for calls in ranks.values() if number in calls)
    rank = min(behind, key=lambda each: last[each])
    what = f"{_what(entry)} (collective {number} of group {group})"
    yield RunFinding(
        kind="hang",
        rank=rank,
        severity="error",
        words=f"rank {rank} never came to {what}: {_who(waiting)} there; its own last one was"
        f" {_what(ranks[rank][last[rank]])}",
        evidence=finite({"group": group, "number": number, "last": last}),
        to_try=f"look at what rank {rank} did then: its stack, its log, its data",
    )


def _all_inside(
    group: str, ranks: Mapping[int, Mapping[int, Body]], open_at: Mapping[int, int]
) -> RunFinding:
    number = min(open_at.values())
    entry = next(calls[number] for calls in ranks.values() if number in calls)
    return RunFinding(
        kind="hang",
        severity="error",
        words=f"all {count(len(ranks), 'rank')} came to {_what(entry)} (collective {number} of"
        f" group {group}), and it did not end: a link, or a GPU that another one waits for",
        evidence=finite({"group": group, "number": number, "open": dict(open_at)}),
        to_try="paceline check measures every link; NCCL_DEBUG=INFO says which one is used",
    )


def _entries(body: Body) -> list[dict[str, Any]]:
    entries = body.get("entries")
    found = entries if isinstance(entries, list | tuple) else ()
    return [e for e in found if isinstance(e, dict) and not e.get("is_p2p")]


def _what(entry: Body) -> str:
    sizes = entry.get("input_sizes") or entry.get("output_sizes") or ""
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}"


def _who(ranks: list[int]) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {few(map(str, ranks))} {verb}" if ranks else "others wait"
