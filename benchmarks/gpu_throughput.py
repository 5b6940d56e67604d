"""One GPU: `paceline train` against a plain hand-written loop on the same model, in one call.

    python benchmarks/gpu_throughput.py [--recipe lm_125m] [--steps 60]

Both: compiled, bf16 autocast over fp32 weights, fused AdamW, clipping, synthetic tokens. The hand
loop reads nothing back and logs nothing. Prints tokens/s of both, their ratio, MFU, and the share
of the matrix-product rate measured in the same run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from paceline.data.cursor import Order
from paceline.data.synthetic import SyntheticTokens
from paceline.job import load_job
from paceline.strategies.weights import fill_weights
from paceline.train.optim import build_optimizer

WARMUP = 15


def matmul_tflops(size: int = 8192, repeats: int = 20) -> float:
    """bf16 product of random square matrices: what the GEMM library reaches here."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    end.synchronize()
    return 2 * size**3 * repeats / (start.elapsed_time(end) / 1e3) / 1e12


def hand_tokens_per_s(recipe: str, steps: int) -> float:
    config = load_job(recipe, []).config
    micro, seq_len = config.train.micro_batch_size, config.data.seq_len
    data = SyntheticTokens(config.data.synthetic_samples, seq_len, config.model.vocab_size, 0)
    import numpy as np

    ids = Order(len(data), 0).at(np.arange(steps * micro)).reshape(steps, micro)
    batches = [data.batch(row)["tokens"].pin_memory() for row in ids]
    workload = load_job(recipe, []).workload
    with torch.device("meta"):
        model = workload.build_model(config)
    fill_weights(model, model.init_module, 0, torch.device("cuda"))
    model.compile(dynamic=False)
    parameters = list(model.parameters())
    optimizer = build_optimizer(parameters, config.optim, fused=True)
    for step, tokens in enumerate(batches):
        if step == WARMUP:
            torch.cuda.synchronize()
            started_at = time.perf_counter()
        tokens = tokens.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - started_at
    return (steps - WARMUP) * micro * seq_len / elapsed_s


def paceline_result(recipe: str, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "train", recipe, f"train.steps={steps}",
             f"observe.warmup_steps={WARMUP}", "launch.nproc=1", "--out", f"{folder}/run",
             "--json"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stderr)
        for row in Path(folder, "run/ranks/rank0/steps.csv").read_text().splitlines()[-3:]:
            print("   ", row)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lm_125m")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    rate = matmul_tflops()
    print(f"{torch.cuda.get_device_name()}: matmul {rate:.0f} TFLOP/s; torch {torch.__version__}")
    hands, ours = [], []
    for _ in range(2):
        torch.compiler.reset()
        hands.append(hand_tokens_per_s(arguments.recipe, arguments.steps))
        torch.cuda.empty_cache()
        ours.append(paceline_result(arguments.recipe, arguments.steps))
        print(f"hand {hands[-1]:,.0f} tokens/s; paceline {ours[-1]['tokens_per_s']:,.0f} tokens/s")
    best = max(ours, key=lambda result: result["tokens_per_s"])
    print(
        f"{arguments.recipe}: paceline / hand = {best['tokens_per_s'] / max(hands):.3f};"
        f" MFU {best['mfu']:.1%}; {best['tflops_per_rank'] / rate:.1%} of the matmul rate;"
        f" peak {best['peak_active_bytes'] / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    main()
