"""What "computes what one process computes" means: the settings, and how close is the same.

SGD and not AdamW: AdamW divides the gradient by its own size and hides a wrong scale.
"""

import pytest
import torch

from tests.harness import RankEnds

STEPS = 8
SGD = [
    "optim.name=sgd", "optim.lr=0.5", "optim.weight_decay=0.01", f"train.steps={STEPS}",
    "optim.schedule.warmup_steps=2",
]  # fmt: skip
BATCH = ["train.global_batch_size=16", "train.log_every=3", "data.num_workers=0"]


def tiny_model() -> list[str]:
    return [
        "data.source=synthetic",
        "data.synthetic_samples=512",
        "data.seq_len=16",
        "model.dim=32",
        "model.num_layers=2",
        "train.eval_every=off",
        "train.eval_samples=all",
        "launch.device=cpu",
    ]


def assert_same(reference: RankEnds, ends: RankEnds, name: str = "") -> None:
    assert_same_curve(reference, ends, name)
    assert_same_weights(reference, ends, name)


def assert_same_curve(reference: RankEnds, ends: RankEnds, name: str = "") -> None:
    assert [row.step for row in ends.rows] == list(range(1, STEPS + 1)), name
    losses = [(a.loss, b.loss) for a, b in zip(reference.rows, ends.rows, strict=True)]
    assert losses[0][1] == pytest.approx(losses[0][0], rel=1e-6), name
    norms = (ends.rows[0].grad_norm, reference.rows[0].grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), name
    for expected, found in losses:
        assert found == pytest.approx(expected, rel=1e-5), name
    assert losses[-1][0] < losses[0][0], "nothing was learned, so nothing was compared"


def assert_same_weights(reference: RankEnds, ends: RankEnds, name: str = "") -> None:
    expected = reference.states[0].weights
    first = ends.states[0].weights
    for key, weight in expected.items():
        torch.testing.assert_close(
            first[key],
            weight,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, key=key: f"{name} {key}: {text}",
        )
    for other in ends.states[1:]:
        for key in first:
            assert torch.equal(first[key], other.weights[key]), f"{name}: replicas differ in {key}"
