"""What Paceline adds to a step, against the best hand-written loop on the same model, on one core.

    python benchmarks/step_overhead.py [--rounds 120] [--json FILE]

Every contender trains the same model from the same weights on the same samples, with fused AdamW
and clipping at 1.0, in a process of its own, all pinned to one core. They take turns: a referee
lets one run SEGMENT steps at a time, in an order that changes every round, and only the segment
is timed, from one fetch of data to another. So all meet the same neighbours on a noisy machine.
A contender whose first 20 losses differ from the hand loop's by more than 1e-6 does not count.
Paceline runs its whole loop: ledger, heartbeat, telemetry, phases.
Goal: at most 1.03x on a 3 ms step and 1.01x on a 30 ms step.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Workload
from paceline.config.load import dump_config
from paceline.config.section import Positive, Section
from paceline.data.cursor import Order
from paceline.job import Job, load_job
from paceline.machine.facts import probe
from paceline.machine.group import join_group
from paceline.machine.topology import RankId
from paceline.plan.planner import make_plan
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.strategies.weights import fill_weights
from paceline.train.worker import RankRun
from paceline.workloads.lm.model import LM
from paceline.workloads.lm.workload import LMModel

SEED, LR, CLIP, COMPARED, WARMUP_SEGMENTS = 0, 1e-3, 1.0, 20, 2
SIZES = {
    "3 ms": {"dim": 64, "layers": 2, "seq_len": 32, "batch": 2, "segment": 20},
    "30 ms": {"dim": 128, "layers": 4, "seq_len": 64, "batch": 5, "segment": 8},
}
GOALS = {"3 ms": 1.03, "30 ms": 1.01}
Size = dict[str, int]


class Turns:
    """A contender's side of taking turns: `tick` at the start of every step."""

    def __init__(self, referee: Connection, segment: int) -> None:
        self.referee, self.segment, self.num_ticks = referee, segment, 0
        self.started_at = 0.0

    def tick(self) -> None:
        if self.num_ticks % self.segment == 0:
            if self.num_ticks:
                self.referee.send(time.perf_counter() - self.started_at)
            self.referee.recv()
            self.started_at = time.perf_counter()
        self.num_ticks += 1


TURNS: Turns


class Model(Section):
    dim: Positive = 96
    layers: Positive = 2
    seq_len: Positive = 32


