"""Bytes of state each rank holds, by strategy: measured, planned, and by the formula.

    python benchmarks/strategy_memory.py [--ranks 2 4]

fp32 master weights, bf16 compute, AdamW. P is the number of parameters, W of ranks. At rest:
weights and optimizer after a step, gradients before it. `gathered` is what zero2 and zero3 hold of
other ranks' weights between forward and backward, seen in FSDP's own buffers. Exits 1 where a
measured number is not the planned one.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines report AMX and trap on it, which kills bf16 on the CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import argparse
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.job import load_job
from paceline.machine.facts import probe
from paceline.machine.group import join_group
from paceline.machine.topology import RankId
from paceline.plan.planner import estimate_rank, make_plan, measure_model
from paceline.plan.policy import effective_config
from paceline.records import Plan, StateBytes
from paceline.strategies import engine as engine_module
from paceline.strategies import find_strategy
from paceline.strategies.base import EngineParts
from paceline.strategies.clock import HostClock
from paceline.strategies.shape import ModelShape

# 1003 rows and 5 layers: nothing divides evenly, so that padding is part of what is compared.
SETTINGS = [
    "data.source=synthetic", "model.vocab_size=1003", "model.num_layers=5", "data.seq_len=32",
    "train.eval_every=off", "train.eval_samples=all", "launch.device=cpu", "precision.mode=bf16",
    "train.micro_batch_size=2", "optim.name=adamw",
]  # fmt: skip
FORMULAS = {
    "ddp": "16 P",
    "zero1": "8 P + 8 P/W",
    "zero2": "16 P/W",
    "zero3": "16 P/W",
    "zero2_hybrid": "16 P/S",
    "zero3_hybrid": "16 P/S",
}


def overrides(name: str, ranks: int) -> list[str]:
    hybrid = [f"strategy.shard_size={ranks // 2}"] if name.endswith("_hybrid") else []
    return [*SETTINGS, f"strategy.name={name}", f"launch.nproc={ranks}", *hybrid]


def measure_rank(name: str, ranks: int, rank: int, folder: str) -> None:
    """One rank: a step by hand, and what it holds before, in the middle and after it."""
    torch.set_num_threads(1)
    job = load_job("lm_tiny", overrides(name, ranks))
    plan = make_plan(job, probe())
    store = dist.FileStore(f"{folder}/store", ranks)
    join_group("gloo", RankId(rank, rank, ranks), torch.device("cpu"), store, 60)
    config = effective_config(job.config, plan.attention.value)
    parts = EngineParts(config, plan, job.workload, torch.device("cpu"))
    engine: Any = find_strategy(plan.strategy.value).build(parts)
    seen: list[int] = []
    plain = engine_module.normalise

    def between(loss: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(gathered_bytes(engine.module))
        return plain(loss, scale)

    engine_module.normalise = between  # called between forward and backward
    clock = HostClock()
    clock.begin(1)
    batch = {"tokens": torch.randint(config.model.vocab_size, (2, config.data.seq_len + 1))}
    engine.forward_backward([batch], 1.0, clock)
    gradients = engine.held().gradients
    engine.step(1e-3, clock)
    held = engine.held()
    measured = {
        "parameters": held.parameters,
        "gradients": gradients,
        "optimizer": held.optimizer,
        "gathered": seen[0],
        "gathered_after": gathered_bytes(engine.module),
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(measured))
    os._exit(0)


def gathered_bytes(module: nn.Module) -> int:
    """Whole weights that FSDP holds now, of every unit."""
    total = 0
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", lambda: None)()
        group = state._fsdp_param_group if state is not None else None
        for parameter in group.fsdp_params if group is not None else ():
            total += sum(out.untyped_storage().nbytes() for out in parameter.all_gather_outputs)
    return total


def measure(name: str, ranks: int) -> list[dict[str, int]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=measure_rank, args=(name, ranks, rank, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(ranks)]


def planned(name: str, ranks: int) -> tuple[Plan, ModelShape, list[StateBytes]]:
    job = load_job("lm_tiny", overrides(name, ranks))
    plan = make_plan(job, probe())
    config = effective_config(job.config, plan.attention.value)
    model = measure_model(job.workload, config)
    return plan, model, [estimate_rank(plan, config, model, r) for r in range(ranks)]


def formula_bytes(name: str, num_parameters: int, ranks: int) -> float:
    if name == "ddp":
        return 16 * num_parameters
    if name == "zero1":
        return 8 * num_parameters + 8 * num_parameters / ranks
    return 16 * num_parameters / (ranks // 2 if name.endswith("_hybrid") else ranks)


def compare(name: str, ranks: int) -> bool:
    plan, model, expected = planned(name, ranks)
    found = measure(name, ranks)
    P, right = plan.model.num_trainable, True
    for rank, (own, plans) in enumerate(zip(found, expected, strict=True)):
        measured = own["parameters"] + own["gradients"] + own["optimizer"]
        same = measured == plans.total
        right &= same
        formula = formula_bytes(name, P, ranks)
        print(
            f"{name:<13} {ranks:>5} {rank:>4} {measured:>12,} {plans.total:>12,} "
            f"{FORMULAS[name]:>12} {formula:>12,.0f} {measured / formula:>7.4f} "
            f"{own['gathered'] / P:>8.3f} P {'' if same else '  NOT AS PLANNED'}"
        )
    if name == "zero1":
        total = sum(own["optimizer"] for own in found) - 4 * len(model.trainable)
        largest = 8 * max(parameter.numel for parameter in model.trainable)
        spread = max(abs(own["optimizer"] - total / ranks) for own in found)
        print(f"  zero1: state over all ranks {total:,} = 8 P exactly: {total == 8 * P};")
        print(f"  no rank is off by more than its largest parameter: {spread <= largest}")
        right &= total == 8 * P and spread <= largest
    if name == "zero2":
        padded = expected[0].gathered
        right &= all(own["gathered"] == padded for own in found)
        print(f"  zero2: gathered after forward {found[0]['gathered']:,}, planned {padded:,} (2 P)")
        print(f"  zero2: still gathered after the step {found[0]['gathered_after']:,}")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    print(
        f"{'strategy':<13} {'ranks':>5} {'rank':>4} {'measured':>12} {'planned':>12}"
        f" {'formula':>12} {'bytes':>12} {'ratio':>7} {'gathered':>10}"
    )
    right = True
    for ranks in arguments.ranks:
        for name in FORMULAS:
            if not name.endswith("_hybrid") or ranks >= 4:
                right &= compare(name, ranks)
    print("every measured number is the planned one" if right else "NOT as planned")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
