"""Compares what the ranks left behind with one process, with each other, and with the plan."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.records import StateBytes
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.verify.records import Check, TrialHeld
from paceline.verify.subject import Batch
from paceline.verify.trial import (
    AFTER,
    BEFORE,
    BROKEN,
    BYTES,
    EQUAL,
    POISONED,
    WHOLE,
    held_file,
    initial_file,
    state_file,
    trial_dir,
)

TOLERANCE = 1e-5  # relative, fp32
# For a user's job, whose sums may be longer than those of our model. A gradient that is one percent
# too large is off by a hundred times this.
OWN_TOLERANCE = 1e-4
OWN_CHANGE = 1e-3  # relative to how much the steps changed a tensor; rounding comes on top
SPLIT = (
    "{} where one process takes {} samples at a time, and {:.6g} where it takes {} at once: it"
    " depends on what else is in a microbatch (BatchNorm, negatives or statistics of a batch, a"
    " mean of means, random numbers), so a run with another train.micro_batch_size is another run"
)
# Relative to a tensor's largest value, and to the largest change of any tensor: some gradients, as
# that of the bias of attention's keys, are zero but for rounding.
ROUNDING = 2e-6
Weights = dict[str, Tensor]
ExpectedBytes = Callable[[int], StateBytes]


def judge(run: RunDir, reference: RunDir, num_ranks: int, expected: ExpectedBytes) -> list[Check]:
    """Run every check of one strategy; `expected` returns the bytes planned for a rank."""
    equal, one = trial_dir(run, EQUAL), trial_dir(reference, EQUAL)
    return [
        *_same_curve(read_training(one.training), read_training(equal.training)),
        _same_weights(one, equal),
        _replicas_agree(equal, num_ranks),
        _weights_moved(equal, num_ranks),
        _veto_held(run, num_ranks),
        _bytes_as_planned(trial_dir(run, BYTES), num_ranks, expected),
        _is_restored(trial_dir(run, BYTES), num_ranks),
        _can_fail(one, trial_dir(run, BROKEN)),
    ]


def judge_job(
    run: RunDir, reference: RunDir, num_ranks: int, expected: ExpectedBytes
) -> list[Check]:
    """Run every check of one strategy on a user's job: all except those that need our samples."""
    equal, one = trial_dir(run, EQUAL), trial_dir(reference, EQUAL)
    rows, wanted = read_training(equal.training), read_training(one.training)
    curve = _same_curve(wanted, rows, OWN_TOLERANCE)
    has_eval = any(row.val_loss is not None for row in wanted)
    broken = _same_curve(wanted, read_training(trial_dir(run, BROKEN).training), OWN_TOLERANCE)
    return [
        *(check for check in curve if has_eval or check.name != "eval"),
        *_same_metrics(wanted, rows),
        _same_changes(one, equal),
        _replicas_agree(equal, num_ranks),
        _bytes_as_planned(trial_dir(run, BYTES), num_ranks, expected),
        _is_restored(trial_dir(run, BYTES), num_ranks),
        _caught(not next(check for check in broken if check.name == "norm").ok),
    ]


def depends_on_split(reference: RunDir, batch: Batch) -> list[str]:
    """Return a note on the number that changes most if one process runs each batch in one piece;
    none if all stay the same."""
    cut, whole = (
        _numbers(read_training(trial_dir(reference, name).training)) for name in (EQUAL, WHOLE)
    )
    apart = {key: _apart(value, whole.get(key)) for key, value in cut.items()}
    worst = max(apart, key=lambda key: apart[key])
    if apart[worst] <= OWN_TOLERANCE:
        return []
    step, name = worst
    told = f"{name} of step {step} is {cut[worst]:.6g}"
    return [SPLIT.format(told, batch.micro, whole[worst], batch.micro * batch.accum)]


def _numbers(rows: Sequence[TrainingRow]) -> dict[tuple[int, str], float]:
    """Return all that a job has measured, by step and name."""
    named = [
        (row.step, {"loss": row.loss, "the gradient norm": row.grad_norm, **_evaluated(row)})
        for row in rows
    ]
    return {(step, name): value for step, found in named for name, value in found.items()}


def _evaluated(row: TrainingRow) -> dict[str, float]:
    return row.metrics if row.val_loss is None else {"val/loss": row.val_loss, **row.metrics}


def _same_curve(
    expected: Sequence[TrainingRow], found: Sequence[TrainingRow], allowed: float = TOLERANCE
) -> list[Check]:
    complete = [row.step for row in found] == [row.step for row in expected] and bool(expected)
    checks = []
    both = list(zip(expected, found, strict=False))
    for name, field in (("loss", "loss"), ("norm", "grad_norm"), ("eval", "val_loss")):
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in both]
        known = [(a, b) for a, b in pairs if a is not None]
        worst = max((_relative(a, b) for a, b in known), default=math.inf)
        checks.append(_limit(name, worst if complete else math.inf, allowed))
    return checks


def _same_metrics(expected: Sequence[TrainingRow], found: Sequence[TrainingRow]) -> list[Check]:
    """Compare what the job measures beside its loss, in training and in its evaluation."""
    wanted, have = (
        {(row.step, name): value for row in rows for name, value in row.metrics.items()}
        for rows in (expected, found)
    )
    if not wanted:
        return []
    apart = {key: _apart(value, have.get(key)) for key, value in wanted.items()}
    worst = max(apart, key=lambda key: apart[key])
    check = _limit("metrics", apart[worst], OWN_TOLERANCE)
    step, name = worst
    why = f" ({name} of step {step}: {have.get(worst)}, on one process {wanted[worst]})"
    return [check if check.ok else _with_detail(check, why)]


