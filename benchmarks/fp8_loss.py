"""The loss of fp8 beside that of bf16 on real text, step by step.

    python benchmarks/fp8_loss.py [--steps 1000] [--recipe tensorwise] [KEY=VALUE ...]

Trains a small decoder twice on Python's own sources by `paceline train`: same seed, same data, same
order. Prints means over windows of steps, how far apart they are at the worst window after the
warm-up, and whether that is within 1 %. On a CPU fp8 is emulated: the same rounding, slowly.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import torch

from paceline.records.tables import read_training

WINDOW = 50
ALLOWED = 0.01
MODEL = [
    "data.source=stdlib", "data.seq_len=512", "model.dim=1024", "model.num_layers=4",
    "model.num_heads=8", "model.num_kv_heads=8", "train.micro_batch_size=16",
    "train.compile=default", "train.eval_every=off", "~train.eval_samples", "train.log_every=50",
    "optim.lr=3.0e-4", "launch.nproc=1", "precision.fp8_layers=all",
]  # fmt: skip


def losses_of(mode: list[str], steps: int, overrides: list[str], folder: Path) -> list[float]:
    started_at = time.perf_counter()
    words = [*MODEL, *overrides, f"train.steps={steps}", *mode]
    if "precision.mode=bf16" in mode:
        words.remove("precision.fp8_layers=all")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "lm_tiny", *words, "--out", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    elapsed_s = time.perf_counter() - started_at
    losses = [float(loss) for loss in read_training(folder / "training.csv").column("loss")]
    print(f"{mode[0]}: {len(losses)} steps in {elapsed_s:.0f} s", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}", flush=True)
    modes = {
        "bf16": ["precision.mode=bf16"],
        "fp8": ["precision.mode=fp8", f"precision.fp8_recipe={arguments.recipe}"],
    }
    with tempfile.TemporaryDirectory() as place:
        curves = {
            name: losses_of(mode, arguments.steps, arguments.overrides, Path(place, name))
            for name, mode in modes.items()
        }
    worst = 0.0
    for first in range(0, arguments.steps, WINDOW):
        wide, small = (fmean(curve[first : first + WINDOW]) for curve in curves.values())
        apart = abs(small - wide) / wide
        worst = max(worst, apart if first else 0.0)
        print(f"steps {first + 1:>5} to {first + WINDOW:>5}: {wide:.4f} {small:.4f} {apart:.2%}")
    verdict = "within" if worst <= ALLOWED else "NOT within"
    print(f"{arguments.recipe}: at worst {worst:.2%} apart, {verdict} {ALLOWED:.0%}")
    raise SystemExit(worst > ALLOWED)


if __name__ == "__main__":
    main()
