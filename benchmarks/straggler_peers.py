"""The same slow ranks under Paceline and under TraceML: who names the rank and the part?

    python -m venv VENV && VENV/bin/pip install traceml-ai torch     (or a .pth to a torch)
    python benchmarks/straggler_peers.py --peer VENV/bin/python

One file of user code (model, data, optimizer) with a delay on rank 1 in its input, forward,
backward or optimizer; once under `paceline train`, once in a plain DDP loop under `traceml run`
with the instrumentation that its own page shows. Named right is: rank 1, and that part. TraceML's
answer is the `primary_diagnosis` of its final_summary.json, and is printed as it stands.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARTS = {"input": "data", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}
SLOW_RANK = 1
PLANTED = """
import os
import time

import torch
from torch import nn

PART, RANK, SECONDS = os.environ["PLANT_PART"], os.environ["PLANT_RANK"], os.environ["PLANT_S"]


def rest(part):
    if part == PART and os.environ.get("RANK") == RANK:
        time.sleep(float(SECONDS))


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rest("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        rest("backward")
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 1024), nn.Linear(1024, 1)
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(4)])

    def forward(self, x):
        x = self.first(x).relu()
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            x = Late.apply(x) if number == 2 else x
        return self.last(x)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        return torch.full((256,), (index % 97) / 97)


def collate(samples):
    rest("input")
    return torch.stack(samples)


def optimizer_of(model):
    made = torch.optim.SGD(model.parameters(), lr=1e-4)
    made.register_step_pre_hook(lambda *_: rest("optimizer"))
    return made
"""
OURS = """
import os
import torch.distributed as dist
from paceline import Workload
from planted import Data, Model, collate, optimizer_of


class Job(Workload):
    def build_model(self, config):
        os.environ["RANK"] = str(dist.get_rank()) if dist.is_initialized() else "-1"
        return Model()

    def build_data(self, config, split):
        return Data() if split == "train" else None

    def collate(self, samples):
        return collate(samples)

    def build_optimizer(self, model, config):
        return optimizer_of(model)

    def units_per_sample(self, config):
        return 1

    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""
THEIRS = """
import os
import torch
import torch.distributed as dist
import traceml_ai as traceml
from torch.nn.parallel import DistributedDataParallel
from planted import Data, Model, collate, optimizer_of

traceml.init(mode="auto")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer, data = optimizer_of(model), Data()
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler, collate_fn=collate)
for step, batch in enumerate(loader):
    if step == int(os.environ["STEPS"]):
        break
    with traceml.trace_step(model):
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""
# Its own command, with more patience for its collector: on a busy machine 15 s are too few.
RUN_PEER = (
    "import sys, traceml_ai.launcher.commands as c; c.DEFAULT_TCP_READY_TIMEOUT_SEC = 180.0;"
    "from traceml_ai.launcher.cli import main; sys.exit(main())"
)


def run_ours(folder: Path, env: dict[str, str], steps: int) -> tuple[bool, str]:
    """Return whether the rank and its part are named, and what is said."""
    out = folder / f"ours-{env['PLANT_PART']}"
    words = [
        "launch.nproc=2", "launch.device=cpu", f"train.steps={steps}", "data.num_workers=0",
        "train.micro_batch_size=32", "checkpoint.at_end=false",
    ]  # fmt: skip
    job = f"{folder / 'ours.py'}:Job"
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", job, *words, "--out", str(out)],
        env=env, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    if not (out / "findings.json").is_file():
        return False, done.stderr[-400:]
    found: list[dict[str, Any]] = json.loads((out / "findings.json").read_text())["findings"]
    slow = [f for f in found if f["kind"] == "straggler"]
    wanted = PARTS[env["PLANT_PART"]]
    right = [(f["rank"], f["evidence"]["part"]) for f in slow] == [(SLOW_RANK, wanted)]
    return right, "; ".join(f["words"] for f in slow) or "no straggler"


def run_theirs(folder: Path, env: dict[str, str], peer: Path) -> tuple[bool, str]:
    """Return the same of TraceML, by its primary diagnosis."""
    name = f"theirs-{env['PLANT_PART']}"
    done = subprocess.run(
        [str(peer), "-c", RUN_PEER, "run", "theirs.py", "--nproc-per-node=2", "--logs-dir",
         str(folder / "logs"), "--run-name", name],
        env=env, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    summary = folder / "logs" / name / "final_summary.json"
    if not summary.is_file():
        return False, (done.stdout + done.stderr)[-400:]
    told = json.loads(summary.read_text())["primary_diagnosis"]
    said = f"{told['status']}: {told['summary']}"
    text = json.dumps(told).lower()
    kind = str(told["kind"]).lower()
    part = {"input": "input", "forward": "forward", "backward": "backward", "optimizer": "optim"}
    names_rank = re.search(rf'\br{SLOW_RANK}\b|rank"?:? ?{SLOW_RANK}\b', text) is not None
    return "straggler" in kind and names_rank and part[env["PLANT_PART"]] in text, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, help="a Python that has traceml-ai")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds, in each step of rank 1")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in (("planted", PLANTED), ("ours", OURS), ("theirs", THEIRS)):
            (folder / f"{name}.py").write_text(text)
        paths = os.pathsep.join([str(ROOT), str(folder)])
        for part in asked.parts:
            env = os.environ | {
                "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PLANT_PART": part,
                "PLANT_RANK": str(SLOW_RANK), "PLANT_S": str(asked.delay),
                "STEPS": str(asked.steps),
            }  # fmt: skip
            env.pop("RANK", None)
            ours = run_ours(folder, env, asked.steps)
            theirs = run_theirs(folder, env, asked.peer) if asked.peer else (False, "not run")
            rows.append((part, ours, theirs))
            print(f"{part}\n  ours   {ours}\n  theirs {theirs}", flush=True)
    print(f"\nrank {SLOW_RANK} {asked.delay * 1e3:.0f} ms slower in      paceline   traceml")
    for part, (ours, _), (theirs, _) in rows:
        print(f"  {part:28} {'named' if ours else 'no':10} {'named' if theirs else 'no'}")
    sys.exit(0 if all(ours for _, (ours, _), _ in rows) else 1)


if __name__ == "__main__":
    main()
