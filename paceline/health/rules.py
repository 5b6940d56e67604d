"""Rules about a run's health: loss, gradient, speed, equal shares and stalls. Rules about
machines are in machines.py."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.errors import Outcome
from paceline.health.evidence import Evidence
from paceline.health.machines import find_ill_machines
from paceline.health.stragglers import STEADY_SHARE
from paceline.health.work import Work
from paceline.metrics import TRAIN
from paceline.records.findings import RunFinding, finite
from paceline.records.phases import Phase
from paceline.records.words import count, duration, number

Values = NDArray[np.float64]
MIN_STEPS = 20  # from which a level of loss, gradient or speed is known
# The least time of a live run's last tenth: a machine may do something else for a moment.
MIN_DRIFT_STEPS, MIN_DRIFT_S = 200, 10.0
NORMAL = 1.4826  # turns a median deviation into the sigma of a normal distribution
FLAT_STEPS = 10
GATES = (f"{TRAIN}gate_entropy", f"{TRAIN}gate_collapse")  # as attention/stats.py measures them


def find_unhealthy(evidence: Evidence, work: Work | None) -> Iterator[RunFinding]:
    """Yield what breaks a rule, whether the run lives or is over."""
    yield from _loss(evidence)
    yield from _gradient(evidence)
    yield from _gates(evidence)
    yield from _drift(evidence)
    yield from find_ill_machines(evidence)
    yield from _units(evidence)
    if work is not None:
        yield from _starvation(evidence, work)
    if evidence.is_live:
        yield from _stalls(evidence)


def _loss(evidence: Evidence) -> Iterator[RunFinding]:
    rows, rules = evidence.training, evidence.rules
    losses, steps = rows.column("loss"), rows.column("step")
    bad = (rows.column("skipped") & ~rows.column("overflowed")) | ~np.isfinite(losses)
    # The end of a run says it better, with the rank and the samples (endings.py).
    is_told = evidence.result is not None and evidence.result.outcome is Outcome.NAN
    if bad.any() and not is_told:
        first, last = int(steps[bad][0]), int(steps[bad][-1])
        times = count(int(bad.sum()), "step")
        yield RunFinding(
            kind="nan_loss",
            step=first,
            severity="error" if bad[-1] else "warning",
            words=f"loss or gradient was not finite in {times}, first in step {first}"
            + (f" and last in step {last}" if last != first else "")
            + ("; their updates were left out" if evidence.plan is not None else ""),
            evidence=finite(
                {"num_steps": int(bad.sum()), "steps": steps[bad][:8].tolist()} | _last(steps, bad)
            ),
            to_try="a lower optim.lr or optim.clip=1; observe.sample_ids=true names the samples",
        )
    losses, steps = losses[~bad], steps[~bad]
    if len(losses) > MIN_STEPS and (spikes := _jumps(losses, rules.loss_spike_sigmas)):
        last = spikes[-1]
        yield RunFinding(
            kind="loss_spike",
            step=int(steps[last]),
            words=f"the loss jumped to {number(losses[last])} in step {steps[last]}, from"
            f" {number(float(np.median(losses[max(0, last - MIN_STEPS) : last])))} before"
            + (f" (the last of {len(spikes)} such steps)" if len(spikes) > 1 else ""),
            evidence=finite(
                {"steps": [int(steps[n]) for n in spikes[-8:]], "loss": losses[last]}
                | {"began_step": int(steps[last]), "last_step": int(steps[last])}
            ),
            to_try="a lower optim.lr, a longer warm-up, optim.clip=1",
        )
    yield from _plateau(losses, steps, rules.loss_plateau_steps)


def _last(steps: Values, which: NDArray[np.bool_]) -> dict[str, int]:
    """Return the last of some steps, and the start of the unbroken series that it ends: a caller
    that has reported this start has reported the last one too."""
    end = int(np.flatnonzero(which)[-1])
    others = np.flatnonzero(~which[:end])
    begin = int(others[-1]) + 1 if len(others) else 0
    return {"began_step": int(steps[begin]), "last_step": int(steps[end])}


def _jumps(losses: Values, sigmas: float) -> list[int]:
    """Return where the loss exceeds that of the steps before it by `sigmas` times its usual
    difference from one step to the next."""
    usual = NORMAL * float(np.median(np.abs(np.diff(losses)))) or 1e-12
    found = []
    for place in np.flatnonzero(np.diff(losses) > sigmas * usual) + 1:
        before = losses[max(0, place - MIN_STEPS) : place]
        level = float(np.median(before))
        if len(before) >= MIN_STEPS and losses[place] - level > max(
            sigmas * usual, 0.1 * abs(level)
        ):
            found.append(int(place))
    return found


def _plateau(losses: Values, steps: Values, span: int) -> Iterator[RunFinding]:
    if len(losses) < 2 * span:
        return
    new, old = losses[-span:], losses[-2 * span : -span]
    gain = float(old.mean() - new.mean())
    noise = float(np.sqrt((new.var() + old.var()) / span))
    if gain < noise:
        yield RunFinding(
            kind="loss_plateau",
            step=int(steps[-1]),
            severity="note",
            words=f"the loss no longer falls: {number(float(new.mean()))} over the last {span:,}"
            f" steps, {number(float(old.mean()))} over as many before",
            evidence=finite({"mean": new.mean(), "before": old.mean(), "num_steps": span}),
            to_try="end the run, or lower the learning rate (optim.schedule)",
        )


def _gradient(evidence: Evidence) -> Iterator[RunFinding]:
    rows, limit = evidence.training, evidence.rules.gradient_explosion_factor
    is_known = np.isfinite(rows.column("grad_norm")) & ~rows.column("skipped")
    norms, steps = rows.column("grad_norm")[is_known], rows.column("step")[is_known]
    if (zeros := norms == 0.0).any():
        first, last = int(steps[zeros][0]), int(steps[zeros][-1])
        yield RunFinding(
            kind="zero_grad",
            step=first,
            severity="error",
            words=f"the gradient norm is 0 in {count(int(zeros.sum()), 'step')}, first in step"
            f" {first}{f' and last in step {last}' if last != first else ''}: nothing is learnt"
            " there",
            evidence=finite(
                {"num_steps": int(zeros.sum()), "first_step": first} | _last(steps, zeros)
            ),
            to_try="look for a detached loss, a model that is frozen, or a mask of zeros",
        )
    usual = float(np.median(norms)) if len(norms) > MIN_STEPS else 0.0
    if usual > 0 and (large := norms > limit * usual).any():
        last = int(steps[large][-1])
        yield RunFinding(
            kind="gradient_explosion",
            step=last,
            words=f"the gradient norm was {number(float(norms[large][-1]))} in step {last}, the"
            f" median is {number(usual)}",
            evidence=finite(
                {"largest": norms.max(), "median": usual, "steps": steps[large][-8:].tolist()}
                | _last(steps, large)
            ),
            to_try="optim.clip=1, a lower optim.lr, a longer warm-up",
        )


def _gates(evidence: Evidence) -> Iterator[RunFinding]:
    """Judge the gates of sparse attention, if there are any, by all steps up to the last one: one
    token, or one step, in which a single gate has everything means nothing."""
    rows, rules = evidence.training, evidence.rules
    if not rows.values.keys() >= set(GATES):
        return
    rows = rows.known(GATES[0]).known(GATES[1])
    steps, entropy, share = (rows.column(name) for name in ("step", *GATES))
    is_bad = (entropy < rules.gate_entropy_min) | (share > rules.gate_collapse_share)
    first = max(np.flatnonzero(~is_bad), default=-1) + 1  # behind the last step that was sound
    if first < len(steps) and steps[-1] - steps[first] + 1 >= rules.gate_collapse_steps:
        yield RunFinding(
            kind="gate_collapse",
            step=int(steps[first]),
            severity="error",
            words=f"the gates of sparse attention have collapsed, since step {steps[first]}: in"
            f" {share[-1]:.0%} of tokens and heads one branch has all, and their entropy is"
            f" {number(float(entropy[-1]))} (1.0986 where all are alike)",
            evidence=finite({"entropy": entropy[-1], "share": share[-1], "last_step": steps[-1]}),
            to_try="a lower optim.lr, a longer warm-up (optim.schedule.warmup_steps), optim.clip=1;"
            " train/gate_cmp, gate_sel and gate_win in training.csv say which branch is left",
        )


def _drift(evidence: Evidence) -> Iterator[RunFinding]:
    rows = evidence.training.pick(~evidence.training.column("warmup"))
    if len(rows) < MIN_DRIFT_STEPS:
        return
    times, steps = rows.column("step_s"), rows.column("step")
    # By steps and not by rows: of a long run that lives, the earlier rows are thinned.
    at = (steps - steps.min()) / (np.ptp(steps) + 1)
    # After the second tenth: caches fill and clocks settle in the first.
    second, last = times[(at >= 0.1) & (at < 0.2)], times[at >= 0.9]
    if not len(second):
        return
    early, late = float(np.median(second)), float(np.median(last))
    if evidence.is_live and 0.1 * float(np.ptp(steps)) * late < MIN_DRIFT_S:
        return
    if late > (1 + evidence.rules.throughput_drift_share) * early:
        yield RunFinding(
            kind="throughput_drift",
            step=int(rows.column("step")[-1]),
            words=f"steps have become slower: {duration(late)} in the last tenth of the run,"
            f" {duration(early)} at its beginning ({late / early - 1:.0%} more)",
            evidence=finite({"early_s": early, "late_s": late, "share": late / early - 1}),
            to_try="look at memory growth, clocks and the disk in telemetry.csv",
        )


def _units(evidence: Evidence) -> Iterator[RunFinding]:
    """Compare ranks' shares of a step: the largest share delays all ranks."""
    tables = {r: t for r, t in evidence.steps.items() if len(t) and not t.is_empty["units"].all()}
    if len(tables) < 2 or (evidence.plan is not None and evidence.plan.pipeline is not None):
        return
    length = min(len(table) for table in tables.values())
    units = np.array([table.column("units")[-length:] for table in tables.values()])
    units = units[:, ~np.isnan(units).any(axis=0)]
    usual = np.median(np.sort(units, axis=0)[:-1], axis=0)  # of all but the largest
    units, usual = units[:, usual > 0], usual[usual > 0]
    if not len(usual):
        return  # no step in which all ranks have counted something
    over = np.median(units / usual, axis=1) - 1
    largest = float(np.median(units.max(axis=0) / usual)) - 1
    if largest > evidence.rules.unequal_batches_share:
        row = int(np.argmax(over))
        ratio = units[row] / np.median(np.delete(units, row, axis=0), axis=0)
        always = np.quantile(ratio, STEADY_SHARE) - 1 > evidence.rules.unequal_batches_share
        who = list(tables)[row] if always else None
        yield RunFinding(
            kind="unequal_batches",
            rank=who,
            words=f"ranks get unequal shares of a step: the largest has {largest:.0%} more than the"
            " middle one of the others" + (f", and it is always rank {who}'s" if always else ""),
            evidence=finite({"share": largest, "by_rank": dict(zip(tables, over, strict=True))}),
            to_try="data.buckets puts samples of like length together; data.batch_by=length fills"
            " batches evenly",
        )


