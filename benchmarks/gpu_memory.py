"""The largest model that trains on one GPU, by what saves memory.

    python benchmarks/gpu_memory.py [--seq-len 4096] [--only NAME ...]

Layers of the shape of an 8B decoder (width 4096, SwiGLU 14336, 32 heads, 8 of keys, 128k tokens)
are stacked. For each way the peak is measured with few layers; it grows by the same bytes with each
one, so the largest stack follows, and is then really trained for two steps. Prints parameters,
peak and seconds a step.
"""

import argparse
import gc
import time
from itertools import cycle

import torch
from gpu_step import ours
from gpu_throughput import Bench, one_rank

from paceline.job import load_job
from paceline.strategies.clock import DeviceClock

GIB = 2**30
FEW = (2, 4)
USABLE = 0.96  # of the memory that torch can have
SHAPE = [
    "model.dim=4096", "model.ffn_dim=14336", "model.num_heads=32", "model.num_kv_heads=8",
    "model.vocab_size=128256", "train.micro_batch_size=1", "train.compile=off",
    "data.synthetic_samples=16", "launch.overcommit=true", "precision.mode=bf16",
]  # fmt: skip
CHUNKED, FULL = "loss.chunk=2048", "train.activation_checkpointing=full"
WAYS = {
    "nothing": ["loss.chunk=off"],
    "chunked loss": [CHUNKED],
    "selective recomputation": [CHUNKED, "train.activation_checkpointing=selective"],
    "full recomputation": [CHUNKED, FULL],
    "full, inputs on the host": [CHUNKED, FULL, "train.activation_offload=true"],
    "all on the host": [CHUNKED, "train.activation_offload=true"],
    "8-bit AdamW": [CHUNKED, "optim.name=adamw8bit"],
    "full, host, 8-bit AdamW": [
        CHUNKED, FULL, "train.activation_offload=true", "optim.name=adamw8bit",
    ],
}  # fmt: skip


def train(way: list[str], layers: int, seq_len: int) -> tuple[float, float, int]:
    """Return the peak in bytes, the seconds of the second step, and the parameters."""
    settings = [*SHAPE, f"data.seq_len={seq_len}", f"model.num_layers={layers}", *way]
    bench = Bench(load_job("lm_1b", settings), 2)
    num_parameters = sum(p.numel() for p in bench.model.parameters())
    step, tokens, clock = ours(bench), cycle(bench.batches()), DeviceClock()
    started_at = 0.0
    for number in range(2):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        clock.begin(number)
        step(clock, next(tokens))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), time.perf_counter() - started_at, num_parameters


def clear() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def find_largest(way: list[str], seq_len: int) -> str:
    peaks = []
    for layers in FEW:
        peaks.append(train(way, layers, seq_len)[0])
        clear()
    each = (peaks[1] - peaks[0]) / (FEW[1] - FEW[0])
    memory = torch.cuda.mem_get_info()[1] * USABLE
    layers = int(FEW[0] + (memory - peaks[0]) / each)
    told = f"{each / GIB:5.2f} GiB a layer"
    while layers > FEW[1]:
        try:
            peak, step_s, count = train(way, layers, seq_len)
        except torch.OutOfMemoryError:
            clear()
            layers -= max(1, layers // 25)
            continue
        clear()
        return (
            f"{told}, {layers:>3} layers, {count / 1e9:5.2f} B parameters, peak"
            f" {peak / GIB:6.1f} GiB, {step_s:6.2f} s a step"
        )
    return f"{told}, not even {FEW[1] + 1} layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    free = torch.cuda.mem_get_info()[1] / GIB
    print(
        f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, {free:.0f} GiB, torch"
        f" {torch.__version__}, sequences of {arguments.seq_len}, one at a time",
        flush=True,
    )
    with one_rank():
        for name in arguments.only or WAYS:
            try:
                text = find_largest(WAYS[name], arguments.seq_len)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                clear()
            print(f"  {name:<26} {text}", flush=True)


if __name__ == "__main__":
    main()
