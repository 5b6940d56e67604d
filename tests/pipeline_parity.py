"""What "a pipeline computes what one process computes" means: settings, and how close is the same.

SGD in fp32, as in parity.py.
"""

from typing import Any

import pytest
import torch

from tests.harness import RankEnds

STEPS, BATCH = 4, 16
# A clip that bites in every step: a norm that is wrong on one rank moves the weights.
SGD = [
    "optim.name=sgd", "optim.lr=0.5", "optim.weight_decay=0.01", "optim.clip=0.4",
    "optim.schedule.warmup_steps=1", f"train.steps={STEPS}", "train.log_every=1",
    "data.num_workers=0", "checkpoint.at_end=false", "launch.device=cpu",
]  # fmt: skip
ONE = ["train.micro_batch_size=16", "train.grad_accum=1", "strategy.name=ddp"]
TWO_A_RANK = ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def pipeline(schedule: str, ranks: int = 2, dp: int = 1, accum: int = 1) -> list[str]:
    """`ranks` in all, as `dp` pipelines; the batch of a step is always the same."""
    stages = ranks // dp * (2 if schedule in TWO_A_RANK else 1)
    return [
        "strategy.name=pipeline", f"strategy.schedule={schedule}", f"strategy.stages={stages}",
        f"train.micro_batch_size={BATCH // dp // accum}", f"train.grad_accum={accum}",
        "strategy.microbatches=4", f"launch.nproc={ranks}",
    ]  # fmt: skip


def assert_same(reference: RankEnds, ends: RankEnds, name: str, rel: float = 1e-5) -> None:
    pairs = list(zip(reference.rows, ends.rows, strict=True))
    for expected, found in pairs:
        assert found.loss == pytest.approx(expected.loss, rel=rel), name
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=rel), name
        if expected.val_loss is None:
            assert found.val_loss is None, name
        else:
            assert found.val_loss == pytest.approx(expected.val_loss, rel=rel), name
    assert pairs[0][0].loss != pairs[-1][0].loss, "nothing was learned"
    weights = reference.states[0].weights
    for state in ends.states:
        assert set(state.weights) == set(weights), name
        for key, weight in weights.items():
            torch.testing.assert_close(
                state.weights[key], weight, rtol=10 * rel, atol=rel / 10, msg=f"{name}: {key}"
            )