def _starvation(evidence: Evidence, work: Work) -> Iterator[RunFinding]:
    """Judge by the rank that waits least: if only one rank waits, it is a straggler."""
    if Phase.DATA not in work.own:
        return
    shares = np.median(work.own[Phase.DATA] / work.wall, axis=1)
    share = float(shares.min())
    if share > evidence.rules.data_starvation_share:
        waits_s = float(np.median(work.own[Phase.DATA]))
        yield RunFinding(
            kind="data_starvation",
            step=int(work.steps[-1]),
            words=f"all ranks wait for data: {duration(waits_s)} of each {duration(work.step_s)}"
            f" ({share:.0%} of a step)",
            evidence=finite({"share": share, "data_s": waits_s, "step_s": work.step_s}),
            to_try=_loader_hint(evidence),
        )


def _loader_hint(evidence: Evidence) -> str:
    workers = evidence.plan.loader_workers.value if evidence.plan is not None else 0
    more = max(2, 2 * workers)
    return (
        f"data.num_workers={more} (now {workers}); a source that is slow itself needs a faster"
        " disk, or data that is prepared once (paceline prepare)"
    )


def _stalls(evidence: Evidence) -> Iterator[RunFinding]:
    """Judge a live run by the reader's clock."""
    now, rules = evidence.now, evidence.rules
    assert now is not None, "asked of a live run only"
    for rank, heart in evidence.hearts.items():
        silent_s = now - heart.heard_at
        if silent_s > rules.heartbeat_stall_s:
            yield RunFinding(
                kind="heartbeat_stall",
                rank=rank,
                step=heart.beat.step,
                severity="error",
                words=f"rank {rank} has written no heartbeat for {duration(silent_s)}: frozen, or"
                f" stuck in C code in {heart.beat.phase} of step {heart.beat.step}",
                evidence=finite({"silent_s": silent_s, "phase": heart.beat.phase}),
                to_try=f"ranks/rank{rank}/stacks.txt; launch.progress_s ends such a run",
            )
    yield from _flatline(evidence, now)