def _apart(a: float, b: float | None) -> float:
    """Return the difference of two metrics relative to the larger one, or to 1e-3 if both are
    smaller: close to zero few digits are left."""
    if b is None or math.isnan(a) != math.isnan(b):
        return math.inf
    return 0.0 if math.isnan(a) or a == b else _share_of(abs(a - b), max(abs(a), abs(b), 1e-3))


def _same_changes(one: RunDir, equal: RunDir) -> Check:
    """Compare how the steps changed each tensor."""
    start, expected, found = _load(initial_file(one, 0)), _final(one, 0), _final(equal, 0)
    if expected.keys() != found.keys():
        odd = sorted(expected.keys() ^ found.keys())
        return _check("weights", False, f"only one of the two has {odd}", "the same tensors")
    changed = {name: _largest(expected[name].double() - start[name].double()) for name in start}
    largest = max(changed.values())
    apart = {
        name: _share_of(
            _largest(found[name].double() - value.double()),
            changed[name] + ROUNDING / OWN_CHANGE * (_largest(value.double()) + largest),
        )
        for name, value in expected.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    check = _limit("weights", apart[worst], OWN_CHANGE)
    return check if check.ok else _with_detail(check, f" of {worst}")


def _with_detail(check: Check, detail: str) -> Check:
    return check.model_copy(update={"measured": check.measured + detail})


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _share_of(apart: float, whole: float) -> float:
    """Return a relative difference; infinite if one of the two is NaN, which `max` would skip."""
    if not math.isfinite(apart) or not math.isfinite(whole):
        return math.inf
    return apart / whole if whole else (math.inf if apart else 0.0)


def _same_weights(one: RunDir, equal: RunDir) -> Check:
    return _limit("weights", _distance(_final(one, 0), _final(equal, 0)), TOLERANCE)


def _replicas_agree(equal: RunDir, num_ranks: int) -> Check:
    first = _final(equal, 0)
    apart = [rank for rank in range(1, num_ranks) if not _is_same(first, _final(equal, rank))]
    return _check("replicas", not apart, f"ranks {apart} differ" if apart else "equal", "bit-equal")


def _weights_moved(equal: RunDir, num_ranks: int) -> Check:
    """Check that every tensor moved, on every rank: an optimizer that updates nothing would pass
    all other checks against a reference that updates nothing either."""
    still = sorted(
        {
            name
            for rank in range(num_ranks)
            for name, weight in _final(equal, rank).items()
            if torch.equal(weight, _load(initial_file(equal, rank))[name])
        }
    )
    return _check("moved", not still, f"unchanged: {still}" if still else "all", "all")


def _veto_held(run: RunDir, num_ranks: int) -> Check:
    """Check the veto. Step 2 has a NaN on the last rank: the weights stay those after step 1, and
    step 3 is taken as if nothing had happened."""
    before, poisoned, after = (trial_dir(run, name) for name in (BEFORE, POISONED, AFTER))
    skipped = [row.step for row in read_training(after.training) if row.skipped]
    touched = [
        rank
        for rank in range(num_ranks)
        if not _is_same(_final(before, rank), _final(poisoned, rank))
    ]
    went_on = not _is_same(_final(before, 0), _final(after, 0))
    ok = skipped == [2] and not touched and went_on
    seen = f"ranks {touched} changed" if touched else f"skipped steps {skipped} of 3"
    return _check("NaN", ok, "vetoed" if ok else seen, "step 2 vetoed on every rank, 3 taken")


def _bytes_as_planned(trial: RunDir, num_ranks: int, expected: ExpectedBytes) -> Check:
    wrong = []
    for rank in range(num_ranks):
        held, planned = TrialHeld.load(held_file(trial, rank)), expected(rank)
        for part in ("parameters", "gradients", "optimizer"):
            if getattr(held, part) != getattr(planned, part):
                wrong.append(f"rank {rank} {part} {getattr(held, part):,}")
    total = TrialHeld.load(held_file(trial, 0))
    measured = f"{total.parameters + total.gradients + total.optimizer:,}"
    return _check("bytes", not wrong, "; ".join(wrong) or measured, f"{expected(0).total:,}")


def _is_restored(trial: RunDir, num_ranks: int) -> Check:
    lost = [r for r in range(num_ranks) if not TrialHeld.load(held_file(trial, r)).restored]
    return _check("state", not lost, f"lost on ranks {lost}" if lost else "kept", "kept")


def _can_fail(one: RunDir, broken: RunDir) -> Check:
    """Check that the checks above do notice a gradient one percent too large."""
    curve = _same_curve(read_training(one.training), read_training(broken.training))
    norms = next(check for check in curve if check.name == "norm")
    return _caught(not norms.ok and not _same_weights(one, broken).ok)


def _caught(is_seen: bool) -> Check:
    return _check("broken", is_seen, "caught" if is_seen else "not seen", "caught")


def _final(trial: RunDir, rank: int) -> Weights:
    return _load(state_file(trial, rank))


def _load(path: Path) -> Weights:
    weights: Weights = torch.load(path, weights_only=True)
    return weights


def _is_same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _distance(expected: Weights, found: Weights) -> float:
    """Return the worst tensor's largest difference, over the tensor's largest value."""
    if expected.keys() != found.keys():
        return math.inf
    return max(
        _share_of(_largest(expected[name] - found[name]), _largest(expected[name]))
        for name in expected
    )


def _relative(a: float, b: float | None) -> float:
    return math.inf if b is None else _share_of(abs(a - b), max(abs(a), 1e-12))


def _limit(name: str, measured: float, allowed: float) -> Check:
    return _check(name, measured <= allowed, f"{measured:.1e}", f"{allowed:.0e}")


def _check(name: str, ok: bool, measured: str, allowed: str) -> Check:
    return Check(name=name, ok=ok, measured=measured, allowed=allowed)
