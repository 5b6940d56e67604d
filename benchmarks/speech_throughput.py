"""Stage 1 at the size of wav2vec2-base: samples/s, MFU and how long steps wait for data.

    OMP_NUM_THREADS=1 python benchmarks/speech_throughput.py [--steps 60] [--micro 128]
        [--workers 8] [--variant KEY=VALUE[,KEY=VALUE]] ... [--profile] [--tiny]

The recipe limit_longest_1-3_stage1_bf16 on one device: random weights of the sizes of wav2vec2-base
(trained) and BERT-base (frozen), random pieces of 1 to 3 s, bf16. The corpus is made here: noise with
a melody in it, 16-bit FLAC of 4 to 16 s, a manifest with transcripts; loader processes decode it. Each
`--variant` is a run more. Beside them stands a bare loop over the same model, loss and optimizer with
batches that are on the device already: what the model allows. `--tiny` is a model for a CPU.

Goal: data wait under 2 % of a step.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from paceline.data.collate import collate
from paceline.job import Job, load_job
from paceline.plan.policy import effective_config

RECIPE, RATE = "limit_longest_1-3_stage1_bf16", 16000
GOAL = 0.02
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TINY = [
    "model.speech_config={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,"
    " intermediate_size: 64, conv_dim: [16, 16, 16], conv_kernel: [20, 8, 4],"
    " conv_stride: [10, 8, 4], num_conv_pos_embeddings: 8, num_conv_pos_embedding_groups: 2}",
    "model.text_config={vocab_size: 258, hidden_size: 32, num_hidden_layers: 1,"
    " num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 96}",
]  # fmt: skip
WORDS = "the garden gate was open and nobody heard the river under the old stone bridge".split()


def main() -> int:
    asked = parse()
    name = torch.cuda.get_device_name(0) if ON_GPU else "CPU"
    print(f"{datetime.now(UTC):%Y-%m-%d}, {name}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        root = Path(scratch) / "speech"
        seconds = make_corpus(root, asked.utterances)
        print(f"{asked.utterances} utterances, {seconds / 3600:.2f} hours of FLAC", flush=True)
        settings = common(asked, root)
        rows = dict[str, dict[str, Any]]()
        for number, variant in enumerate([[], *(text.split(",") for text in asked.variant)]):
            label = " ".join(variant) or "paceline train"
            rows[label] = run(Path(scratch) / f"run{number}", settings, variant, asked.steps)
            print(f"{label}: {json.dumps(rows[label])}", flush=True)
        if not asked.no_bare:
            rows["bare loop"] = bare(settings, asked)
    return tell(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro", type=int, default=128)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--utterances", type=int, default=256)
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--profile", action="store_true", help="kernels of the bare loop by time")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--scratch", type=Path, help="where the corpus and the runs are made")
    return parser.parse_args()


def make_corpus(root: Path, count: int) -> float:
    """Write a LibriSpeech-shaped tree with its manifest; return its seconds."""
    draws, total, lines = np.random.default_rng(0), 0.0, []
    folder = root / "train-clean-100" / "1" / "1"
    folder.mkdir(parents=True)
    for number in range(count):
        num_samples = int(draws.uniform(4, 16) * RATE)
        at = np.arange(num_samples) / RATE
        tone = np.sin(2 * np.pi * draws.uniform(90, 250) * at) * np.sin(2 * np.pi * 3 * at)
        wave = 0.3 * tone + 0.05 * draws.standard_normal(num_samples)
        file = folder / f"1-1-{number:04}.flac"
        soundfile.write(file, wave.astype(np.float32), RATE, subtype="PCM_16")
        text = " ".join(draws.choice(WORDS, round(2.7 * num_samples / RATE)))
        cells = (file.relative_to(root), num_samples, f"{num_samples / RATE:.6f}", text, 1)
        lines.append("\t".join(map(str, (*cells, "train-clean-100", ""))))
        total += num_samples / RATE
    head = "rel_path num_samples duration_sec transcript speaker split sha256".split()
    (root / "manifest.tsv").write_text("\n".join(["\t".join(head), *lines]) + "\n")
    return total


def common(asked: argparse.Namespace, root: Path) -> list[str]:
    return [
        *(TINY if asked.tiny else []), f"data.root_dir={root}", f"train.steps={asked.steps}",
        f"train.micro_batch_size={asked.micro}", f"data.num_workers={asked.workers}",
        "data.prefetch=4", "strategy.name=ddp", "train.eval_every=off", "checkpoint.every=off",
        "checkpoint.at_end=false", "train.log_every=10", "optim.schedule.warmup_steps=10",
        "launch.nproc=1", f"launch.device={DEVICE.type}",
        *([] if ON_GPU else ["precision.mode=auto"]),
    ]  # fmt: skip


def run(out: Path, settings: list[str], variant: list[str], steps: int) -> dict[str, Any]:
    """`paceline train` to its end; the figures of its result, and where the time of a step went."""
    command = [sys.executable, "-m", "paceline", "train", RECIPE, *settings, *variant]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    result = json.loads((out / "result.json").read_text())
    with (out / "ranks/rank0/steps.csv").open() as file:
        table = [row for row in csv.DictReader(file) if int(row["step"]) > steps // 3]
    total = {name: sum(float(row[name] or 0) for row in table) for name in table[0] if "_s" in name}
    wall = total.pop("wall_s")
    return {
        "samples_per_s": result["samples_per_s"],
        "step_ms": wall / len(table) * 1e3,
        "mfu": result["mfu"],
        "tflops": result["tflops_per_rank"],
        "note": result["mfu_note"],
        "data_wait": total["data_s"] / wall,
        "peak_gib": (result["peak_active_bytes"] or 0) / 2**30,
        "phases": {name: round(seconds / wall, 4) for name, seconds in total.items() if seconds},
    }


def bare(settings: list[str], asked: argparse.Namespace) -> dict[str, Any]:
    """The same model, loss and optimizer in a loop of our own, batches on the device."""
    job = load_job(RECIPE, settings)
    job.workload.prepared = job.workload.prepare(job.config, lambda text: None)
    model, batches = built(job)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, fused=ON_GPU)
    steps, began = asked.steps // 2, 0.0
    for step in range(5 + steps):
        if step == 5:
            synchronise()
            began = time.perf_counter()
        take_step(job, model, batches[step % len(batches)], optimizer, trained)
    synchronise()
    step_s = (time.perf_counter() - began) / steps
    if asked.profile and ON_GPU:
        show_kernels(lambda: take_step(job, model, batches[0], optimizer, trained))
    return {"samples_per_s": asked.micro / step_s, "step_ms": step_s * 1e3}


def built(job: Job) -> tuple[Any, list[Any]]:
    config = effective_config(job.config, "sdpa")
    torch.manual_seed(config.train.seed)
    model: Any = job.workload.build_model(config).to(DEVICE)  # weights are as random as any
    data, micro = job.workload.build_data(config, "train"), config.train.micro_batch_size
    assert data is not None
    rows = [np.arange(n * micro, (n + 1) * micro) % len(data) for n in range(4)]
    batches = [collate(data, row) for row in rows]
    return model.train(), [{k: v.to(DEVICE) for k, v in batch.items()} for batch in batches]


def take_step(job: Job, model: Any, batch: Any, optimizer: Any, trained: list[Any]) -> None:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss, size, *_ = job.workload.loss(model, batch)
    (loss / size).backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def show_kernels(step: Any) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            step()
        synchronise()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30), flush=True)


def tell(rows: dict[str, dict[str, Any]]) -> int:
    base = rows.get("bare loop", {}).get("samples_per_s", float("nan"))
    print(f"\n{'':40}  samples/s  of bare  step ms    MFU  data wait  peak GiB")
    for label, row in rows.items():
        if "failed" in row:
            print(f"{label:40}  failed: {row['failed']}")
            continue
        share = row["samples_per_s"] / base
        line = f"{label:40} {row['samples_per_s']:10,.0f}  {share:7.1%}  {row['step_ms']:7.1f}"
        if "data_wait" in row:
            mfu = "    -" if row["mfu"] is None else f"{row['mfu']:5.1%}"
            line += f"  {mfu}  {row['data_wait']:8.2%}  {row['peak_gib']:8.1f}"
        print(line)
    wait = rows["paceline train"].get("data_wait", 1.0)
    is_met = wait < GOAL
    print(f"goal: data wait under {GOAL:.0%} of a step: {'met' if is_met else 'not met'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
