"""One GPU: Whisper small with LoRA, `paceline train` against Hugging Face's Seq2SeqTrainer.

    python benchmarks/asr_throughput.py [--steps 80] [--rounds 2] [--micro 16] [--recipe NAME]

Random weights, real shapes: the same model with the same adapters, the same features, 80 x 3000,
and tokens in the same batches from as many loader processes, bf16 over fp32 weights, fused AdamW,
clipping. Each contender runs in a process of its own, in an order that turns every round. A hook on
the model's own forward takes the time of both, so neither's bookkeeping is left out. `paceline,
bf16 base` is the recipe as it is: the frozen layers are kept in bf16, which Seq2SeqTrainer's bf16
does not do; `compiled` is that with train.compile=default, block by block.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.records.rundir import RunDir
from paceline.records.tables import read_steps
from paceline.workloads.asr.workload import SpeechRecognition

WARMUP, NUM_SAMPLES, NUM_TOKENS, WORKERS = 20, 512, 48, 2
WATCH = "ASR_THROUGHPUT"  # where a contender leaves its figures
ON_GPU = torch.cuda.is_available()


class MadeSpeech:
    """Samples by index: noise as features, random words; what every contender trains on."""

    fingerprint = "made"

    def __init__(self, num_mels: int, num_frames: int, lesson: Any) -> None:
        draws = np.random.default_rng(0)
        self.features = torch.from_numpy(
            draws.standard_normal((16, num_mels, num_frames)).astype(np.float32)
        )
        words = ["".join(draws.choice(list("abcdefgh "), NUM_TOKENS)) for _ in range(NUM_SAMPLES)]
        self.lessons = [lesson(text) for text in words]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets = map(torch.tensor, self.lessons[index])
        return {"features": self.features[index % 16], "inputs": inputs, "targets": targets}


class MadeWhisper(SpeechRecognition):
    """The workload as it is, but for where the features come from."""

    def prepare(self, config: Any, say: Any) -> dict[str, Any]:
        return {"hf_weights": "random"}

    def build_data(self, config: Any, split: str) -> Any:
        if split == "val":
            return None
        known, speller = self.known(config), self.speller(config.model)
        return MadeSpeech(known.num_mel_bins, known.max_source_positions * 2, speller.lesson)

    def collate(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)

    def build_model(self, config: Any) -> nn.Module:
        model = super().build_model(config)
        if torch.get_default_device().type != "meta":
            watch(model, config.train.steps, config.train.micro_batch_size)
        return model


def watch(model: nn.Module, steps: int, micro: int) -> None:
    """Time what lies between two calls of the model's forward, and leave the figures in a file."""
    seen = {"calls": 0, "started_at": 0.0}

    def tick(module: nn.Module, *_: Any) -> None:
        if not module.training or next(module.parameters()).is_meta:
            return
        seen["calls"] += 1
        if seen["calls"] in (WARMUP, steps):
            if ON_GPU:
                torch.cuda.synchronize()
            if seen["calls"] == WARMUP:
                seen["started_at"] = time.perf_counter()
                return
            elapsed_s = time.perf_counter() - seen["started_at"]
            figures = {
                "samples_per_s": (steps - WARMUP) * micro / elapsed_s,
                "peak_bytes": torch.cuda.max_memory_allocated() if ON_GPU else 0,
            }
            Path(os.environ[WATCH]).write_text(json.dumps(figures))

    model.register_forward_pre_hook(tick)


def overrides(asked: argparse.Namespace) -> list[str]:
    return [
        f"train.steps={asked.steps}", "train.epochs=off", f"train.micro_batch_size={asked.micro}",
        "train.eval_every=off", "train.best=auto", "train.stop_after=off", "train.log_every=20",
        f"data.num_workers={WORKERS}", "checkpoint.every=off", "checkpoint.at_end=false",
        "optim.schedule.warmup_steps=5", "precision.mode=bf16", "launch.nproc=1",
    ]  # fmt: skip


