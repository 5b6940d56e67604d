"""What the ranks left behind, held against one process, against each other, against the plan."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.records import StateBytes
from paceline.records.rundir import RunDir
from paceline.records.tables import TrainingRow, read_training
from paceline.verify.records import Check, TrialHeld
from paceline.verify.trial import (
    AFTER,
    BEFORE,
    BROKEN,
    BYTES,
    EQUAL,
    POISONED,
    held_file,
    initial_file,
    state_file,
    trial_dir,
)

TOLERANCE = 1e-5  # relative, fp32
Weights = dict[str, Tensor]


def judge(
    run: RunDir, reference: RunDir, num_ranks: int, expected: Callable[[int], StateBytes]
) -> list[Check]:
    """Run every check of one strategy; `expected` gives the bytes that the plan has for a rank."""
    equal = trial_dir(run, EQUAL)
    one = trial_dir(reference, EQUAL)
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


def _same_curve(expected: Sequence[TrainingRow], found: Sequence[TrainingRow]) -> list[Check]:
    complete = [row.step for row in found] == [row.step for row in expected] and bool(expected)
    checks = []
    both = list(zip(expected, found, strict=False))
    for name, field in (("loss", "loss"), ("norm", "grad_norm"), ("eval", "val_loss")):
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in both]
        known = [(a, b) for a, b in pairs if a is not None]
        worst = max((_relative(a, b) for a, b in known), default=float("inf"))
        checks.append(_limit(name, worst if complete else float("inf"), TOLERANCE))
    return checks


def _same_weights(one: RunDir, equal: RunDir) -> Check:
    return _limit("weights", _distance(_final(one, 0), _final(equal, 0)), TOLERANCE)


def _replicas_agree(equal: RunDir, num_ranks: int) -> Check:
    first = _final(equal, 0)
    apart = [rank for rank in range(1, num_ranks) if not _is_same(first, _final(equal, rank))]
    return _check("replicas", not apart, f"ranks {apart} differ" if apart else "equal", "bit-equal")


def _weights_moved(equal: RunDir, num_ranks: int) -> Check:
    """Check that every tensor moved, on every rank: an optimizer that steps nothing passes all
    other checks that a reference which steps nothing would."""
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
    step 3 is taken as if nothing had been."""
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


def _bytes_as_planned(
    trial: RunDir, num_ranks: int, expected: Callable[[int], StateBytes]
) -> Check:
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
    """Check that a gradient one percent too large is seen by the very checks above."""
    curve = _same_curve(read_training(one.training), read_training(broken.training))
    norms = next(check for check in curve if check.name == "norm")
    caught = not norms.ok and not _same_weights(one, broken).ok
    return _check("broken", caught, "caught" if caught else "not seen", "caught")


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
        return float("inf")
    return max(
        float((expected[name] - found[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


def _relative(a: float, b: float | None) -> float:
    if b is None:
        return float("inf")
    return abs(a - b) / max(abs(a), 1e-12)


def _limit(name: str, measured: float, allowed: float) -> Check:
    return _check(name, measured <= allowed, f"{measured:.1e}", f"{allowed:.0e}")


def _check(name: str, ok: bool, measured: str, allowed: str) -> Check:
    return Check(name=name, ok=ok, measured=measured, allowed=allowed)
