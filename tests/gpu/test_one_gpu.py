"""The same loop on a CUDA device: no synchronisation, the veto on the device, honest figures."""

import json
import math
from pathlib import Path

import pytest
import torch

from paceline.errors import Outcome
from tests.cli.program import paceline
from tests.harness import run_here
from tests.jobs import BAD_SETTINGS, poisoned_sample, write_bad_job
from tests.skips import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]

TINY = [
    "data.source=synthetic", "data.synthetic_samples=512", "data.seq_len=64", "model.dim=64",
    "train.eval_every=off", "train.eval_samples=all", "launch.device=cuda",
]  # fmt: skip


def test_the_command_line_trains_on_the_gpu(tmp_path: Path) -> None:
    ran = paceline(
        "train", "lm_tiny", "data.source=synthetic", "train.steps=60", "train.eval_every=off",
        "train.eval_samples=all", "launch.nproc=1", "--out", "run", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["precision"] == "bf16" and 0 < result["mfu"] < 1
    assert result["peak_active_bytes"] <= result["peak_reserved_bytes"]
    env = json.loads((tmp_path / "run/env.json").read_text())
    assert env["gpus"][0]["compute_capability"] and env["driver"] and env["cuda"]
    telemetry = (tmp_path / "run/telemetry.csv").read_text()
    assert ",gpu0," in telemetry
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    state = sum(plan["state_bytes"].values())
    assert state < result["peak_active_bytes"], "activations come on top of the state"


@pytest.mark.serial
def test_steps_take_the_time_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 50 ms each, handed over in a moment: every row shows its own time, the first and the
    last one too, and all rows together the time that passed."""
    from paceline.records.tables import read_steps
    from paceline.workloads.lm.workload import LanguageModel

    right = LanguageModel.loss

    def loss(self: LanguageModel, model: torch.nn.Module, batch: object) -> object:
        torch.cuda._sleep(100_000_000)  # about 50 ms of the device, none of the host
        return right(self, model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(LanguageModel, "loss", loss)
    ends = run_here(tmp_path / "run", "lm_tiny", [*TINY, "train.steps=40", "train.log_every=5"])
    rows = read_steps(ends.run.steps(0))
    later = [row.wall_s for row in rows if row.step > 5]  # the audit profiles step 3
    middle = sorted(later)[len(later) // 2]
    assert middle > 0.03
    assert all(wall_s == pytest.approx(middle, rel=0.05) for wall_s in later), later
    for row in rows:
        assert sum(row.phases_s.values()) == pytest.approx(row.wall_s, rel=0.005)


@pytest.mark.parametrize("more", [[], ["optim.ema=0.9"]], ids=["plain", "average"])
def test_a_step_adds_no_synchronisation(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises on any call that makes the host wait for the device, from step 2 on."""
    from paceline.strategies import optim as rates

    right = rates.learning_rate

    def watched(step: int, num_steps: int, optim: object) -> float:
        torch.cuda.set_sync_debug_mode("error" if 1 < step < num_steps else "default")
        return right(step, num_steps, optim)  # type: ignore[arg-type]

    monkeypatch.setattr(rates, "learning_rate", watched)
    try:
        asked = [*TINY, "train.steps=30", "train.log_every=4", *more]
        ends = run_here(tmp_path / "run", "lm_tiny", asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ends.verdicts[0].outcome is Outcome.OK and len(ends.rows) == 30


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_the_veto_works_on_the_device(optimizer: str, tmp_path: Path) -> None:
    job, sample = write_bad_job(tmp_path), poisoned_sample(rank=0, num_ranks=1)
    settings = [item for item in BAD_SETTINGS if not item.startswith("launch.")]
    overrides = [
        *settings, "launch.device=cuda", f"model.poison={sample}", f"optim.name={optimizer}",
        "train.max_skips=1",
    ]  # fmt: skip
    ends = run_here(tmp_path / "run", job, overrides)
    assert ends.verdicts[0].outcome is Outcome.OK
    assert [row.step for row in ends.rows if row.skipped] == [5]
    assert all(torch.isfinite(w).all() for w in ends.states[0].weights.values())
    assert all(math.isfinite(row.loss) for row in ends.rows if row.step != 5)
    overrides[-1] = "train.max_skips=0"
    stopped = run_here(tmp_path / "stopped", job, overrides)
    assert stopped.verdicts[0].outcome is Outcome.NAN and stopped.verdicts[0].bad_step == 5


def test_gpu_and_cpu_compute_the_same(tmp_path: Path) -> None:
    """fp32, SGD, the same weights and samples: the curves agree as far as sums of floats do."""

    def drawn_on_cpu(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        if not tensor.is_meta:
            tensor.copy_(torch.randn(tensor.shape, device="cpu") * std + mean)

    settings = [
        *TINY,
        "precision.mode=fp32",
        "precision.matmul=highest",
        "optim.name=sgd",
        "optim.lr=0.1",
        "train.steps=20",
    ]
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.nn.init, "normal_", drawn_on_cpu)
    try:
        on_gpu = run_here(tmp_path / "gpu", "lm_tiny", settings)
        on_cpu = run_here(tmp_path / "cpu", "lm_tiny", [*settings, "launch.device=cpu"])
    finally:
        patch.undo()
    for a, b in zip(on_gpu.rows, on_cpu.rows, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
    assert on_gpu.rows[0].loss != on_gpu.rows[-1].loss