def paceline(asked: argparse.Namespace, base: str, compiled: str = "off") -> None:
    out = Path(tempfile.mkdtemp()) / "run"
    more = [] if compiled == "off" else [f"train.compile={compiled}", "train.compile_scope=blocks"]
    told = subprocess.run(
        [sys.executable, "-m", "paceline", "train", asked.recipe,
         f"workload={__file__}:MadeWhisper", *overrides(asked), f"model.base={base}",
         *more, "--out", str(out)],
        capture_output=True, text=True,
    )  # fmt: skip
    if told.returncode:
        sys.exit(told.stdout[-2000:] + told.stderr[-3000:])
    place, rows = Path(os.environ[WATCH]), read_steps(RunDir(out).steps(0))
    phases = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "unaccounted_s")
    medians = {name: float(np.median(rows.since(WARMUP).column(name))) for name in phases}
    place.write_text(json.dumps(json.loads(place.read_text()) | {"phases": medians}))


def hugging_face(asked: argparse.Namespace) -> None:
    """Train by Seq2SeqTrainer, as its guides for Whisper do."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from paceline.job import load_job

    torch.backends.cuda.matmul.allow_tf32 = True
    job = load_job(asked.recipe, [*overrides(asked), "model.base=fp32"])
    workload = MadeWhisper()
    workload.prepared = {"hf_weights": "random"}
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = SpeechRecognition.build_model(workload, job.config)
    del model.rules
    watch(model, asked.steps, asked.micro)
    data, optim = workload.build_data(job.config, "train"), job.config.optim

    def collate(samples: list[Any]) -> dict[str, Any]:
        batch = torch.utils.data.default_collate(samples)
        return {
            "input_features": batch["features"],
            "decoder_input_ids": batch["inputs"],
            "labels": batch["targets"],
        }

    arguments = Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=asked.steps,
        per_device_train_batch_size=asked.micro,
        learning_rate=optim.lr,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        weight_decay=optim.weight_decay,
        max_grad_norm=1.0,
        warmup_steps=5,
        bf16=True,
        use_cpu=not ON_GPU,
        optim="adamw_torch_fused" if ON_GPU else "adamw_torch",
        dataloader_num_workers=WORKERS,
        dataloader_pin_memory=ON_GPU,
        remove_unused_columns=False,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Seq2SeqTrainer(model=model, args=arguments, train_dataset=data, data_collator=collate).train()


CONTENDERS = {
    "Seq2SeqTrainer": hugging_face,
    "paceline": lambda asked: paceline(asked, "fp32"),
    "paceline, bf16 base": lambda asked: paceline(asked, "bf16"),
    "paceline, compiled": lambda asked: paceline(asked, "bf16", "default"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--recipe", default="whisper_small_lora")
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS)
    parser.add_argument("--only", help="run one contender in this process")
    asked = parser.parse_args()
    if asked.only:
        CONTENDERS[asked.only](asked)
        return
    print(describe(asked), flush=True)
    names = asked.contenders or list(CONTENDERS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(asked.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            figures = run(name, asked)
            found[name].append(figures)
            rate, peak = figures["samples_per_s"], figures["peak_bytes"] / 2**30
            print(f"round {turn}  {name:20s}  {rate:8.1f} samples/s  {peak:6.2f} GiB", flush=True)
            for phase, seconds in figures.get("phases", {}).items():
                print(f"    {phase:14s} {seconds * 1e3:7.1f} ms", flush=True)
    first = max(row["samples_per_s"] for row in found["Seq2SeqTrainer"])
    memory = max(row["peak_bytes"] for row in found["Seq2SeqTrainer"])
    for name, rows in found.items():
        best = max(row["samples_per_s"] for row in rows)
        peak = max(row["peak_bytes"] for row in rows)
        share = f", {peak / memory:.3f}x its memory" if memory else ""
        print(f"{name}: {best:.1f} samples/s, {best / first:.3f}x Seq2SeqTrainer{share}")


def run(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp()) / "figures.json"
    command = [sys.executable, __file__, "--only", name, "--recipe", asked.recipe]
    command += ["--steps", str(asked.steps), "--micro", str(asked.micro)]
    told = subprocess.run(
        command, env={**os.environ, WATCH: str(place)}, capture_output=True, text=True
    )
    if not place.is_file():
        sys.exit(f"{name} failed:\n{told.stdout[-2000:]}\n{told.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(place.read_text())
    return figures


def describe(asked: argparse.Namespace) -> str:
    import transformers

    chip = torch.cuda.get_device_name() if ON_GPU else "CPU"
    return (
        f"{time.strftime('%Y-%m-%d')}  {chip}  torch {torch.__version__}  transformers"
        f" {transformers.__version__}  {asked.recipe}, batch {asked.micro}, {asked.steps} steps"
    )


if __name__ == "__main__":
    main()