class Tokens:
    """4096 samples of random tokens in memory; `batch` is one indexing operation."""

    def __init__(self, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(320, (4096, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index]}

    def batch(self, indices: Any) -> dict[str, Tensor]:
        TURNS.tick()
        return {"tokens": self.tokens[indices]}


class Bench(Workload):
    Model = Model
    unit = "tokens"

    def build_model(self, config: Any) -> nn.Module:
        return build_model(config.model.model_dump())

    def build_data(self, config: Any, split: str) -> Tokens | None:
        return Tokens(config.model.seq_len) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return loss_sum(model, batch["tokens"])

    def units_per_sample(self, config: Any) -> int:
        return config.model.seq_len

    def flops(self, config: Any) -> float:
        return 1.0


def build_model(size: Size) -> nn.Module:
    shape = LMModel(dim=size["dim"], num_layers=size["layers"], num_heads=4, num_kv_heads=4)
    model = LM(shape, size["seq_len"])
    fill_weights(model, model.init_module, SEED, torch.device("cpu"))
    return model


def loss_sum(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    targets = tokens[:, 1:].flatten()
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel()


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    total, count = loss_sum(model, tokens)
    return total * (1.0 / count)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def sample_ids(size: Size) -> np.ndarray:
    order = Order(4096, SEED)
    return order.at(np.arange(size["steps"] * size["batch"])).reshape(size["steps"], -1)


def hand_loop(size: Size) -> list[float]:
    """The best loop we can write by hand: no `.item()`, no logging, nothing but the step."""
    model, data, ids = build_model(size), Tokens(size["seq_len"]), sample_ids(size)
    optimizer, parameters = build_optimizer(model), list(model.parameters())
    losses = []
    for step in range(size["steps"]):
        tokens = data.batch(ids[step])["tokens"]
        loss = mean_loss(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def paceline_loop(size: Size) -> list[float]:
    """Our whole loop, with everything it records switched on."""
    overrides = [
        f"train.steps={size['steps']}", f"train.micro_batch_size={size['batch']}",
        f"model.dim={size['dim']}", f"model.layers={size['layers']}",
        f"model.seq_len={size['seq_len']}", f"optim.lr={LR}", "optim.schedule.name=constant",
        "data.num_workers=0", "launch.nproc=1", "launch.device=cpu",
    ]  # fmt: skip
    job = load_job(f"{__file__}:Bench", overrides)
    sys.modules["paceline_job_step_overhead"].TURNS = TURNS
    with tempfile.TemporaryDirectory() as folder:
        rows = _run_rank(job, RunDir.create("bench", Path(folder)))
    return [row.loss for row in rows]


def _run_rank(job: Job, run: RunDir) -> list[Any]:
    plan = make_plan(job, probe())
    run.config.write_text(dump_config(job.config))
    place = RankId(0, 0, 1)
    join_group(plan.backend.value, place, torch.device("cpu"), dist.HashStore(), 60)
    try:
        RankRun(job, plan, run, place).execute()
    finally:
        dist.destroy_process_group()
    return read_training(run.training)


class InOrder(Dataset):
    """The samples in the order of the run, for loops that bring their own loader."""

    def __init__(self, size: Size) -> None:
        self.tokens = Tokens(size["seq_len"]).tokens[sample_ids(size).ravel()]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def in_turn(items: list[Tensor]) -> Tensor:
    TURNS.tick()
    return torch.stack(items)


def loader(size: Size) -> DataLoader:
    return DataLoader(InOrder(size), batch_size=size["batch"], collate_fn=in_turn)


def accelerate_loop(size: Size) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build_model(size)
    model, optimizer, batches = accelerator.prepare(model, build_optimizer(model), loader(size))
    losses = []
    for tokens in batches:
        loss = mean_loss(model, tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def lightning_loop(size: Size) -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build_model(size), []

        def training_step(self, tokens: Tensor, index: int) -> Tensor:
            loss = mean_loss(self.model, tokens)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.model)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(size))
    return [float(loss) for loss in module.losses]


def trainer_loop(size: Size) -> list[float]:
    import transformers

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build_model(size), []

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            loss = mean_loss(self.model, tokens)
            self.losses.append(loss.detach())
            return {"loss": loss}

    class InOrderTrainer(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return None

    model = Wrapped()
    optimizer = build_optimizer(model.model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=size["steps"], per_device_train_batch_size=size["batch"],
            max_grad_norm=CLIP, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
            logging_strategy="no", remove_unused_columns=False, dataloader_num_workers=0,
        )  # fmt: skip
        InOrderTrainer(
            model=model, args=arguments, train_dataset=InOrder(size),
            data_collator=lambda items: {"tokens": in_turn(items)},
            optimizers=(optimizer, schedule),
        ).train()  # fmt: skip
    return [float(loss) for loss in model.losses]


CONTENDERS: dict[str, Callable[[Size], list[float]]] = {
    "hand loop": hand_loop,
    "paceline": paceline_loop,
    "accelerate": accelerate_loop,
    "lightning": lightning_loop,
    "hf trainer": trainer_loop,
}


def contend(name: str, size: Size, referee: Connection) -> None:
    """A contender's process: train in turns, then report the first losses."""
    global TURNS
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    TURNS = Turns(referee, size["segment"])
    sys.stdout = sys.stderr = open(os.devnull, "w")
    losses = CONTENDERS[name](size)
    referee.send(losses[:COMPARED])
    os._exit(0)


def race(size: Size, names: list[str], rounds: int) -> tuple[dict[str, list[float]], dict]:
    """Seconds a step of every segment, by contender and round; and the first losses."""
    context = multiprocessing.get_context("spawn")
    # One segment more than is timed: a segment ends where the next begins.
    size = size | {"steps": size["segment"] * (WARMUP_SEGMENTS + rounds + 1)}
    lines: dict[str, Connection] = {}
    processes = []
    for name in names:
        lines[name], theirs = context.Pipe()
        process = context.Process(target=contend, args=(name, size, theirs), daemon=True)
        process.start()
        processes.append(process)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for number in range(WARMUP_SEGMENTS + rounds):
        for name in draw.sample(names, len(names)):
            lines[name].send("go")
            elapsed_s = lines[name].recv()
            if number >= WARMUP_SEGMENTS:
                seconds[name].append(elapsed_s / size["segment"])
    losses = {}
    for name in names:
        lines[name].send("go")
        losses[name] = lines[name].recv()
    for process in processes:
        process.join(30)
    return seconds, losses


def judge(label: str, seconds: dict[str, list[float]], losses: dict) -> list[dict[str, Any]]:
    hand = seconds["hand loop"]
    middle = statistics.median(hand)
    print(f"\n{label} step: hand loop {middle * 1e3:.2f} ms, {len(hand)} rounds")
    print(
        f"{'':<12} {'median of pairs':>16} {'95 % interval':>17} {'minima':>8} {'added':>9}  losses"
    )
    rows = []
    for name, own in seconds.items():
        pairs = [a / b for a, b in zip(own, hand, strict=True)]
        low, high = median_interval(pairs)
        worst = max(abs(a - b) for a, b in zip(losses[name], losses["hand loop"], strict=True))
        # Two units in the last place of a float32 loss of 5.8: the mean is rounded differently.
        row = {
            "step": label, "contender": name, "ratio": statistics.median(pairs),
            "low": low, "high": high, "ratio_of_minima": min(own) / min(hand),
            "hand_ms": middle * 1e3, "rounds": len(hand), "losses_equal": worst <= 1e-6,
        }  # fmt: skip
        rows.append(row)
        word = "equal" if row["losses_equal"] else f"DIFFER by {worst:.1e}: does not count"
        print(
            f"{name:<12} {row['ratio']:>15.3f}x {low:>8.3f} to {high:.3f}"
            f" {row['ratio_of_minima']:>7.3f}x {(row['ratio'] - 1) * middle * 1e6:>6.0f} us  {word}"
        )
    return rows


def median_interval(values: list[float]) -> tuple[float, float]:
    """Order statistics that hold the median with 95 % confidence (binomial, normal limit)."""
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + reach))
    return ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    arguments = parser.parse_args()
    rows = []
    for label, size in SIZES.items():
        rows += judge(label, *race(size, arguments.only, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    print()
    for row in rows:
        if row["contender"] == "paceline":
            met = row["losses_equal"] and row["ratio"] <= GOALS[row["step"]]
            word = "met" if met else "MISSED"
            print(f"{row['step']}: {row['ratio']:.3f}x, goal {GOALS[row['step']]}x: {word}")


if __name__ == "__main__":
    main()
