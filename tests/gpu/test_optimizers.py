"""Optimizers on a CUDA device: each learns, a veto leaves the average, the same bits again."""

from pathlib import Path

import pytest
import torch

from paceline.records import Audit
from paceline.records.rundir import RunDir
from paceline.records.tables import read_training
from paceline.strategies.optimizers import KINDS
from tests.cli.program import paceline
from tests.gpu.test_one_gpu import TINY
from tests.harness import run_here
from tests.jobs import BAD_SETTINGS, poisoned_sample, write_bad_job
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]
RATES = {"sgd": 0.5, "adafactor": 0.02, "lion": 3e-4}


@pytest.mark.parametrize("optimizer", KINDS)
def test_each_learns_as_planned(optimizer: str, tmp_path: Path) -> None:
    more = [f"optim.name={optimizer}", f"optim.lr={RATES.get(optimizer, 3e-3)}", "optim.ema=0.9"]
    # The same few samples again and again: random tokens can only be learned by heart.
    more += ["train.steps=20", "optim.schedule.warmup_steps=2", "train.log_every=1"]
    more += ["train.micro_batch_size=8", "train.grad_accum=1", "data.synthetic_samples=8"]
    ends = run_here(tmp_path / "run", "lm_tiny", [*TINY, *more])
    assert ends.rows[-1].loss < ends.rows[0].loss - 0.05
    wrong = [proof.what for proof in Audit.load(ends.run.audit).mismatches]
    assert wrong in ([], ["process group timeout"]), "the harness has a shorter one of its own"
    assert ends.states[0].slot("ema").keys() == ends.states[0].weights.keys()


def test_a_veto_on_the_device_leaves_the_average(tmp_path: Path) -> None:
    job, sample = write_bad_job(tmp_path), poisoned_sample(rank=0, num_ranks=1)
    plain = [item for item in BAD_SETTINGS if not item.startswith("launch.")]
    averages = []
    for steps in (4, 5):
        more = [f"train.steps={steps}", "optim.ema=0.9", "optim.schedule.name=constant"]
        asked = [*plain, "launch.device=cuda", f"model.poison={sample}", "train.max_skips=1", *more]
        ends = run_here(tmp_path / str(steps), job, asked)
        assert [row.step for row in ends.rows if row.skipped] == [5][: steps - 4]
        averages.append(ends.states[0].slot("ema"))
    assert averages[0].keys() == {"weight", "bias"}
    assert all(torch.equal(averages[1][name], value) for name, value in averages[0].items())


def test_two_runs_are_the_same_bits(tmp_path: Path) -> None:
    """Of the program, whose ranks get cuBLAS's variable."""
    curves = []
    for name in "ab":
        ran = paceline(
            "train", "lm_tiny", "data.source=synthetic", "train.steps=30", "train.eval_every=off",
            "train.eval_samples=all", "launch.nproc=1", "train.deterministic=true",
            "audit.strict=true", "--out", name, cwd=tmp_path,
        )  # fmt: skip
        assert ran.code == 0, ran.err
        rows = read_training(RunDir(tmp_path / name).training)
        curves.append([(row.loss, row.grad_norm) for row in rows])
    assert curves[0] == curves[1] and len(curves[0]) == 30


def test_what_has_no_deterministic_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import torch\nfrom torch import nn\nfrom paceline import Workload\n"
        "class Data:\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index): return torch.full((4,), index / 64)\n"
        "class Job(Workload):\n"
        "    def build_model(self, config): return nn.Linear(4, 1)\n"
        "    def build_data(self, config, split): return Data() if split == 'train' else None\n"
        "    def loss(self, model, batch):\n"
        "        return model(batch).sum() + torch.histc(batch).sum(), len(batch)\n"
    )
    ran = paceline(
        "train", "job.py:Job", "train.steps=2", "train.deterministic=true", "launch.nproc=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 5 and "does not have a deterministic implementation" in ran.err
    assert "job.py:11 in loss" in ran.err and "train.deterministic=false" in ran.err
