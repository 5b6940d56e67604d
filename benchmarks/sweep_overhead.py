"""What a sweep costs beside its runs.

    OMP_NUM_THREADS=1 python benchmarks/sweep_overhead.py [SECONDS_A_RUN]

A sweep of 12 runs of about 20 s each (6 cells, 2 repeats, 2 ranks) by the real program. A run's own
work is what its ranks do, from the first line that the first of them executes to the last verdict:
joining the group, building model and data, every step. The rest is ours: planning, starting ranks,
ending them, records, reports, the tables. It is read from the files of the sweep:

    inside        work of all runs over the wall time of the whole command       goal >= 0.97
    fixed cost    from one run's last verdict to the next one's first rank        goal <= 0.15 s

The command's own start (Python, torch, planning) and its end count in `inside`, and are printed. So
is the time from a run's first rank to its first step, which is the run's own and no sweep's.
"""

import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

CELLS, REPEATS, RANKS = 6, 2, 2
GOAL_INSIDE, GOAL_FIXED_S = 0.97, 0.15
STEP_S = 0.05  # the sleep that makes a step; the model beside it is tiny
JOB = """
import time
import torch
from torch import nn
from paceline import Workload

class Data:
    fingerprint = "numbers"
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.full((8,), float(index))

class Sleeper(Workload):
    def build_model(self, config): return nn.Linear(8, 1)
    def build_data(self, config, split): return Data() if split == "train" else None
    def loss(self, model, batch):
        time.sleep({step_s})
        return model(batch / 4096).square().sum(), len(batch)
"""


class Span(NamedTuple):
    """The work of one run, by the clock."""

    begin: float
    end: float
    steps_s: float


def work_of(run: Path) -> Span:
    ranks = [run / f"ranks/rank{rank}" for rank in range(RANKS)]
    beats = [run / f"heartbeat_rank{rank}.jsonl" for rank in range(RANKS)]
    begins = [json.loads(path.read_text().partition("\n")[0])["time"] for path in beats]
    ends = [json.loads((folder / "verdict.json").read_text())["ended_at"] for folder in ranks]
    with (ranks[0] / "steps.csv").open() as file:
        steps_s = sum(float(row["wall_s"]) for row in csv.DictReader(file))
    return Span(min(begins), max(ends), steps_s)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    folder = Path(tempfile.mkdtemp(prefix="sweep-overhead-"))
    (folder / "job.py").write_text(JOB.format(step_s=STEP_S))
    command = [
        sys.executable, "-m", "paceline", "sweep", "job.py:Sleeper", f"launch.nproc={RANKS}",
        "--axis", "optim.lr=" + ",".join(f"{n}e-4" for n in range(1, CELLS + 1)),
        "--repeats", str(REPEATS), "--steps", str(round(seconds / STEP_S)), "--out", "sweep",
        "sweep.loss_tolerance=0.99",
    ]  # fmt: skip
    began = time.time()
    done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    ended = time.time()
    if done.returncode:
        print(done.stderr[-3000:])
        return 1
    with (folder / "sweep/run_manifest.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    spans = sorted(work_of(folder / "sweep" / row["run_dir"]) for row in rows)
    inside = sum(span.end - span.begin for span in spans) / (ended - began)
    gaps = [after.begin - before.end for before, after in zip(spans, spans[1:], strict=False)]
    fixed = statistics.median(gaps)
    print(f"{len(spans)} runs of about {seconds:.0f} s, {ended - began:.1f} s in all")
    start_s, end_s = spans[0].begin - began, ended - spans[-1].end
    print(f"before the first rank {start_s:.2f} s, after the last {end_s:.2f} s")
    own = statistics.median(span.end - span.begin - span.steps_s for span in spans)
    print(f"inside a run, but not in a step: median {own:.3f} s (group, model, data, first batch)")
    print(f"between two runs: median {fixed:.3f} s, worst {max(gaps):.3f} s")
    verdicts = [
        (f"inside runs over wall time {inside:.4f} (goal {GOAL_INSIDE})", inside >= GOAL_INSIDE),
        (f"fixed cost a run {fixed:.3f} s (goal {GOAL_FIXED_S})", fixed <= GOAL_FIXED_S),
    ]
    for text, is_ok in verdicts:
        print(f"{'OK  ' if is_ok else 'MISS'} {text}")
    return 0 if all(is_ok for _, is_ok in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
