"""Do ranks run the same collectives: by their counts while they run, by torch's flight recorder
once one has failed. (The recorder: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.health.evidence import Evidence
from paceline.health.work import align_steps
from paceline.records.base import Body
from paceline.records.findings import RunFinding, finite
from paceline.records.words import count

SIZES_DIFFER = re.compile(
    r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)"  # how gloo says it
)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
Call = tuple[str, str]  # what, and on which shapes
DESYNC_HINT = (
    "a collective that only some ranks call: look for an `if rank == 0` around one; the numbers"
    " since then are wrong"
)


def find_desync(evidence: Evidence) -> Iterator[RunFinding]:
    """Yield the ranks that ran fewer or more collectives than the others, and the first collective
    in which ranks passed different shapes."""
    yield from _by_counts(evidence)
    told = list(compare_calls(evidence.collectives))
    yield from told or _by_logs(evidence)


def _by_counts(evidence: Evidence) -> Iterator[RunFinding]:
    """Compare the counts of all ranks at the end of the same step: equal, or some rank has left one
    out. What a rank usually begins in a step is taken off: ranks of a pipeline differ in that."""
    known = {r: table.known("collectives") for r, table in evidence.steps.items() if len(table)}
    tables = align_steps(list(known.values())) if len(known) > 1 else []
    if not tables:
        return
    counts = np.array([table.column("collectives") for table in tables])
    first = _last_start(counts)
    steps, counts = tables[0].column("step")[first:], counts[:, first:]
    if len(steps) < 3:
        return
    usual = np.floor(np.median(np.diff(counts) / np.diff(steps), axis=1, keepdims=True))
    beyond = counts - counts[:, :1] - usual * (steps - steps[0])
    apart = np.flatnonzero(np.ptp(beyond, axis=0))
    if not len(apart):
        return
    made = dict(zip(known, beyond[:, apart[0]].astype(int).tolist(), strict=True))
    # Of two ranks neither is in the majority: the one that ran fewer has left one out.
    most, _ = Counter(made.values()).most_common(1)[0]
    odd = [rank for rank, number in made.items() if number != most]
    rank = min(made, key=lambda r: made[r]) if len(made) == 2 else odd[0]
    other = next(r for r in made if made[r] != made[rank])
    by, step = made[rank] - made[other], int(steps[apart[0]])
    yield RunFinding(
        kind="desync",
        rank=rank,
        step=step,
        severity="error",
        words=f"rank {rank} has run {count(abs(by), 'collective')} {'fewer' if by < 0 else 'more'}"
        f" than rank {other} by the end of step {step}: from there on they sum what does not belong"
        " together",
        evidence=finite({"step": step, "collectives_beyond_usual": made}),
        to_try=DESYNC_HINT,
    )


def _last_start(counts: NDArray[np.int64]) -> int:
    """Return where the last attempt begins, by counts of ranks x steps: each attempt counts from 0.
    That is after all steps if only some ranks have begun it: the rows are then of two attempts."""
    falls = np.diff(counts) < 0
    starts = np.flatnonzero(falls.any(axis=0)) + 1
    if not len(starts):
        return 0
    return int(starts[-1]) if falls[:, starts[-1] - 1].all() else counts.shape[1]


def _by_logs(evidence: Evidence) -> Iterator[RunFinding]:
    """Find gloo's message as it ends the process: it knows that sizes differ, not whose."""
    for rank, text in evidence.logs.items():
        if found := SIZES_DIFFER.search(text):
            at = _own_line(text)
            yield RunFinding(
                kind="shapes_differ",
                severity="error",
                words=f"ranks gave other shapes to one collective: rank {rank} was sent"
                f" {found[1]} bytes of it where it expected {found[2]}"
                + (f", in {at}" if at else ""),
                evidence=finite({"rank": rank, "sent": int(found[1]), "expected": int(found[2])}),
                to_try="print the shapes on each rank before that line; pad to one shape, or leave"
                " no rank out of a collective",
            )
            return


def _own_line(text: str) -> str:
    """Return `job.py:14 in loss`: the line of the job that was in the collective."""
    current = text.rpartition("Current thread")[2] or text
    for file, line, name in FRAME.findall(current):
        if not any(part in file for part in ("site-packages", "/paceline/", "/lib/python")):
            return f"{PurePath(file).name}:{line} in {name}"
    return ""


def compare_calls(dumps: Mapping[int, Body]) -> Iterator[RunFinding]:
    """Yield where the flight recorders of ranks first disagree: another collective, or other
    shapes, under the same number of one group."""
    calls = {rank: _calls(body) for rank, body in dumps.items()}
    calls = {rank: found for rank, found in calls.items() if found}
    if len(calls) < 2:
        return
    for key in sorted(set.intersection(*(set(found) for found in calls.values()))):
        made = {rank: found[key] for rank, found in calls.items()}
        if len(set(made.values())) == 1:
            continue
        usual, _ = Counter(made.values()).most_common(1)[0]
        odd = [rank for rank, call in made.items() if call != usual]
        is_shape = len({what for what, _ in made.values()}) == 1
        told = "; ".join(f"rank {r}: {what} of {shape}" for r, (what, shape) in made.items())
        yield RunFinding(
            kind="shapes_differ" if is_shape else "desync",
            rank=odd[0] if len(odd) == 1 and len(made) > 2 else None,
            severity="error",
            words=f"ranks do not agree about collective {key[1]} of group {key[0]}: {told}",
            evidence=finite(
                {
                    "group": key[0],
                    "number": key[1],
                    "calls": {r: " ".join(c) for r, c in made.items()},
                }
            ),
            to_try="pad to one shape before the collective" if is_shape else DESYNC_HINT,
        )
        return


def key_of(entry: Body) -> tuple[str, int]:
    """Return group and number of a call; "?" and 0 where a dump says nothing that can be one."""
    group, number = entry.get("process_group"), entry.get("collective_seq_id")
    name = group[0] if isinstance(group, list | tuple) and group else "?"
    return str(name), number if isinstance(number, int) else 0


def _calls(body: Body) -> dict[tuple[str, int], Call]:
    """Return what a dump says was called, by group and number; calls between two ranks, which have
    no counterpart of the same shape on all, are left out."""
    entries: Any = body.get("entries")
    found = {}
    for entry in entries if isinstance(entries, Sequence) else ():
        if isinstance(entry, dict) and not entry.get("is_p2p"):
            sizes = entry.get("input_sizes")
            found[key_of(entry)] = (str(entry.get("profiling_name")), str(sizes))
    return found
