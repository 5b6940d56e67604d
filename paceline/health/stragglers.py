"""Finds slow ranks by their own work, and ranks that only stall now and then, which is
different."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.health.evidence import Evidence
from paceline.health.work import Work
from paceline.records.columns import Table
from paceline.records.findings import RunFinding, finite
from paceline.records.phases import Phase
from paceline.records.tables import TelemetryRow
from paceline.records.words import count, duration

# A rank is slow when it is in four of five steps: a stall in some of them is a spike.
STEADY_SHARE = 0.2
# By how much a rank must be slower to be named by few short steps: a machine that does something
# else for a moment makes one slower by less (benchmarks/results/diagnosis_quality.txt).
FAR_BEHIND_SHARE = 0.5
# Ranks of a pipeline are unlike. Shares of the FLOPs do not tell the time of their stages to the
# percent, so what they do not explain must be more to count; less is found against the stages' own
# first steps, where those are not among the judged ones.
STAGE_SLACK, START_SLACK, START_STEPS = 0.25, 0.1, 6
MIN_EXTRA_S = 0.0005  # below that the clocks of ranks and their bookkeeping differ, too
MIN_SPIKES, SPIKE_SHARE = 3, 0.01  # of the steps; fewer are told where they have a rhythm
WORDS = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "the optimizer",
    Phase.OTHER: "between steps (hooks, logging, files)",
}
TO_TRY = {
    Phase.DATA: "look at that machine's disk and cores; more data.num_workers hide a slow source",
    Phase.FORWARD: "look for code that only this rank runs, and for another process on its device",
    Phase.BACKWARD: "look for hooks that only this rank has, and for another process on its device",
    Phase.OPTIMIZER: "look for what only this rank does around its update, such as logging",
    Phase.OTHER: "look at what hooks of the job do on this rank only, and at its disk",
}
COMPUTE = (Phase.FORWARD, Phase.BACKWARD)
# What may make a GPU slower than others: its unit, which side is worse, and from what share on.
WORSE = {
    "clock_mhz": ("MHz", -1, 0.05),
    "temperature_c": ("°C", 1, 0.2),
    "num_processes": ("processes on it", 1, 0.0),
}


def find_stragglers(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Yield a finding for each rank whose own work takes longer than that of the others, in nearly
    all steps."""
    if len(work.ranks) < 2 or len(work.steps) < evidence.rules.straggler_steps:
        return
    found = [*_by_few_steps(evidence, work), *_by_enough_steps(evidence, work)]
    yield from {finding.rank: finding for finding in reversed(found)}.values()


