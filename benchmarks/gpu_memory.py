"""The largest model that trains on one GPU, by what saves memory.

    python benchmarks/gpu_memory.py [--seq-len 4096] [--only NAME ...]

Layers of the shape of an 8B decoder (width 4096, SwiGLU 14336, 32 heads, 8 of keys, 128k tokens)
are stacked. For each way the peak is measured with few layers, on the device and on the host; it
grows by the same bytes with each one, so the largest stack follows, and is then really trained for
two steps. Prints parameters, peak and seconds a step.
"""

import argparse
import gc
import math
import time
from itertools import cycle
from typing import NamedTuple

import psutil
import torch
from gpu_loops import Bench, one_rank
from gpu_step import ours

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.strategies.clock import DeviceClock

GIB, MIB = 2**30, 2**20
FEW = (2, 4)
USABLE, USABLE_OF_HOST = 0.96, 0.85  # of the memory that torch can have, and of the host's
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
    "memory budget": [CHUNKED, "train.memory_budget=auto"],
    "zero3, state on the host": [CHUNKED, FULL, "strategy.name=zero3", "strategy.offload=true"],
}  # fmt: skip
# Few layers fit without recomputation; many grow as with all of it.
GROWS_AS = {"memory budget": WAYS["full recomputation"]}


class Tried(NamedTuple):
    peak: float  # bytes of the device
    on_host: float  # bytes
    step_s: float  # of the second step
    num_parameters: int


def train(way: list[str], layers: int, seq_len: int) -> Tried:
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
    step_s = time.perf_counter() - started_at
    on_host = psutil.Process().memory_info().rss
    return Tried(torch.cuda.max_memory_allocated(), on_host, step_s, num_parameters)


def clear() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def find_largest(name: str, seq_len: int) -> str:
    way, few = WAYS[name], []
    for layers in FEW:
        few.append(train(GROWS_AS.get(name, way), layers, seq_len))
        clear()
    device, host = (
        Growth((two - one) / (FEW[1] - FEW[0]), one)
        for one, two in ((few[0].peak, few[1].peak), (few[0].on_host, few[1].on_host))
    )
    fit = min(
        device.layers(torch.cuda.mem_get_info()[1] * USABLE),
        host.layers(probe().memory_bytes * USABLE_OF_HOST),
    )
    layers = int(fit)
    told = f"{device.each / GIB:5.2f} GiB a layer, {host.each / GIB:5.2f} of the host"
    while layers > FEW[1]:
        tried = try_out(way, layers, seq_len)
        clear()  # not while an error is held: what failed hangs on its frames
        if tried is not None:
            return (
                f"{told}, {layers:>3} layers, {tried.num_parameters / 1e9:5.2f} B parameters, peak"
                f" {tried.peak / GIB:6.1f} GiB, {tried.step_s:6.2f} s a step"
            )
        layers -= max(1, layers // 25)
    return f"{told}, not even {FEW[1] + 1} layers"


def try_out(way: list[str], layers: int, seq_len: int) -> Tried | None:
    try:
        return train(way, layers, seq_len)
    except torch.OutOfMemoryError:
        return None


class Growth(NamedTuple):
    each: float  # bytes of a layer
    first: float  # bytes of the smallest stack

    def layers(self, memory: float) -> float:
        """How many fit into so many bytes."""
        return FEW[0] + (memory - self.first) / self.each if self.each > MIB else math.inf


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
                text = find_largest(name, arguments.seq_len)
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
            clear()
            print(f"  {name:<26} {text}", flush=True)


if __name__ == "__main__":
    main()
