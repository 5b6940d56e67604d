"""Explains why a step takes as long as it does: verdicts with numbers, and what to try first.

shares of a step    data        the least that any rank waits for its loader
                    exchange    the least time of any rank in collectives: that rank waits for no
                                late one, so it is transfer that nothing hides
                    imbalance   the time of the others in them beyond that
                    idle GPU    by telemetry: no kernel was running

If none of these holds a run up, forward and backward are most of a step, or its largest part is
named.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.health.evidence import Evidence
from paceline.health.stragglers import gpu_samples
from paceline.health.work import Work
from paceline.records.findings import RunFinding, finite
from paceline.records.phases import Phase
from paceline.records.recorded import last_to_arrive
from paceline.records.words import count, duration, number, size, typed

MIN_STEPS = 10
HANDED_SHARE = 0.5  # loaders that are busy for less of a step than this have time to spare
LOADER = ("loader process", "loader processes")
IMBALANCE_SHARE = 0.15
MOST = 0.5  # of a step in forward and backward, from which it is called compute-bound
PASSES, WAITING, UNSEEN = "forward and backward", "waiting", "unseen"
OPTIMIZER, OTHER, DATA = str(Phase.OPTIMIZER), str(Phase.OTHER), str(Phase.DATA)
PARTS = {
    WAITING: "waiting for other ranks",
    DATA: "data",
    OPTIMIZER: "the optimizer's update",
    OTHER: "what is around the steps: hooks, bookkeeping",
    UNSEEN: "what no phase of a step sees",
}


def find_bounds(
    evidence: Evidence, work: Work, slow: Sequence[RunFinding], throttled: Sequence[RunFinding] = ()
) -> Iterator[RunFinding]:
    """Yield what the run is bound by; if nothing holds it up, that it is compute-bound, or its
    largest part. `throttled`: GPUs that have lowered their clocks."""
    if len(work.steps) < MIN_STEPS:
        return
    found = [
        *_data(evidence, work),
        *_exchange(evidence, work),
        *(_imbalance(evidence, work) if not slow else ()),
        *_host(evidence, work),
        *_memory(evidence, work),
    ]
    yield from found
    if not found and not slow and not evidence.is_live and _knows_passes(work):
        shares = _shares(work)
        is_passes = shares[PASSES] >= MOST
        yield _compute(evidence, work, throttled) if is_passes else _largest(evidence, work, shares)


def _data(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    share = float(np.median(work.own[Phase.DATA] / work.wall, axis=1).min())
    if share < evidence.rules.data_starvation_share:
        return
    workers = evidence.plan.loader_workers.value if evidence.plan is not None else 0
    read_s, joined_s = (_spent(evidence, column) for column in ("read_s", "joined_s"))
    tried = f"{workers},{max(1, 2 * workers)},{max(2, 4 * workers)}"
    told = f"bound by data: {share:.0%} of each {duration(work.step_s)}"
    yield RunFinding(
        kind="bound_by_data",
        severity="note",
        words=f"{told}; {_stage(workers, read_s, joined_s, (share, work.step_s))}",
        evidence=finite(
            {"share": share, "num_workers": workers, "read_s": read_s, "joined_s": joined_s}
        ),
        to_try=_sweep(evidence, f"data.num_workers={tried}"),
    )


def _spent(evidence: Evidence, column: str) -> float:
    """Return the time that a step's samples take at one stage, on the slowest rank; nan if it was
    not recorded."""
    known = [table.known(column).column(column) for table in evidence.steps.values()]
    return max((float(np.median(found)) for found in known if len(found)), default=math.nan)


def _stage(workers: int, read_s: float, joined_s: float, waits: tuple[float, float]) -> str:
    """Say which stage of loading is the slow one. `waits`: the share of a step, and the step."""
    share, step_s = waits
    made_s = read_s + joined_s
    if math.isnan(made_s):
        parts = ""
    elif workers and made_s < HANDED_SHARE * workers * step_s:
        return (
            f"not making batches, which takes {duration(made_s)} of its {count(workers, *LOADER)},"
            " but handing them over: they are large, or the rank's own process is busy"
        )
    else:
        by = (
            f"reading them ({duration(read_s)}"
            if read_s >= joined_s
            else (f"putting them together ({duration(joined_s)}")
        )
        parts = f": most of it is {by} of {duration(made_s)} a step)"
    own = "samples are made in the rank's own process, between two steps"
    if not workers and made_s < HANDED_SHARE * share * step_s:
        parts = f", but not in reading them ({duration(read_s)} a step) or putting them together"
        return f"{own}{parts}: look at the sampler, at hooks, and at what moves them to the device"
    if workers:
        return f"{count(workers, *LOADER)} cannot make samples in time{parts}"
    return f"{own}{parts}"


def _exchange(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """A pipeline has no exchange to speak of: what it waits for is another stage."""
    if not work.is_whole or len(work.ranks) < 2 or _is_pipeline(evidence):
        return
    seconds = float(np.median(work.blocked.min(axis=0)))
    share = seconds / work.step_s
    if share < evidence.rules.exchange_share:
        return
    told, rate = _rate(evidence, len(work.ranks))
    yield RunFinding(
        kind="bound_by_exchange",
        severity="note",
        words=f"bound by the exchange: even the last rank is {duration(seconds)} of each"
        f" {duration(work.step_s)} in it ({share:.0%}){told}",
        evidence=finite(
            {
                "share": share,
                "exchange_s": seconds,
                "gb_per_s": rate,
                "link": evidence.link_gb_per_s,
            }
        ),
        to_try=_exchange_less(evidence),
    )


def _exchange_less(evidence: Evidence) -> str:
    """Suggest how to exchange less often, and how to send fewer bits, which only one strategy
    can."""
    sweep = _sweep(evidence, "train.grad_accum=1,2,4")
    often = f"train.grad_accum exchanges less often{': ' * bool(sweep)}{sweep}"
    return f"{often}; strategy.name=ddp can send fewer bits: paceline bench run ddp_compression"


def _rate(evidence: Evidence, num_ranks: int) -> tuple[str, float | None]:
    """Say how much is exchanged and how fast, by the profiled step: a rank's time in collectives
    is only what backward passes did not hide. The rank that came last did not wait for others."""
    plan, link = evidence.plan, evidence.link_gb_per_s
    if plan is None or not plan.exchange.sent:
        return "", None
    # A ring sends each byte twice, but for each rank's own part (nccl-tests' busbw).
    moved = 2 * (num_ranks - 1) / num_ranks * plan.exchange.sent / 1e9
    told = f": {size(plan.exchange.sent)} of gradients"
    known = [each for each in evidence.overlaps if each.communication_s > 0]
    if not known:
        at = f", which take {duration(moved / link)} at the {number(link, 3)} GB/s" if link else ""
        return f"{told}{at} that paceline check measured" if at else told, None
    last = last_to_arrive(known)
    rate = moved / last.communication_s
    told += f", {duration(last.communication_s)} on their way in step {last.step}"
    told += f" ({number(rate, 3)} GB/s)"
    if link:
        told += f", where paceline check measured {number(link, 3)} GB/s"
    return told, rate


def _imbalance(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Report imbalance if no rank is always the slow one, and yet they wait for each other."""
    if len(work.ranks) < 2 or not work.is_whole:
        return
    if _is_pipeline(evidence):
        yield from _stages(evidence, work)
        return
    spread = work.total.max(axis=0) - np.median(work.total, axis=0)
    apart_s = float(np.median(spread))
    share = apart_s / work.step_s
    if share > IMBALANCE_SHARE:
        yield RunFinding(
            kind="bound_by_imbalance",
            severity="note",
            words=f"bound by imbalance: in each step some rank takes {duration(apart_s)} longer"
            f" than the middle one ({share:.0%} of a step), but not always the same",
            evidence=finite({"share": share, "apart_s": apart_s}),
            to_try="samples of like length together: data.buckets=16",
        )


