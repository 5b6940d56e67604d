"""The loss of fp8 beside that of bf16 on real text, step by step.

    python benchmarks/fp8_loss.py [--steps 1000] [--recipes tensorwise gathered rowwise ...]
        [--set KEY=VALUE ...]

Trains a small decoder on Python's own sources by `paceline train`, all at once: in bf16, in each of
the recipes of fp8 (`gathered`: tensorwise, by zero3 with weights that were gathered in fp8), and in
bf16 with other kernels, whose sums have another order. Same seed, same data, same order. Prints
means over windows of steps, how far each is from bf16 at the worst window after the warm-up, and
whether fp8 is within 1 %. The other bf16 shows what rounding alone does. On a CPU fp8 is emulated:
the same rounding, slowly.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from subprocess import DEVNULL, PIPE, Popen

import numpy as np
import torch

from paceline.records.tables import read_training

WINDOW = 50
ALLOWED = 0.01
ZERO3 = ["strategy.name=zero3", "precision.fp8_all_gather=on"]
RECIPES = {
    "tensorwise": ["precision.fp8_recipe=tensorwise"],
    "gathered": ["precision.fp8_recipe=tensorwise", *ZERO3],
    "rowwise": ["precision.fp8_recipe=rowwise"],
    "rowwise_gw_hp": ["precision.fp8_recipe=rowwise_gw_hp"],
}
MODEL = [
    "data.source=stdlib", "data.seq_len=512", "model.dim=1024", "model.num_layers=4",
    "model.num_heads=8", "model.num_kv_heads=8", "train.micro_batch_size=16",
    "train.compile=default", "train.eval_every=off", "~train.eval_samples", "train.log_every=50",
    "optim.lr=3.0e-4", "launch.nproc=1", "precision.fp8_layers=all",
]  # fmt: skip


def start(mode: list[str], steps: int, overrides: list[str], folder: Path) -> Popen[str]:
    """Start a training of `steps` steps."""
    words = [*MODEL, *overrides, f"train.steps={steps}", *mode]
    if "precision.mode=bf16" in mode:
        words.remove("precision.fp8_layers=all")
    command = [sys.executable, "-m", "paceline", "train", "lm_tiny", *words, "--out", str(folder)]
    return Popen(command, stdout=DEVNULL, stderr=PIPE, text=True)


def curve_of(training: Popen[str], folder: Path) -> list[float]:
    """Wait for a training to end; return its losses."""
    _, said = training.communicate()
    if training.returncode:
        raise SystemExit(said[-3000:])
    return [float(loss) for loss in read_training(folder / "training.csv").column("loss")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["tensorwise"])
    parser.add_argument("--set", nargs="*", default=[])
    asked = parser.parse_args()
    if asked.steps <= WINDOW:
        parser.error(f"the first {WINDOW} steps are not compared: take more")
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}", flush=True)
    other = "train.kernels=torch" if on_gpu else "train.compile=off"
    modes = {
        "bf16": ["precision.mode=bf16"],
        "again": ["precision.mode=bf16", other],
        **{name: ["precision.mode=fp8", *RECIPES[name]] for name in asked.recipes},
    }
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place, name) for name in modes}
        trainings = {
            name: start(mode, asked.steps, asked.set, folders[name]) for name, mode in modes.items()
        }
        try:
            curves = {name: curve_of(trainings[name], folders[name]) for name in modes}
        finally:  # where one has failed, the others need not go on
            for training in trainings.values():
                training.terminate()
                training.wait()
    worst = tell(curves, asked.steps)
    for name in asked.recipes:
        verdict = "within" if worst[name] <= ALLOWED else "NOT within"
        print(f"{name}: at worst {worst[name]:.2%} from bf16, {verdict} {ALLOWED:.0%}")
    print(f"bf16 with {other}: at worst {worst['again']:.2%} from bf16")
    raise SystemExit(not all(worst[name] <= ALLOWED for name in asked.recipes))


def tell(curves: dict[str, list[float]], steps: int) -> dict[str, float]:
    """Print the means of all windows; return the largest distances from the first curve, NaN where
    a loss was."""
    found: dict[str, list[float]] = {name: [] for name in curves}
    for first in range(0, steps, WINDOW):
        means = {name: fmean(curve[first : first + WINDOW]) for name, curve in curves.items()}
        apart = {name: mean / means["bf16"] - 1 for name, mean in means.items()}
        for name in curves:
            found[name].append(abs(apart[name]))
        shown = ", ".join(f"{name} {means[name]:.4f} ({apart[name]:+.2%})" for name in curves)
        print(f"steps {first + 1:>5} to {first + WINDOW:>5}: {shown}")
    return {name: float(np.max(distances[1:])) for name, distances in found.items()}


if __name__ == "__main__":
    main()
