"""DDP on 2 ranks against one process on the same global batch: SGD, fp32, 50 steps, real processes.

    python benchmarks/ddp_parity.py

Prints the largest relative difference of the loss at step 1 (goal 1e-6) and over 50 steps (goal
1e-5), of the gradient norm at step 1, and whether the two replicas ended bit-equal.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.harness import run_here, run_ranks

STEPS = 50
JOB = [
    "data.source=synthetic", "data.synthetic_samples=4096", "data.seq_len=64", "model.dim=64",
    "train.eval_every=off", "train.eval_samples=all", "launch.device=cpu", "optim.name=sgd",
    "optim.lr=0.5", f"train.steps={STEPS}", "train.global_batch_size=16", "data.num_workers=0",
]  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = run_here(Path(folder, "one"), "lm_tiny", [*JOB, "train.micro_batch_size=16"])
        two = run_ranks(
            Path(folder, "two"), "lm_tiny", [*JOB, "train.micro_batch_size=4", "launch.nproc=2"]
        )
        pairs = [(a.loss, b.loss) for a, b in zip(one.rows, two.rows, strict=True)]
        norms = one.rows[0].grad_norm, two.rows[0].grad_norm
    apart = [abs(a - b) / a for a, b in pairs]
    states = [state.weights for state in two.states]
    equal = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    print(f"loss {pairs[0][0]:.4f} -> {pairs[-1][0]:.4f} in {STEPS} steps of SGD")
    print(f"step 1: loss apart by {apart[0]:.1e} (goal 1e-6)")
    print(f"step 1: gradient norm apart by {abs(norms[0] - norms[1]) / norms[0]:.1e}")
    print(f"over {STEPS} steps: loss apart by at most {max(apart):.1e} (goal 1e-5)")
    print(f"replicas bit-equal: {equal}")
    if apart[0] > 1e-6 or max(apart) > 1e-5 or not equal:
        raise SystemExit("MISSED")


if __name__ == "__main__":
    main()