def _stages(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    plan = evidence.plan.pipeline if evidence.plan is not None else None
    facts = evidence.result.pipeline if evidence.result is not None else None
    if plan is None or facts is None:
        return
    shares = {rank.rank: rank.busy_s for rank in facts.ranks}
    slowest = max(shares, key=lambda rank: shares[rank])
    mean_s = float(np.mean(list(shares.values())))
    over = shares[slowest] / mean_s - 1 if mean_s else 0.0
    if over > IMBALANCE_SHARE:
        yield RunFinding(
            kind="bound_by_imbalance",
            severity="note",
            words=f"bound by uneven stages: rank {slowest} is busy for {duration(shares[slowest])}"
            f" of a pass, the mean rank for {duration(mean_s)} ({over:.0%} less)",
            evidence=finite({"share": over, "busy_s": shares}),
            to_try="another cut of the model, or a schedule with more stages a rank"
            " (paceline plan --schedule compares them)",
        )


def _host(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """A GPU that is idle while no rank waits for data or other ranks gets no work from its host."""
    name = "utilisation_percent"
    parts = [rows[5:].known(name).column(name) for rows in gpu_samples(evidence).values()]
    used = np.concatenate(parts) if parts else np.empty(0)
    if len(used) < 5:
        return
    waits = float(np.median(work.own[Phase.DATA] / work.wall) + np.median(work.blocked / work.wall))
    idle = 1 - float(np.median(used)) / 100 - waits
    if idle > evidence.rules.host_share:
        yield RunFinding(
            kind="bound_by_host",
            severity="note",
            words=f"bound by the host: GPUs have nothing to run for {idle:.0%} of a step, beside"
            " data and exchange: kernels are too small, or launched too slowly",
            evidence=finite({"idle_share": idle, "utilisation_percent": np.median(used)}),
            to_try=_more_at_once(evidence),
        )


def _memory(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    known = [t.known("alloc_retries").column("alloc_retries") for t in evidence.telemetry.values()]
    most = max((float(found.max()) for found in known if len(found)), default=0.0)
    if most > 0:
        yield RunFinding(
            kind="bound_by_memory",
            severity="warning",
            words=f"bound by memory: the allocator had to free its cache and ask again"
            f" {most:.0f} times, each of which waits for the device",
            evidence=finite({"alloc_retries": most}),
            to_try="a smaller train.micro_batch_size with more train.grad_accum, or"
            " train.activation_checkpointing=selective",
        )


def _compute(evidence: Evidence, work: Work, throttled: Sequence[RunFinding]) -> RunFinding:
    own = {str(p): float(np.median(part)) for p, part in work.own.items()}
    share = evidence.result.matmul_share if evidence.result is not None else None
    told = f", at {share:.0%} of the matmul rate of paceline check" if share is not None else ""
    recompute = evidence.plan.recompute.value if evidence.plan is not None else "none"
    again = "; recomputation repeats forward passes" if recompute == "full" else ""
    words = f"{_shares(work)[PASSES]:.0%} of each {duration(work.step_s)} is {PASSES}{told}{again}"
    known = finite({"own_s": own, "step_s": work.step_s, "matmul_share": share})
    if throttled:
        first = throttled[0]
        return RunFinding(
            kind="bound_by_gpu",
            severity="note",
            words=f"bound by the GPU itself: {words}, and {first.words}",
            evidence=known | {"ranks": [each.rank for each in throttled]},
            to_try=first.to_try,
        )
    return RunFinding(
        kind="compute_bound",
        severity="note",
        words=f"compute-bound: {words}",
        evidence=known,
        to_try=_more_at_once(evidence),
    )


def _shares(work: Work) -> dict[str, float]:
    """Return the shares of a step's parts, in the median; passes are one part."""
    own = {phase: float(np.median(part)) for phase, part in work.own.items()}
    seconds = {PASSES: own.pop(Phase.FORWARD) + own.pop(Phase.BACKWARD)}
    seconds |= {str(phase): part for phase, part in own.items()}
    seconds[WAITING] = float(np.median(work.blocked))
    seconds[UNSEEN] = max(0.0, work.step_s - sum(seconds.values()))
    return {part: each / work.step_s for part, each in seconds.items()}


def _largest(evidence: Evidence, work: Work, shares: dict[str, float]) -> RunFinding:
    """Name the largest part of a step if forward and backward are less than half of it."""
    part, *others = sorted(shares, key=lambda each: -shares[each])
    step = duration(work.step_s)
    if part == PASSES:
        told = ", ".join(f"{each} {shares[each]:.0%}" for each in (part, *others[:2]))
        words, part = f"bound by no one part: of each {step} {told}", "several"
    else:
        is_pipeline = part == WAITING and _is_pipeline(evidence)
        name = "waiting for other stages of the pipeline" if is_pipeline else PARTS[part]
        words = f"bound by {name}: {shares[part]:.0%} of each {step}; {PASSES} are"
        words += f" {shares[PASSES]:.0%}"
    return RunFinding(
        kind=f"bound_by_{part}",
        severity="note",
        words=words,
        evidence=finite({"shares": shares, "step_s": work.step_s}),
        to_try=_for_part(evidence, part),
    )


def _for_part(evidence: Evidence, part: str) -> str:
    """Suggest how to shorten a part of a step, or else how to investigate it."""
    pipeline = evidence.plan.pipeline if evidence.plan is not None else None
    if part == WAITING and pipeline is not None:
        num = pipeline.num_microbatches
        more = _sweep(evidence, f"strategy.microbatches={num},{2 * num}")
        return f"{more}; or another schedule (paceline plan --schedule compares them)"
    if part in (WAITING, OPTIMIZER):
        return _sweep(evidence, "train.grad_accum=1,2,4")
    if part == DATA:
        return _sweep(evidence, "data.num_workers=0,2,4")
    return "observe.profile=steps:20-24 shows what runs in a step"


def _is_pipeline(evidence: Evidence) -> bool:
    return evidence.plan is not None and evidence.plan.pipeline is not None


def _knows_passes(work: Work) -> bool:
    """Say whether forward and backward are known, and as work: another trainer's log may only have
    the times of whole steps, or backward passes that include waiting."""
    return work.is_whole and bool(work.own[Phase.FORWARD].any())


def _more_at_once(evidence: Evidence) -> str:
    """Suggest how to get fewer and larger kernels for the same work: compilation, or larger
    batches."""
    if evidence.plan is None or evidence.plan.compile.value == "off":
        return _sweep(evidence, "train.compile=off,default")
    micro = evidence.plan.batch.micro
    return _sweep(evidence, f"train.micro_batch_size={micro},{2 * micro}")


def _sweep(evidence: Evidence, axis: str) -> str:
    """Return the command that tries an axis on this very job. A workload of a Python file must be
    typed: run.yaml may not choose code to run. A run of another trainer has no such command."""
    if evidence.plan is None:
        return ""
    workload = typed(Path(evidence.workload or evidence.plan.workload))
    chosen = shlex.quote(f"workload={workload}") + " " if ":" in workload else ""
    return f"paceline sweep {evidence.path}/run.yaml {chosen}--axis {axis}"