def _flatline(evidence: Evidence, now: float) -> Iterator[RunFinding]:
    """Step 1 may compile for minutes: launch.progress_s ends a rank that hangs in it."""
    moved = [heart.beat for heart in evidence.hearts.values()]
    times = evidence.training.column("step_s")
    if not moved or min(beat.step for beat in moved) <= 1:
        return
    idle_s = _idle_s(evidence, now)
    usual_s = float(np.median(times)) if len(times) else 0.0
    limit_s = max(evidence.rules.throughput_flatline_s, FLAT_STEPS * usual_s)
    if idle_s > limit_s:
        behind = min(moved, key=lambda beat: (beat.step, beat.marks))
        yield RunFinding(
            kind="throughput_flatline",
            step=behind.step,
            severity="error",
            words=f"no step has ended for {duration(idle_s)}: step {behind.step} stands in"
            f" {behind.phase} on rank {behind.rank}",
            evidence=finite({"idle_s": idle_s, "step_s": usual_s, "rank": behind.rank}),
            to_try="touch control/dump in the run directory for the stacks of all ranks",
        )


def _idle_s(evidence: Evidence, now: float) -> float:
    """Return for how long no step has begun and no rank has entered a phase: a long evaluation
    enters one with each batch, a rank that hangs enters none. If ranks in an evaluation do not
    report that, nothing is known."""
    if evidence.idle_s is None:
        return 0.0
    still = [evidence.idle_s]
    for heart in evidence.hearts.values():
        if heart.beat.still_s is not None:
            still.append(heart.beat.still_s + max(0.0, now - heart.heard_at))
        elif heart.beat.phase == Phase.EVAL:
            return 0.0
    return min(still)