def _by_few_steps(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Judge a live run by its very last steps, however short: a rank that is so much slower is
    named before `straggler_s` is over."""
    if evidence.is_live:
        share = max(evidence.rules.straggler_share, FAR_BEHIND_SHARE)
        slack = STAGE_SLACK if _is_pipeline(evidence) else 0.0
        yield from _slower(evidence, work.last(evidence.rules.straggler_steps), share + slack)


def _by_enough_steps(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Judge a live run by its last steps, so that a rank which becomes slow is named at once, and a
    finished one by its last quarter: its state at the end."""
    few, share = _enough(evidence, work), evidence.rules.straggler_share
    if len(work.steps) < few:
        return
    judged = few if evidence.is_live else max(2 * few, len(work.steps) // 4)
    if not _is_pipeline(evidence):
        yield from _slower(evidence, work.last(judged), share)
        return
    yield from _slower(evidence, work.last(judged), share + STAGE_SLACK)
    if len(work.steps) >= START_STEPS + few:
        judged = min(judged, len(work.steps) - START_STEPS)
        since = work.against_start(START_STEPS).last(judged)
        yield from _slower(evidence, since, share + START_SLACK)


def _enough(evidence: Evidence, work: Work) -> int:
    """Return how many of the last steps a live run is judged by: short ones must be more, since a
    machine may do something else for half a second."""
    since_s = np.cumsum(np.median(work.wall, axis=0)[::-1])
    spanned = int(np.searchsorted(since_s, evidence.rules.straggler_s)) + 1
    return max(evidence.rules.straggler_steps, spanned if evidence.is_live else 0)


def _slower(evidence: Evidence, work: Work, share: float) -> Iterator[RunFinding]:
    """Yield a finding for each rank that takes longer than the others by more than a share."""
    total = work.total
    # First compare all ranks at once with the middle of all: of two it is half as far away.
    ahead = np.quantile(total - np.median(total, axis=0), STEADY_SHARE, axis=1)
    least = max(0.4 * share * float(np.median(total)), 0.4 * MIN_EXTRA_S)
    for row in np.flatnonzero(ahead >= least).tolist():
        extra = total[row] - _of_others(total, row)
        usual_s = float(np.median(_of_others(total, row)))
        if np.quantile(extra, STEADY_SHARE) >= max(share * usual_s, MIN_EXTRA_S):
            yield _describe(evidence, work, row, work.ranks[row])


def _of_others(part: NDArray[np.float64], row: int) -> NDArray[np.float64]:
    """Return the time of the other ranks, step by step: that of the middle one."""
    made: NDArray[np.float64] = np.median(np.delete(part, row, axis=0), axis=0)
    return made


def _is_pipeline(evidence: Evidence) -> bool:
    return evidence.plan is not None and evidence.plan.pipeline is not None


def _describe(evidence: Evidence, work: Work, row: int, rank: int) -> RunFinding:
    extras = {p: float(np.median(own[row] - _of_others(own, row))) for p, own in work.own.items()}
    part, is_all = _part_of(work, row, extras)
    own = work.total if is_all else work.own[part]
    takes_s, usual_s = float(np.median(own[row])), float(np.median(_of_others(own, row)))
    total = work.total
    second = np.max(np.delete(total, row, axis=0), axis=0)
    lost_s = max(0.0, float(np.median(total[row] - second)))
    where = "all its work" if is_all else WORDS[part]
    words = (
        f"rank {rank} is slow: {where} takes it {duration(takes_s)} a step, the others"
        f" {duration(usual_s)}; every rank waits for it, which costs the job"
        f" {duration(lost_s)} of each {duration(work.step_s)} ({lost_s / work.step_s:.0%})"
    )
    device = _device_words(evidence, rank)
    return RunFinding(
        kind="straggler",
        rank=rank,
        step=int(work.steps[-1]),
        words=words + (f"; {device}" if device else ""),
        evidence=finite(
            {
                "part": "all" if is_all else str(part),
                "extra_s": takes_s - usual_s,
                "own_s": takes_s,
                "others_s": usual_s,
                "lost_s": lost_s,
                "lost_share": lost_s / work.step_s,
                "extra_by_part_s": {str(phase): extra for phase, extra in extras.items()},
                "first_step": int(work.steps[0]),
                "last_step": int(work.steps[-1]),
            }
        ),
        to_try=(
            "all of it is slower, so look at the device: its clock, temperature and other processes"
            if is_all
            else TO_TRY[part]
        ),
    )


def _part_of(work: Work, row: int, extras: dict[Phase, float]) -> tuple[Phase, bool]:
    """Return the part with most of the extra time, and whether all computing is equally slower,
    which points to the device and not to a part of the program."""
    part = max(extras, key=lambda phase: extras[phase])
    ratios = []
    for phase in (*COMPUTE, Phase.OPTIMIZER):
        if phase in work.own:
            usual_s = float(np.median(_of_others(work.own[phase], row)))
            ratios.append(extras[phase] / usual_s if usual_s > 0 else 0.0)
    is_all = part in COMPUTE and len(ratios) == 3 and min(ratios) > 0.5 * max(ratios) > 0
    return part, is_all


def _device_words(evidence: Evidence, rank: int) -> str:
    """Say how this rank's GPU differs from the others', if telemetry has recorded them."""
    gpus = gpu_samples(evidence)
    if rank not in gpus or len(gpus) < 2:
        return ""
    told = []
    for name, (unit, factor, margin) in WORSE.items():
        values = {r: _median_of(rows, name) for r, rows in gpus.items()}
        rest = [v for r, v in values.items() if r != rank and v is not None]
        own, usual = values[rank], float(np.median(rest)) if rest else None
        if own is not None and usual is not None and factor * (own - usual) > margin * usual:
            told.append(f"its GPU has {own:.0f} {unit}, the others {usual:.0f}")
    return "; ".join(told)


def gpu_samples(evidence: Evidence) -> dict[int, Table[TelemetryRow]]:
    """Return the samples of each rank's GPU: a machine's first rank samples all of its GPUs."""
    plan, found = evidence.plan, dict[int, Table[TelemetryRow]]()
    if plan is None or not plan.on_gpu:
        return found
    per_node, indices = plan.crew.per_node, plan.crew.device_indices
    for rank in range(evidence.num_ranks):
        local = rank % per_node
        source = f"gpu{indices[local] if local < len(indices) else local}"
        own = evidence.sampled.get(rank - local, {}).get(source)
        if own is not None:
            found[rank] = own
    return found


def _median_of(rows: Table[TelemetryRow], name: str) -> float | None:
    values = rows.known(name).column(name)
    return float(np.median(values)) if len(values) else None


def find_spikes(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Yield a finding for each rank that stalls in single steps; one where all stall together."""
    total, usual = work.total, np.median(work.total, axis=1, keepdims=True)
    is_long = (total > evidence.rules.spike_factor * usual) & (total - usual > 10 * MIN_EXTRA_S)
    together = np.logical_and.reduce(is_long) if len(work.ranks) > 1 else np.zeros_like(is_long[0])
    if _is_often(work, together):
        yield _spike(work, None, together, np.max(total - usual, axis=0))
    for row, rank in enumerate(work.ranks):
        alone = is_long[row] & ~together
        if _is_often(work, alone):
            yield _spike(work, rank, alone, (total - usual)[row])


def _is_often(work: Work, at: NDArray[np.bool_]) -> bool:
    """Say whether stalls are worth reporting: one in a hundred steps or more, or regular ones."""
    num_steps = int(at.sum())
    is_some = num_steps >= SPIKE_SHARE * len(work.steps)
    return num_steps >= MIN_SPIKES and (is_some or _is_regular(work.steps[at]))


def _is_regular(steps: NDArray[np.int64]) -> bool:
    gaps = np.diff(steps)
    return len(gaps) >= 2 and bool(np.ptp(gaps) <= 0.2 * float(np.median(gaps)))


def _spike(
    work: Work, rank: int | None, at: NDArray[np.bool_], extra: NDArray[np.float64]
) -> RunFinding:
    steps, stall_s = work.steps[at], float(np.median(extra[at]))
    gaps, is_regular = np.diff(steps), _is_regular(steps)
    rhythm = f", every {int(np.median(gaps))} steps" if is_regular else ""
    who = f"rank {rank} stalls" if rank is not None else "all ranks stall together"
    p90, p50 = np.quantile(work.wall, [0.9, 0.5])
    row = work.ranks.index(rank) if rank is not None else 0
    parts = {
        p: float(np.median(own[row][at])) - float(np.median(own[row]))
        for p, own in work.own.items()
    }
    part = max(parts, key=lambda phase: parts[phase])
    words = (
        f"{who} now and then: {count(int(at.sum()), 'step')} of {len(work.steps)} took"
        f" {duration(stall_s)} longer in {WORDS[part]}{rhythm}"
    )
    if rank is not None:
        words += "; no straggler: its other steps are as those of the others"
    return RunFinding(
        kind="spikes",
        rank=rank,
        step=int(steps[-1]),
        words=words,
        evidence=finite(
            {
                "part": str(part),
                "stall_s": stall_s,
                "num_steps": int(at.sum()),
                "of_steps": len(work.steps),
                "every_steps": float(np.median(gaps)) if is_regular else None,
                "p90_over_p50": p90 / p50,
                "steps": steps[-8:].tolist(),
            }
        ),
        to_try="look for what runs at that rhythm: garbage collection, saving, a cron job, a slow"
        " file; paceline's observe.profile shows such a step",
    )
