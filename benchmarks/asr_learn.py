"""Does a recogniser learn? A small Whisper from random weights on a made corpus, on CPU.

    OMP_NUM_THREADS=1 python benchmarks/asr_learn.py --corpus DIR [--steps N] [--out DIR]

DIR is what `scripts/make_speech_corpus --out DIR --utterances 600 --speakers 6 --max-words 7` has
made. It is prepared (16 kHz, trimmed), and a Whisper of 0.9 M parameters that hears 4 s and spells
bytes is trained on it by the workload asr. The figures are word error rates, by generation, before
and after: of the training split, and of dev-clean, whose sentences and whose speaker are in no
other split. Goal: below 20 % on the former, clearly lower than before on the latter.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from paceline.checkpoint.folder import CheckpointFolder
from paceline.checkpoint.survey import require_sound
from paceline.checkpoint.tensors import TensorFiles
from paceline.data.collate import collate
from paceline.job import reload_job
from paceline.records.rundir import RunDir
from paceline.strategies.stored import load_module

MODEL = [
    "model.hf_config={vocab_size: 384, d_model: 128, encoder_layers: 2, decoder_layers: 2,"
    " encoder_attention_heads: 4, decoder_attention_heads: 4, encoder_ffn_dim: 256,"
    " decoder_ffn_dim: 256, max_source_positions: 200, max_target_positions: 96}",
]
TRAINING = [
    "train.micro_batch_size=16", "optim.lr=2e-3", "optim.beta2=0.98", "optim.weight_decay=0.01",
    "optim.schedule.warmup_steps=60", "train.log_every=20", "precision.mode=fp32",
    "data.spec_time_masks=1", "data.spec_time_width_s=0.2", "data.spec_mel_masks=1",
    "data.spec_mel_width=12", "data.eval_max_tokens=64", "data.num_workers=0",
    "train.best=val/wer:min", "launch.device=cpu", "checkpoint.every=off",
]  # fmt: skip
GOAL, BATCH = 0.20, 32


def main() -> int:
    asked = parse()
    with tempfile.TemporaryDirectory() as scratch:
        out = asked.out or Path(scratch)
        root = prepare(asked.corpus, out / "speech_16k")
        started = time.monotonic()
        run = train(asked, root, out / "run")
        elapsed_s = time.monotonic() - started
        return tell(run, elapsed_s)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, help="keep what is made here")
    return parser.parse_args()


def prepare(corpus: Path, root: Path) -> Path:
    call("prepare", "speech", "--input-root", str(corpus), "--output-root", str(root), "--trim")
    return root


def train(asked: argparse.Namespace, root: Path, out: Path) -> Path:
    call(
        "train", "whisper_tiny_made", *MODEL, *TRAINING, f"data.root_dir={root}",
        f"train.steps={asked.steps}", f"train.eval_every={max(1, asked.steps // 6)}",
        "--out", str(out),
    )  # fmt: skip
    return out


def call(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "paceline", *words], check=True, stdout=sys.stderr)


def tell(out: Path, elapsed_s: float) -> int:
    run = RunDir(out)
    with run.training.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/wer")]
    print("step   val/loss  val/wer  val/cer    (dev-clean)")
    for row in rows:
        figures = [float(row[name]) for name in ("val_loss", "val/wer", "val/cer")]
        print(f"{row['step']:>5s}  {figures[0]:8.3f}  {figures[1]:6.1%}  {figures[2]:6.1%}")
    folder = CheckpointFolder.of_run(run, reload_job(run, "asr").config.checkpoint)
    before, after = score(run, None), score(run, folder.steps()[0])
    for split in ("train", "val"):
        print(f"{split:5s}  WER {before[split]:.1%} before, {after[split]:.1%} after")
    print(f"{rows[-1]['step']} steps, {elapsed_s:.0f} s from start to end, on CPU")
    is_met = after["train"] < GOAL and after["val"] < before["val"] - 0.2
    print(f"goal: training sentences below {GOAL:.0%}, held-out 20 points lower:"
          f" {'met' if is_met else 'not met'}")  # fmt: skip
    return 0 if is_met else 1


@torch.no_grad()
def score(run: RunDir, step: int | None) -> dict[str, float]:
    """Return the word error rate of both splits, of a checkpoint or of random weights."""
    job = reload_job(run, "asr")
    torch.manual_seed(job.config.train.seed)
    model = job.workload.build_model(job.config)
    if step is not None:
        folder = CheckpointFolder.of_run(run, job.config.checkpoint)
        load_module(TensorFiles(folder.path(step), require_sound(folder, step, print)), model)
    model.eval()
    found = {}
    for split in ("train", "val"):
        data = job.workload.build_data(job.config, split)
        ids = torch.arange(len(data)).numpy()
        parts = [
            job.workload.evaluate(model, collate(data, ids[first : first + BATCH]))["compared"]
            for first in range(0, len(ids), BATCH)
        ]
        pairs = [pair for part in parts for pair in part.values]
        found[split] = job.workload.metrics({"compared": pairs})["wer"]
    return found


if __name__ == "__main__":
    sys.exit(main())
